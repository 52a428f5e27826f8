"""The heartbeat page: what its writer says last is what a reader gets, whole, whatever happens to the writer."""

from __future__ import annotations

import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from quire.wire.heartbeat import PAGE_BYTES, Heartbeat, HeartbeatPage, Phase

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "heartbeat"
    HeartbeatPage.create(path).close()
    return path


def _write_raw(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_new_page_says_starting_since_ever(path: Path) -> None:
    assert HeartbeatPage.open(path).get_heartbeat() == Heartbeat(0, Phase.STARTING, 0, 0.0, 0.0, ())
    assert path.stat().st_size == PAGE_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_reader_sees_what_the_writer_says(path: Path) -> None:
    writer, reader = HeartbeatPage.open(path), HeartbeatPage.open(path)
    writer.incarnation = 3
    before = time.monotonic()
    writer.begin_step(["a", "b-ß"], expected_s=1.5)
    beat = reader.get_heartbeat()
    assert beat._replace(phase_start=0) == Heartbeat(3, Phase.EXECUTE, 1, 0, 1.5, ("a", "b-ß"))
    assert before <= beat.phase_start <= time.monotonic()
    assert beat.age(beat.phase_start + 2) == pytest.approx(2)
    writer.begin_phase(Phase.UPDATE)
    assert reader.get_heartbeat().request_ids == ("a", "b-ß"), (
        "a death while the result is taken in is a death in that step"
    )
    writer.begin_phase(Phase.IDLE)
    assert reader.get_heartbeat().request_ids == ()
    writer.begin_step(["c"])
    assert (reader.get_heartbeat().step, reader.get_heartbeat().request_ids) == (2, ("c",))


def test_stages_of_the_start_are_numbered_and_steps_are_counted_from_its_end(path: Path) -> None:
    writer, reader = HeartbeatPage.open(path), HeartbeatPage.open(path)
    assert (reader.get_heartbeat().phase, reader.get_heartbeat().step) == (Phase.STARTING, 0)
    for stage in (1, 2):
        writer.begin_stage(stage)
        assert (reader.get_heartbeat().phase, reader.get_heartbeat().step) == (Phase.STARTING, stage)
    writer.begin_phase(Phase.IDLE)
    assert reader.get_heartbeat().step == 0
    writer.begin_step(["a"])
    assert reader.get_heartbeat().step == 1


def test_the_request_that_is_taken_in_is_told_apart(path: Path) -> None:
    writer, reader = HeartbeatPage.open(path), HeartbeatPage.open(path)
    writer.begin_intake("newcomer-ß")
    writer.begin_step(["a", "b"])
    beat = reader.get_heartbeat()
    assert (beat.intake_id, beat.request_ids) == ("newcomer-ß", ("a", "b"))
    assert beat.suspects == ("newcomer-ß", "a", "b")
    writer.begin_phase(Phase.IDLE)
    assert reader.get_heartbeat().suspects == ("newcomer-ß",)
    writer.end_intake()
    assert reader.get_heartbeat().suspects == ()
    writer.begin_intake("x" * 5000)
    assert len(reader.get_heartbeat().intake_id) < 1024
    assert path.stat().st_size == PAGE_BYTES


def test_ids_beyond_the_page_are_cut_off(path: Path) -> None:
    writer = HeartbeatPage.open(path)
    ids = [f"request-{i:08d}" for i in range(10_000)]
    writer.begin_step(ids)
    read = HeartbeatPage.open(path).get_heartbeat().request_ids
    assert 3000 < len(read) < len(ids)
    assert list(read) == ids[: len(read)], "a part of an id is no id"
    assert path.stat().st_size == PAGE_BYTES


def test_what_the_writer_had_begun_to_write_is_not_read(path: Path) -> None:
    """A writer that died while it wrote leaves an odd sequence number: the phase is known, the ids are not."""
    writer = HeartbeatPage.open(path)
    writer.begin_step(["a"], expected_s=2.0)
    sequence = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert sequence % 2 == 0
    _write_raw(path, 0, struct.pack("<Q", sequence + 1))
    beat = HeartbeatPage.open(path).get_heartbeat()
    assert (beat.phase, beat.step, beat.expected_s, beat.request_ids) == (Phase.EXECUTE, 1, 2.0, ())


def test_garbage_is_read_as_something(path: Path) -> None:
    """The page belongs to a process that may have gone mad: reading it raises nothing."""
    for fill in (b"\xff", b"\x7f", b"\x02"):
        _write_raw(path, 0, fill * PAGE_BYTES)
        beat = HeartbeatPage.open(path).get_heartbeat()
        assert isinstance(beat.phase, Phase)
        assert isinstance(beat.request_ids, tuple)


def test_a_page_of_another_size_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"x")
    with pytest.raises((OSError, ValueError)):
        HeartbeatPage.open(short)
    with pytest.raises(OSError):
        HeartbeatPage.open(tmp_path / "none")


WRITER = """
import sys
from pathlib import Path
from quire.wire.heartbeat import HeartbeatPage, Phase
page = HeartbeatPage.open(Path(sys.argv[1]))
page.incarnation = 1
i = 0
while True:
    i += 1
    n = i % 40
    page.begin_step([f"{i}-{j}" for j in range(n)], expected_s=i)
    if i % 3 == 0:
        page.begin_phase(Phase.UPDATE, expected_s=i)
"""


@pytest.mark.parametrize("deaths", range(3))
def test_a_reading_is_never_half_of_two(path: Path, deaths: int) -> None:
    """Another process writes as fast as it can, and is killed over it."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env={"PYTHONPATH": str(SRC)}) as process:
        try:
            reader = HeartbeatPage.open(path)
            deadline = time.monotonic() + 60
            while reader.get_heartbeat().step < 10:
                assert time.monotonic() < deadline, "it does not write"
                time.sleep(0.001)
            last = 0
            for _ in range(3000):
                last = _check(reader.get_heartbeat(), last)
            assert last >= 10
        finally:
            process.kill()
    _check(HeartbeatPage.open(path).get_heartbeat(), last)


def _check(beat: Heartbeat, last: int) -> int:
    """One step's ids, number and expectation belong together, and time moves on."""
    assert beat.incarnation == 1
    if beat.request_ids:
        assert beat.request_ids == tuple(f"{beat.step}-{j}" for j in range(beat.step % 40))
        assert beat.expected_s == beat.step
    assert beat.step >= last
    return beat.step


def test_a_reader_never_waits_for_a_writer(path: Path) -> None:
    """A writer stopped in the middle of a write does not stop the reader."""
    _write_raw(path, 0, struct.pack("<Q", 7))
    done = threading.Event()
    thread = threading.Thread(target=lambda: (HeartbeatPage.open(path).get_heartbeat(), done.set()))
    thread.start()
    assert done.wait(60)
    thread.join()

"""The bytes of a recording: whatever happens to its end, what came before is read; damage elsewhere is said."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from quire.engine.recording import file as file_module
from quire.engine.recording.file import RecordingWriter
from quire.engine.recording.format import MAGIC, Abandon, AnyEvent, Pause, RecordingReader, encode_frame
from quire.errors import ConfigError

from ..harness import make_scheduler
from .recorded import encode, make_header, read

HEADER = make_header(make_scheduler(), {})
EVENTS: list[AnyEvent] = [Pause(at, 1) if at % 3 else Abandon(at) for at in range(25)]


def test_what_was_written_is_read() -> None:
    reader = read(encode(HEADER, EVENTS))
    assert reader.header == HEADER
    assert list(reader.events()) == EVENTS
    assert reader.torn_bytes == 0


def test_any_end_leaves_the_whole_frames() -> None:
    data, first = encode(HEADER, EVENTS), len(encode(HEADER, []))
    counts = set()
    for size in range(first, len(data)):
        reader = read(data[:size])
        events = list(reader.events())
        assert events == EVENTS[: len(events)]
        assert len(events) % 10 == 0
        assert (reader.torn_bytes == 0) == (encode(HEADER, events) == data[:size])
        counts.add(len(events))
    assert counts == {0, 10, 20}


def test_the_checksum_of_the_last_frame_may_be_wrong_and_no_other() -> None:
    data = bytearray(encode(HEADER, EVENTS))
    data[-1] ^= 1
    reader = read(bytes(data))
    assert len(list(reader.events())) == 20
    assert reader.torn_bytes > 0
    data[len(encode(HEADER, EVENTS[:10])) + 9] ^= 1
    with pytest.raises(ConfigError, match=r"damaged before byte \d+: the checksum"):
        list(read(bytes(data)).events())


def test_a_frame_of_absurd_length_is_refused() -> None:
    data = encode(HEADER, []) + (0xFFFFFFFF).to_bytes(4, "little") + bytes(100)
    with pytest.raises(ConfigError, match="longer than"):
        list(read(data).events())


def test_what_is_no_event_is_refused() -> None:
    data = encode(HEADER, []) + encode_frame(msgspec.msgpack.encode([[99, 0]]))
    with pytest.raises(ConfigError, match="damaged"):
        list(read(data).events())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no recording"),
        (b"PK\x03\x04 something else", "no recording"),
        (MAGIC, "header is complete"),
        (MAGIC + encode_frame(msgspec.msgpack.encode({"format": 7})), "format 7"),
        (MAGIC + encode_frame(msgspec.msgpack.encode({"format": 1})), "header of the recording cannot be read"),
        (MAGIC + encode_frame(b"\xc1"), "header of the recording cannot be read"),
    ],
)
def test_another_file_is_no_recording(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(data)


# -- the writer ------------------------------------------------------------------------------------------------------


def test_a_writer_writes_everything_and_only_to_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "rec"
    writer = RecordingWriter(path, HEADER)
    for event in EVENTS:
        writer.emit(event)
    writer.close()
    writer.emit(EVENTS[0])
    writer.close()
    with path.open("rb") as file:
        assert list(RecordingReader(file).events()) == EVENTS
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="the file exists"):
        RecordingWriter(path, HEADER)
    with pytest.raises(ConfigError, match="No such file"):
        RecordingWriter(tmp_path / "none" / "rec", HEADER)


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RecordingWriter(tmp_path / "rec", HEADER)

    def full(fd: int, data: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    writer.emit(EVENTS[0])
    writer.close()
    monkeypatch.undo()
    writer.emit(EVENTS[1])
    assert "ends here: No space left on device" in caplog.text


def test_a_slow_disk_ends_the_recording_before_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_module, "MAX_PENDING_BYTES", 20)
    monkeypatch.setattr(file_module, "WRITE_INTERVAL_S", 60)
    writer = RecordingWriter(tmp_path / "rec", HEADER)
    for event in EVENTS:
        writer.emit(event)
    writer.close()
    assert caplog.text.count("wait to be written") == 1
    with (tmp_path / "rec").open("rb") as file:
        assert list(RecordingReader(file).events()) == []

"""Writers are killed beside a reader: no damaged record is found, and no whole one is lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kv_store.extent import Entry, find_damage, follow, open_extent
from quire.kv_store.index import StoreIndex
from quire.kv_store.record import RecordMac

from ...seeds import seed_of
from .stores import FINGERPRINT, digest_of, open_store

PAYLOAD_BYTES = 20_000
EXTENT_BYTES = 1 << 18
"""An extent is full after a dozen records, so deaths fall on seals, too."""

WRITER = """
import itertools, sys
from pathlib import Path
from quire.failpoints import arm_failpoints
from quire.kv_store.access import StoreWriter
from tests.unit.kv_store.stores import header_of, open_store, payload_of
arm_failpoints()
store = open_store(Path(sys.argv[1]), extent_bytes=int(sys.argv[2]))
writer = StoreWriter(store)
for number in itertools.count(int(sys.argv[3]), 2):
    reason = writer.append(header_of(number, payload_bytes=int(sys.argv[4])), payload_of(number, int(sys.argv[4])))
    assert not reason or reason == "full", reason
    if not reason:
        print(number, flush=True)
"""


def start_writer(directory: Path, first: int, faults: str = "") -> subprocess.Popen[str]:
    arguments = [str(directory), str(EXTENT_BYTES), str(first), str(PAYLOAD_BYTES)]
    environment = {**os.environ, "PYTHONPATH": f"src:{os.getcwd()}", "QUIRE_FAILPOINTS": faults}
    command = [sys.executable, "-c", WRITER, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def read_numbers(writer: subprocess.Popen[str], count: int) -> list[int]:
    """Returns the numbers of at least `count` records that a writer says it has written, or all until its end."""
    assert writer.stdout is not None
    numbers: list[int] = []
    while len(numbers) < count and (line := writer.stdout.readline()):
        numbers.append(int(line))
    return numbers


def check(directory: Path, written: set[int]) -> None:
    """Scans as an engine does, then reads all that is there."""
    store = open_store(directory)
    index = StoreIndex(store, FINGERPRINT)
    index.scan()
    index.scan()
    mac = RecordMac(store.key)
    assert not [number for number in written if not index.contains(digest_of(number), 0)]
    for extent in store.list_extents():
        descriptor = open_extent(store.descriptor, extent.name)
        table = store.load_table(extent)
        entries: list[Entry] = list(follow(descriptor, 0, FINGERPRINT[:8])) if table is None else table.entries
        assert table is not None, "its writer is dead"
        assert [find_damage(descriptor, entry, mac) for entry in entries] == [None] * len(entries)
        os.close(descriptor)
    store.close()


def run_deaths(directory: Path, num_records: list[int], faults: str = "") -> None:
    written: set[int] = set()
    writers = [start_writer(directory, first + 1000 * len(num_records), faults) for first in range(2)]
    store = open_store(directory)
    index = StoreIndex(store, FINGERPRINT)
    for writer, count in zip(writers, num_records, strict=True):
        written.update(read_numbers(writer, count))
        index.scan()  # beside the other, which goes on
    for writer in writers:
        writer.kill()
        written.update(read_numbers(writer, 1 << 30))
        writer.wait()
        assert writer.stdout is not None
        writer.stdout.close()
    store.close()
    check(directory, written)
    assert len(written) >= sum(num_records) or faults


def test_two_writers_are_killed(tmp_path: Path) -> None:
    run_deaths(tmp_path / "store", [3, 20])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_storm(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed_of(seed))
    for place in ("", "kv.write=kill,skip={}", "kv.seal=kill,skip={}"):
        faults = place.format(rng.randrange(5))
        run_deaths(tmp_path / "store", [rng.randrange(1, 60) for _ in range(2)], faults)

"""Files that processes share: without a name, by inheriting their descriptors, and the page of engines that step
together; and the abort words of workers, and of engines that share experts."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path


def make_shared_file(num_bytes: int) -> int:
    """Returns the descriptor of a new file of zeroes. The system takes memory for a page when it is first written.
    Raises OSError."""
    if sys.platform == "linux":
        fd = os.memfd_create("quire", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.ftruncate(fd, num_bytes)
    return fd


WORKERS_FILE_BYTES = 1 << 40
"""Bytes that each stage of an engine has in the file that its workers share: address space, not memory. They begin with
the words of the barrier: a line with the abort word, then one for each worker of the stage (`qk_barrier_args`)."""
BARRIER_LINE_BYTES = 64


def make_workers_file(num_stages: int = 1) -> int:
    """Returns the descriptor of a new file for the workers of an engine. Raises OSError."""
    return make_shared_file(num_stages * WORKERS_FILE_BYTES)


def set_abort_word(fd: int) -> None:
    """Makes every barrier of the workers that share the file fail, because one of them has."""
    for start in range(0, os.fstat(fd).st_size, WORKERS_FILE_BYTES):
        os.pwrite(fd, (1).to_bytes(4, sys.byteorder), start)


def is_aborted(fd: int) -> bool:
    """Returns whether the abort word is set."""
    return os.pread(fd, 4, 0) != bytes(4)


def read_barrier_wait(fd: int, num_stages: int, group_size: int) -> float:
    """Returns the seconds that workers of `num_stages` times `group_size` have waited in barriers, all together."""
    total, size = 0, (1 + group_size) * BARRIER_LINE_BYTES
    for stage in range(num_stages):
        words = memoryview(os.pread(fd, size, stage * WORKERS_FILE_BYTES)).cast("q")
        total += sum(words[BARRIER_LINE_BYTES // 8 + 2 :: BARRIER_LINE_BYTES // 8])
    return total / 1e9


GROUP_PAGE_BYTES = 1 << 13


def make_group_file(path: Path) -> None:
    """Makes the page of a group without members (`engine/dp_group.py`)."""
    path.write_bytes(bytes(GROUP_PAGE_BYTES))
    path.chmod(0o600)


EPOCH_BYTES, _NUM_EPOCHS = 1 << 13, 1 << 20
EPOCHS_BYTES = _NUM_EPOCHS * EPOCH_BYTES
"""Beginning of a group's part of the file of engines that share experts: the words of their barriers. Each epoch of the
group, from the time that all engines are there to the first that is not, has words of its own; buffers follow. It is
address space: engines of several machines clear no words, because none could do that for all of its machine."""
_LAST_EPOCH = 8
"""Place of the number of the last epoch that the machine knows of, in the line of an abort word that is not used."""
_NUM_GENERATIONS = 4
"""Groups that have a part of the file at a time: one that computes, one that is prepared, and such as were given up."""
MAX_SHARING_ENGINES = 64
FACTORS_BYTES = 1 << 40
"""Bytes that each engine has in that file for the adapters of its requests, in all groups: behind the groups' parts."""


def make_experts_file() -> int:
    """Returns the descriptor of a new file for engines that share experts. Raises OSError."""
    return make_shared_file(factors_start(MAX_SHARING_ENGINES))


def generation_start(generation: int) -> int:
    """Returns where the part of a group is: with another number of engines, they are another group."""
    return generation % _NUM_GENERATIONS * WORKERS_FILE_BYTES


def clear_generation(fd: int, generation: int) -> None:
    """Gives the memory of a group's part back. No engine may be in it any more."""
    give_back(fd, generation_start(generation), WORKERS_FILE_BYTES)


def factors_start(engine: int) -> int:
    """Returns where the adapters of an engine are."""
    return _NUM_GENERATIONS * WORKERS_FILE_BYTES + engine * FACTORS_BYTES


def clear_factors(fd: int, engine: int) -> None:
    """Gives the memory of an engine's adapters back. The engine must have ended, or have none yet."""
    give_back(fd, factors_start(engine), FACTORS_BYTES)


def give_back(fd: int, start: int, num_bytes: int) -> None:
    """Gives the memory of a part of a file back, which is zeroes then."""
    with mmap.mmap(fd, num_bytes, offset=start) as memory:
        if hasattr(mmap, "MADV_REMOVE"):  # on Linux; else the memory is kept until it is used again
            memory.madvise(mmap.MADV_REMOVE)


def epoch_start(epoch: int) -> int:
    """Returns where the words of an epoch are in its group's part, the abort word first."""
    return epoch % _NUM_EPOCHS * EPOCH_BYTES


def begin_epoch(fd: int, epoch: int, generation: int = 0) -> None:
    """Clears the words of an epoch. No engine may use them yet."""
    os.pwrite(fd, bytes(EPOCH_BYTES), generation_start(generation) + epoch_start(epoch))


def end_epoch(fd: int, epoch: int, generation: int = 0) -> None:
    """Makes every barrier of an epoch fail."""
    os.pwrite(fd, (1).to_bytes(4, sys.byteorder), generation_start(generation) + epoch_start(epoch))


def note_epoch(fd: int, epoch: int, generation: int = 0) -> int:
    """Records that there is an epoch of this number. Returns the greatest so far."""
    place = generation_start(generation) + _LAST_EPOCH
    last = int.from_bytes(os.pread(fd, 8, place), sys.byteorder)
    if epoch > last:
        os.pwrite(fd, epoch.to_bytes(8, sys.byteorder), place)
    return max(last, epoch)


def has_epoch_ended(fd: int, epoch: int, generation: int = 0) -> bool:
    """Returns whether an epoch has ended."""
    return os.pread(fd, 4, generation_start(generation) + epoch_start(epoch)) != bytes(4)

"""Collectives of workers on one host: a shared file, which every worker maps.

The file has no name: the executor makes it and every worker inherits it. It begins with the words of the barrier, then
come a word of each rank for `agree`, then buffers, at the same places in all workers because all ask for them in the
same order. It is as long as address space allows; the system takes memory for a page when it is first written.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.failpoints import failpoint
from quire.wire.shared_memory import BARRIER_LINE_BYTES, set_abort_word
from quire.wire.topology import Group
from quire.worker.host import cpu_quota
from quire.worker.kernels.barrier import SPIN_NS, words_bytes
from quire.worker.kernels.base import Kernels
from quire.worker.parallel.collectives import Collectives, Written

PAGE_BYTES = 1 << 16


class SharedBuffers:
    """Buffers of a file that several processes map: at the same places in all, which ask for them in the same order."""

    def __init__(self, fd: int, start: int) -> None:
        self._fd, self._end = fd, start
        self._buffers = dict[tuple[str, torch.dtype], Tensor]()

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the buffer of that name. Its memory is taken when it is written."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None:
            num_bytes = -(-torch.Size(shape).numel() * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
            memory = mmap.mmap(self._fd, num_bytes, offset=self._end)
            self._end += num_bytes
            whole = torch.frombuffer(memory, dtype=dtype)
            self._buffers[name, dtype] = buffer = whole[: torch.Size(shape).numel()].view(*shape)
        assert buffer.shape == shape, f"{name} is {tuple(buffer.shape)} and not {shape}"
        return buffer

    def close(self) -> None:
        """Forgets the buffers, whose memory is released with the last tensor of each."""
        self._buffers.clear()


def spin_time(num_threads: int) -> int:
    """Returns the nanoseconds that a barrier may spin where this many threads compute: none if they exceed the
    processors."""
    return SPIN_NS if num_threads <= min(os.cpu_count() or 1, cpu_quota() or num_threads) else 0


class ShmCollectives(Collectives):
    """Collectives over a shared file."""

    def __init__(
        self, fd: int, group: Group, kernels: Kernels, max_rows: int, *, num_threads: int = 1, start: int = 0
    ) -> None:
        """`num_threads`: those of all workers on this host, which decide whether a barrier may spin. `start`: where the
        group's part of the file begins."""
        self.group, self.max_rows, self.copy = group, max_rows, kernels.copier()
        self.row_bytes = {}
        self._fd, self._buffers = fd, SharedBuffers(fd, start)
        self._words = self.shared("words", (2 * words_bytes(group.size),), torch.uint8)
        self._barrier = kernels.barrier(self._words, group.index, group.size, spin_time(num_threads))
        lines = self._words[words_bytes(group.size) :].view(torch.int64)
        self._votes = lines[:: BARRIER_LINE_BYTES // 8][: group.size]

    def shared(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._buffers.get(name, shape, dtype)

    def ready(self, written: Sequence[Written] = ()) -> None:
        self._reach()
        self._barrier()

    def _reach(self) -> None:
        failpoint("worker.barrier", str(self.group.rank))

    def agree(self, value: int) -> int:
        self._votes[self.group.index] = value
        self._barrier()
        least = int(self._votes.min())
        self._barrier()  # no worker may vote again before all have read
        return least

    def abort(self) -> None:
        set_abort_word(self._fd)

    def waited(self) -> tuple[int, float]:
        """Returns the number of barriers that this worker has passed, and the seconds it has waited in them."""
        line = self._words[(1 + self.group.index) * BARRIER_LINE_BYTES :][:BARRIER_LINE_BYTES].view(torch.int64)
        return int(line[1]), int(line[2]) / 1e9

    def close(self) -> None:
        self._buffers.close()

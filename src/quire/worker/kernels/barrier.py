"""Barriers of workers that compute a step together, each in a process of its own.

Both kinds use the words of `qk_barrier_args`: an abort word, and a line with a generation for each rank.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import byref

from torch import Tensor

from quire.errors import ServerError
from quire.wire.shared_memory import BARRIER_LINE_BYTES
from quire.worker.kernels.library import CONSTANTS, BarrierArgs, Context

TIMEOUT_MS = 60_000
"""Time that a rank may be late; far longer than any kernel takes."""
SPIN_NS = 50_000
_ABORTED, _LATE = CONSTANTS["QK_BARRIER_ABORTED"], CONSTANTS["QK_BARRIER_LATE"]


class BarrierError(ServerError):
    """Another worker of the step has failed or does not answer: the step is lost."""


def check_barrier(failure: int) -> None:
    """Raises BarrierError unless `failure`, the result of a barrier or of a plan, is 0."""
    if failure == _LATE:
        raise BarrierError(f"another worker did not finish its part of the step within {TIMEOUT_MS / 1000:g} s")
    if failure:
        raise BarrierError("another worker of the step has failed")


def words_bytes(size: int) -> int:
    """Returns the bytes of the words of `size` ranks."""
    return (1 + size) * BARRIER_LINE_BYTES


class NativeBarrier:
    """A barrier by the native library: recorded in plans like a kernel."""

    def __init__(self, context: Context, words: Tensor, rank: int, size: int, spin_ns: int) -> None:
        self._words = words
        self.args = BarrierArgs(rank=rank, size=size, spin_ns=spin_ns, timeout_ms=TIMEOUT_MS, words=words.data_ptr())
        self._pointer = byref(self.args)
        self._function, self._handle = context.library.cdll.qk_barrier, context.handle

    def __call__(self) -> None:
        """Returns once all ranks are here. Raises BarrierError."""
        failure = self._function(self._handle, self._pointer)
        if failure:
            check_barrier(failure)


class PollingBarrier:
    """A barrier in Python, for systems without the native library."""

    def __init__(self, words: Tensor, rank: int, size: int) -> None:
        self._words = (ctypes.c_uint32 * (words_bytes(size) // 4)).from_address(words.data_ptr())
        self._memory, self._rank, self._size = words, rank, size

    def __call__(self) -> None:
        """Returns once all ranks are here. Raises BarrierError."""
        words, step = self._words, BARRIER_LINE_BYTES // 4
        generation = (words[step * (1 + self._rank)] + 1) % 2**32
        words[step * (1 + self._rank)] = generation
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        for rank in range(self._size):
            while (words[step * (1 + rank)] - generation) % 2**32 >= 2**31:
                check_barrier(_ABORTED if words[0] else _LATE if time.monotonic() > deadline else 0)
                time.sleep(2e-5)
        check_barrier(_ABORTED if words[0] else 0)

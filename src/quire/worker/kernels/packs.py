"""Memory for what every step reads (packed weights, the KV cache) and for large results."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


def take_memory(num_bytes: int, *, huge_pages: bool = True) -> Tensor:
    """Returns [num_bytes] uint8 zeros, taken from the system and returned to it with the tensor.

    Huge pages, where those are allowed, keep address translation from slowing down reads of gigabytes in order. They
    suit weights and not the KV cache, where a huge page is two mebibytes to clear in the step that first writes to it:
    many short requests lost a seventh of their throughput (docs/performance.md).
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(_map_memory(num_bytes, huge_pages), dtype=torch.uint8)


def _map_memory(num_bytes: int, huge_pages: bool) -> mmap.mmap:
    # private: shared memory, Python's default, has a switch of its own for huge pages, which is off
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system built without them
            memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return memory


_MADV_POPULATE_WRITE = 23
"""Linux 5.14. Python's mmap has no name for it."""
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def commit_memory(memory: memoryview) -> None:
    """Has the system map the pages of writable memory at once, so that writing need not wait for each. Their bytes stay
    as they are. Does nothing where the system cannot."""
    if _madvise is not None and len(memory):
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        offset = address % mmap.PAGESIZE
        _madvise(ctypes.c_void_p(address - offset), ctypes.c_size_t(len(memory) + offset), _MADV_POPULATE_WRITE)


LARGE_BYTES = 1 << 20
"""Results from this size on are taken from `ResultMemory`."""
MAX_FREE_BLOCKS = 2
"""Blocks that `ResultMemory` keeps although no result uses them."""


class ResultMemory:
    """Memory for large results, which is used again once no tensor refers to it.

    The C library's allocator takes a result of 32 MiB and more from the system and gives it back when it is freed. The
    logits of 1,024 rows of an 8k vocabulary are as large: each step would wait for the system to clear and map their
    pages again, which took a tenth of it.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        """Free blocks, the smallest first."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an unfilled tensor."""
        num_elements = torch.Size(shape).numel()
        num_bytes = num_elements * dtype.itemsize
        if num_bytes < LARGE_BYTES:
            return torch.empty(*shape, dtype=dtype)
        fitting = next((i for i, block in enumerate(self._free) if len(block) >= num_bytes), None)
        if fitting is None:
            block = memoryview(_map_memory(num_bytes, huge_pages=True))
        else:
            block = self._free.pop(fitting)
        view = block[:num_bytes]
        weakref.finalize(view, self._give_back, block).atexit = False
        return torch.frombuffer(view, dtype=dtype).view(*shape)

    def _give_back(self, block: memoryview) -> None:
        self._free = sorted([*self._free, block], key=len)[-MAX_FREE_BLOCKS:]

    def release(self) -> None:
        """Gives the memory that no result uses back to the system."""
        self._free.clear()


Fill = Callable[[Tensor], object]
"""Function that packs a layer's weights into memory."""


class Packs(Protocol):
    """Memory for layers that pack. After `begin`, a layer may take several pieces, always the same ones in the same
    order."""

    def begin(self, layer: str) -> None:
        """Names the layer that takes from here on: a module's path in the model."""
        ...

    def take(self, num_bytes: int, fill: Fill) -> Tensor:
        """Returns [num_bytes] uint8 that hold what `fill` writes into zeros, now or in an earlier start. Must not be
        written to."""
        ...


class FreshPacks:
    """Packs all weights anew, into new memory."""

    def begin(self, layer: str) -> None:
        pass

    def take(self, num_bytes: int, fill: Fill) -> Tensor:
        memory = take_memory(num_bytes)
        fill(memory)
        return memory


FRESH_PACKS = FreshPacks()

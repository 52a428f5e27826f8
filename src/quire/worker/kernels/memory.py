"""Memory for what is read in every step: packed weights, the KV cache."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor


def take_memory(num_bytes: int, *, huge_pages: bool = True) -> Tensor:
    """[num_bytes] uint8 zeros, straight from the system and given back to it with the tensor.

    In huge pages, where those are allowed, reading gigabytes in order is not held up by address translation. This suits
    weights and not the KV cache, where a huge page is two mebibytes to clear in the step that first writes to it: many
    short requests lost a seventh of their throughput (docs/performance.md).
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # private: to Python's default, shared memory, the system gives huge pages by a switch of its own that is off
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system built without them
            memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

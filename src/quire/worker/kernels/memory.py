"""Memory for what is read in every step: packed weights."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def take_memory(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 zeros, straight from the system and given back to it with the tensor; in huge pages where those
    are allowed, so that reading gigabytes in order is not held up by address translation."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

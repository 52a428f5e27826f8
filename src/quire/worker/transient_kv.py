"""Memory for the keys and values of an encoder's layer while that layer attends.

An encoder's texts are computed whole, so nothing outlives the step, and every layer may use the same memory. It is laid
out as a paged cache is: attention backends know no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.wire.kv_cache import FullAttentionSpec
from quire.worker.attention.backend import AttentionBackend, AttentionBatch
from quire.worker.attention.layer import EncoderAttention
from quire.worker.kernels.memory import take_memory
from quire.worker.kv_cache import KVCacheMemory

BLOCK_SIZE = 16


class TransientKVCache:
    """As much as the largest step takes: `max_num_tokens` tokens of up to `max_num_reqs` texts."""

    def __init__(
        self,
        layers: Sequence[EncoderAttention],
        backend: AttentionBackend[Any],
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
    ) -> None:
        one = layers[0].spec
        spec = FullAttentionSpec(BLOCK_SIZE, one.num_kv_heads, one.head_size, str(dtype).removeprefix("torch."))
        num_blocks = max_num_tokens // BLOCK_SIZE + max_num_reqs
        size = num_blocks * spec.page_size_bytes
        storage = (
            take_memory(size, huge_pages=False)
            if device.type == "cpu"
            else torch.empty(size, dtype=torch.uint8, device=device)
        )
        cache = backend.view_kv_cache(storage, spec, num_blocks)
        names = [layer.layer_name for layer in layers]
        self.memory = KVCacheMemory([spec], dict.fromkeys(names, 0), dict.fromkeys(names, cache))
        self._device = device

    def place(self, query_lens: npt.NDArray[np.int64]) -> AttentionBatch:
        """The step's texts, of so many tokens each, one after another: each begins a block."""
        num_blocks = -(-query_lens // BLOCK_SIZE)
        first_blocks = np.cumsum(num_blocks) - num_blocks  # [num_reqs]
        table = first_blocks[:, None] + np.arange(num_blocks.max())  # [num_reqs, blocks of the longest]
        starts = np.cumsum(query_lens) - query_lens
        within = np.arange(query_lens.sum()) - np.repeat(starts, query_lens)
        slots = np.repeat(first_blocks * BLOCK_SIZE, query_lens) + within
        return AttentionBatch(
            query_lens,
            query_lens,
            torch.from_numpy(table.astype(np.int32)).to(self._device),
            torch.from_numpy(slots).to(self._device),
        )

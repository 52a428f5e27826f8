"""The memory of the KV cache, and the transient cache of encoders.

The texts of an encoder are computed whole, so nothing outlives the step and all its layers share one memory. It is laid
out as a paged cache because attention backends read no other form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import ConfigError
from quire.wire.kv_cache import AnyKVCacheSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from quire.worker.attention.backend import AttentionBackend, AttentionBatch, KVCache
from quire.worker.attention.layer import Attention
from quire.worker.kernels.packs import take_memory


@dataclass(frozen=True)
class KVCacheMemory:
    """The allocated cache, by layer and by group."""

    specs: list[AnyKVCacheSpec]
    """One for each group."""
    layer_groups: dict[str, int]
    """The group of each layer; of a drafter's layers the one whose blocks they use."""
    caches: dict[str, KVCache]
    """Keys and values by layer name, those of a drafter's layers included."""
    backend: AttentionBackend[Any]
    """Decides the order of a block's bytes."""

    @property
    def block_sizes(self) -> list[int]:
        """Tokens per block, per group."""
        return [spec.block_size for spec in self.specs]


def allocate_kv_cache(config: KVCacheConfig, backend: AttentionBackend[Any], device: torch.device) -> KVCacheMemory:
    """Allocates the tensors of `config` and gives each layer its view.

    On a CPU the memory is only reserved: the system commits (small) pages as blocks are first written.
    """
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    layer_groups = {name: i for i, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
    layer_specs = {name: specs[group] for name, group in layer_groups.items()}
    for extra in config.extra_layers:
        layer_groups[extra.layer_name], layer_specs[extra.layer_name] = extra.group, extra.kv_cache_spec
    caches: dict[str, KVCache] = {}
    for tensor in config.kv_cache_tensors:
        try:
            storage = _reserve(tensor.size, device)
        except OSError as e:
            all_bytes = sum(each.size for each in config.kv_cache_tensors)
            raise ConfigError(
                f"the KV cache of {all_bytes / 2**30:.1f} GiB cannot be reserved ({e.strerror}); lower "
                "--kv-cache-memory-bytes or --num-gpu-blocks-override"
            ) from None
        offsets = tensor.offsets or [0] * len(tensor.shared_by)
        for name, offset in zip(tensor.shared_by, offsets, strict=True):
            caches[name] = backend.view_kv_cache(storage, layer_specs[name], config.num_blocks, offset)
    return KVCacheMemory(specs, layer_groups, caches, backend)


def _reserve(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return take_memory(num_bytes, huge_pages=False)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def make_null_config(specs: Mapping[str, AnyKVCacheSpec]) -> KVCacheConfig:
    """Returns the configuration of a cache of one block, the null block, for runs without requests."""
    groups = [
        KVCacheGroupSpec([name for name, s in specs.items() if s == spec], spec)
        for spec in dict.fromkeys(specs.values())
    ]
    tensors = [KVCacheTensor(spec.page_size_bytes, [name]) for name, spec in specs.items()]
    return KVCacheConfig(1, tensors, groups)


BLOCK_SIZE = 16


class TransientKVCache:
    """Memory for the texts of the largest step: `max_num_tokens` tokens of up to `max_num_reqs` texts."""

    def __init__(
        self,
        layers: Sequence[Attention],
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
        cache = backend.view_kv_cache(_reserve(num_blocks * spec.page_size_bytes, device), spec, num_blocks)
        names = [layer.layer_name for layer in layers]
        self.memory = KVCacheMemory([spec], dict.fromkeys(names, 0), dict.fromkeys(names, cache), backend)
        self._device = device

    def place(self, query_lens: npt.NDArray[np.int64]) -> AttentionBatch:
        """Returns the batch of a step's texts, whose lengths are `query_lens`: each begins a block."""
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

"""The memory of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import ConfigError
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from quire.worker.attention.backend import AttentionBackend, KVCache
from quire.worker.kernels.memory import take_memory


@dataclass(frozen=True)
class KVCacheMemory:
    """The allocated cache, as layers and groups see it."""

    specs: list[AnyKVCacheSpec]
    """Per group."""
    layer_groups: dict[str, int]
    """The group of each layer."""
    caches: dict[str, KVCache]
    """By layer name."""

    @property
    def block_sizes(self) -> list[int]:
        """Tokens per block, per group."""
        return [spec.block_size for spec in self.specs]


def allocate_kv_cache(config: KVCacheConfig, backend: AttentionBackend[Any], device: torch.device) -> KVCacheMemory:
    """Allocate the tensors of `config` and give each layer its view.

    On CPU the memory is only reserved: the system commits (small) pages as blocks are first written.
    """
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    layer_groups = {name: i for i, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
    caches: dict[str, KVCache] = {}
    for tensor in config.kv_cache_tensors:
        on_cpu = device.type == "cpu"
        storage = (
            _reserve(tensor.size, sum(each.size for each in config.kv_cache_tensors))
            if on_cpu
            else torch.empty(tensor.size, dtype=torch.uint8, device=device)
        )
        for name in tensor.shared_by:
            caches[name] = backend.view_kv_cache(storage, specs[layer_groups[name]], config.num_blocks)
    return KVCacheMemory(specs, layer_groups, caches)


def _reserve(num_bytes: int, all_bytes: int) -> torch.Tensor:
    try:
        return take_memory(num_bytes, huge_pages=False)
    except OSError as e:
        raise ConfigError(
            f"the KV cache of {all_bytes / 2**30:.1f} GiB cannot be reserved ({e.strerror}); lower "
            "--kv-cache-memory-bytes or --num-gpu-blocks-override"
        ) from None


def make_null_config(specs: Mapping[str, AnyKVCacheSpec]) -> KVCacheConfig:
    """A cache of nothing but the null block, for runs that only measure. One group per kind of layer."""
    groups = [
        KVCacheGroupSpec([name for name, s in specs.items() if s == spec], spec)
        for spec in dict.fromkeys(specs.values())
    ]
    tensors = [KVCacheTensor(spec.page_size_bytes, [name]) for name, spec in specs.items()]
    return KVCacheConfig(1, tensors, groups)

"""The KV cache: its blocks, its size, and what may be reused from it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.flags import flag, parse_human_int

FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Names of --kv-cache-dtype that no attention backend has kernels for yet."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How the KV cache is cut and kept."""

    block_size: int = flag(16, "Tokens per KV cache block.", parse=int, minimum=1, maximum=1024)
    gpu_memory_utilization: float = flag(
        0.92, "Share of the device's memory the engine may use (accelerators).", parse=float, minimum=0.01, maximum=1
    )
    kv_cache_memory_bytes: int | None = flag(
        None, "Size of the KV cache in bytes (4G, 512M); unset sizes it from free memory.", parse=parse_human_int
    )
    cache_dtype: str = flag(
        "auto",
        "Type of the cached keys and values; auto follows the model. The fp8 types are known, and refused for now.",
        choices=("auto", "bfloat16", "float16", "float32", *FP8_CACHE_DTYPES),
        name="kv_cache_dtype",
    )
    num_gpu_blocks_override: int | None = flag(
        None, "Use exactly this many blocks (null block included) whatever the memory; for tests.", parse=int, minimum=2
    )
    enable_prefix_caching: bool = flag(True, "Reuse the KV blocks of equal prompt prefixes.")
    prefix_caching_hash_algo: str = flag(
        "sha256", "Hash of the block chain. Equal on every process and host.", choices=("sha256",)
    )
    kv_cache_metrics: bool = flag(False, "Sample how long blocks live and idle before they are evicted.")
    kv_cache_metrics_sample: float = flag(
        0.01, "Share of blocks followed by --kv-cache-metrics.", parse=float, minimum=0, maximum=1
    )

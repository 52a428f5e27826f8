"""From what the workers report to a KV cache of a fixed size (checklist S3-EC-023…027)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from quire.config.engine import EngineConfig
from quire.engine.executor.abstract import Executor
from quire.engine.kv_cache.sizing import make_kv_cache_configs, max_concurrency
from quire.logger import init_logger
from quire.wire.kv_cache import KVCacheConfig

logger = init_logger(__name__)

GIB = 1 << 30


@dataclass(frozen=True)
class KVCacheSizes:
    """What start-up found out. `config` is the scheduler's: block counts are equal on all workers."""

    config: KVCacheConfig
    max_model_len: int
    max_concurrency: float
    """Requests of max_model_len tokens that fit at once; 0 without a KV cache, which limits nobody."""

    @property
    def block_size(self) -> int:
        """Tokens per block, the smallest over the groups: the granularity of prefix caching. 1 without a KV cache."""
        return min(self.config.block_sizes, default=1)

    @property
    def num_tokens(self) -> int:
        """Tokens the cache holds in requests as long as the context allows; 0 where there is none."""
        return int(self.max_concurrency * self.max_model_len) if self.config.kv_cache_groups else 0


def initialize_kv_caches(config: EngineConfig, executor: Executor) -> KVCacheSizes:
    """Size the cache from the memory the workers have left, allocate it there and warm up.

    Raises ConfigError if not even one request fits.
    """
    start = time.perf_counter()
    specs = executor.get_kv_cache_specs()
    available_bytes = executor.determine_available_memory()
    model_len, scheduler_config = config.model_config.model_len, config.scheduler_config
    step_tokens = scheduler_config.max_num_scheduled_tokens or scheduler_config.max_num_batched_tokens
    kv_cache_configs, max_model_len = make_kv_cache_configs(
        config.cache_config,
        specs,
        available_bytes,
        model_len,
        auto_fit=config.model_config.max_model_len == -1,
        max_step_tokens=step_tokens,
    )
    if max_model_len != model_len:
        executor.collective_rpc("update_max_model_len", args=(max_model_len,))
    executor.initialize_from_config(kv_cache_configs)
    chosen = kv_cache_configs[0]
    if not chosen.kv_cache_groups:
        logger.info("no KV cache: texts are computed whole; weights loaded in %.2f s", time.perf_counter() - start)
        return KVCacheSizes(chosen, max_model_len, 0.0)
    sizes = KVCacheSizes(chosen, max_model_len, max_concurrency(chosen, max_model_len, step_tokens))
    logger.info(
        "KV cache: %.2f GiB, %d blocks of %d tokens, %d tokens, %.2fx concurrency at %d tokens per request; "
        "weights loaded and cache ready in %.2f s",
        sum(tensor.size for tensor in chosen.kv_cache_tensors) / GIB,
        chosen.num_blocks,
        sizes.block_size,
        sizes.num_tokens,
        sizes.max_concurrency,
        max_model_len,
        time.perf_counter() - start,
    )
    return sizes

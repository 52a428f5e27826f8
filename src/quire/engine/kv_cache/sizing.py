"""Chooses the size of the KV cache from what the workers report.

`initialize_kv_caches` asks the executor; the functions that choose sizes are pure. Sizes are bytes; a length is a
request's prompt and output in tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from quire.config.engine import CacheConfig, EngineConfig
from quire.config.lora import LoRAConfig
from quire.errors import ConfigError
from quire.logger import init_logger
from quire.wire.kv_cache import (
    AnyKVCacheSpec,
    ExtraKVCacheLayer,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    LatentSpec,
)

if TYPE_CHECKING:  # it loads numpy, which `quire info` does not need
    from quire.engine.executor.abstract import Executor

logger = init_logger(__name__)

NEARLY_EQUAL = 1.25
"""Kinds whose sizes differ by no more than this factor get one group each; the smaller is padded."""


def blocks_needed(spec: AnyKVCacheSpec, num_tokens: int, max_step_tokens: int | None = None) -> int:
    """Returns the most blocks of a group that one request of `num_tokens` tokens holds at once.

    Full attention holds every token. A sliding window or a chunk holds, while a step computes at most `max_step_tokens`
    tokens, those and the `reach - 1` tokens before them: a span that touches at most ceil(span / block size) + 1
    blocks, as it may start anywhere in one. Without a limit per step (None) the whole request may be one step.
    """
    num_blocks = math.ceil(num_tokens / spec.block_size)
    if spec.reach is not None and max_step_tokens is not None:
        span = spec.reach - 1 + max_step_tokens
        return min(num_blocks, math.ceil(span / spec.block_size) + 1)
    return num_blocks


def request_blocks_needed(
    groups: Sequence[KVCacheGroupSpec], num_tokens: int, max_step_tokens: int | None = None
) -> int:
    """Returns the most blocks of all groups together that one request of `num_tokens` tokens holds at once."""
    return sum(blocks_needed(group.kv_cache_spec, num_tokens, max_step_tokens) for group in groups)


def max_concurrency(config: KVCacheConfig, max_model_len: int, max_step_tokens: int | None = None) -> float:
    """Returns how many requests of `max_model_len` tokens fit at once; infinite for a model without a KV cache."""
    needed = request_blocks_needed(config.kv_cache_groups, max_model_len, max_step_tokens)
    return (config.num_blocks - 1) / needed if needed else math.inf


def max_fitting_len(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int, model_len: int, max_step_tokens: int | None = None
) -> int:
    """Returns the longest request, up to `model_len` tokens, that fits into `num_blocks` blocks (null block
    included)."""
    low, high = 0, model_len
    while low < high:
        middle = (low + high + 1) // 2
        if request_blocks_needed(groups, middle, max_step_tokens) <= num_blocks - 1:
            low = middle
        else:
            high = middle - 1
    return low


def make_kv_cache_groups(specs: dict[str, AnyKVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Sorts layers into groups of layers of one kind (equal specs), all with (nearly) the same number of bytes.

    One kind makes one group. With several, a group is as large as the smallest kind (Gemma 3: five sliding groups for
    each full one), or as the largest where they are nearly equal. A kind whose layers do not divide evenly leaves
    places empty in its groups: memory that a block occupies and no layer uses (Gemma 3 1B: 22 sliding and 4 full layers
    make 7 groups of 4, 2 of 28 places empty). Of layers with smaller pages a group has more (Gemma 4 31B: 10 full
    layers in one group, 50 sliding ones of twice their size in 10 groups of 5).

    Raises ConfigError if block sizes differ: tables of one request would then differ in length.
    """
    kinds: dict[AnyKVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    block_sizes = sorted({spec.block_size for spec in specs.values()})
    if len(block_sizes) > 1:
        raise ConfigError(f"attention layers have block sizes {block_sizes}; all layers must have the same")
    if not kinds:
        return []
    if len({isinstance(spec, LatentSpec) for spec in kinds}) > 1:
        raise ConfigError("a model with latent and other attention layers is not implemented: they cannot share memory")
    sizes = [len(names) * spec.page_size_bytes for spec, names in kinds.items()]
    group_bytes = max(sizes) if max(sizes) <= NEARLY_EQUAL * min(sizes) else min(sizes)
    group_bytes = max(group_bytes, *(spec.page_size_bytes for spec in specs.values()))
    groups: list[KVCacheGroupSpec] = []
    for spec, names in kinds.items():
        groups += [KVCacheGroupSpec(part, spec) for part in _split_evenly(names, group_bytes // spec.page_size_bytes)]
    return groups


def make_kv_cache_configs(
    cache_config: CacheConfig,
    specs_per_worker: Sequence[dict[str, AnyKVCacheSpec]],
    available_bytes_per_worker: Sequence[int],
    model_len: int,
    auto_fit: bool,
    max_step_tokens: int | None = None,
    extra_specs_per_worker: Sequence[dict[str, AnyKVCacheSpec]] = (),
) -> tuple[list[KVCacheConfig], int]:
    """Returns the cache of each worker, and the longest request it serves: `model_len`, or less with `auto_fit`.

    Workers may hold different layers (pipeline) or the same ones (tensor parallel). Groups are made over all layers, so
    that one block table serves every worker, and the worker with the least memory decides the number of blocks.
    `num_gpu_blocks_override` replaces what memory would give. The layers of a drafter (`extra_specs_per_worker`) make a
    block larger and change nothing else. `max_step_tokens` is the token budget of a step: the
    `KVCacheManager` must be given the same.

    Raises ConfigError if not even one request of the length fits (with `auto_fit`: none of any length).
    """
    groups = make_kv_cache_groups(_merge(specs_per_worker))
    extra_specs_per_worker = extra_specs_per_worker or [{}] * len(specs_per_worker)
    worker_rows = [
        _tensor_rows(specs, groups) + [_TensorRow(spec.page_size_bytes, [name], []) for name, spec in extra.items()]
        for specs, extra in zip(specs_per_worker, extra_specs_per_worker, strict=True)
    ]
    extra_group = next((i for i, group in enumerate(groups) if group.kv_cache_spec.reach is None), 0)
    num_blocks = cache_config.num_gpu_blocks_override or _count_blocks(worker_rows, available_bytes_per_worker)
    fitted_len = max_fitting_len(groups, num_blocks, model_len, max_step_tokens)
    if fitted_len < model_len and not (auto_fit and fitted_len > 0):
        needed_blocks = request_blocks_needed(groups, model_len, max_step_tokens) + 1
        if cache_config.num_gpu_blocks_override is not None:
            raise ConfigError(_too_few_blocks_message(num_blocks, needed_blocks, model_len, fitted_len))
        block_bytes = max(map(_block_bytes, worker_rows))
        raise ConfigError(
            _too_little_memory_message(
                min(available_bytes_per_worker), needed_blocks * block_bytes, model_len, fitted_len
            )
        )
    configs = [
        KVCacheConfig(
            num_blocks,
            [KVCacheTensor(num_blocks * row.page_bytes, row.names, row.offsets) for row in rows],
            [_own_part(group, specs) for group in groups],
            [ExtraKVCacheLayer(name, spec, extra_group) for name, spec in extra.items()],
        )
        for specs, extra, rows in zip(specs_per_worker, extra_specs_per_worker, worker_rows, strict=True)
    ]
    return configs, fitted_len


class _TensorRow(NamedTuple):
    """One tensor of a worker."""

    page_bytes: int
    """Bytes per block."""
    names: list[str]
    """Layers that share it."""
    offsets: list[int]
    """Bytes of a block before each layer's part; empty: none has any."""


def _tensor_rows(specs: dict[str, AnyKVCacheSpec], groups: Sequence[KVCacheGroupSpec]) -> list[_TensorRow]:
    """Returns rows of layers: tensor j holds the j-th of this worker's layers of each group. Its pages are as large as
    its largest layer's; of smaller layers it holds as many as fit."""
    largest = max((spec.page_size_bytes for spec in specs.values()), default=0)
    columns = []
    for group in groups:
        own = _own_part(group, specs)
        names, fitting = own.layer_names, largest // own.kv_cache_spec.page_size_bytes or 1
        columns.append([names[i : i + fitting] for i in range(0, len(names), fitting)])
    rows: list[_TensorRow] = []
    for column in zip_longest(*columns, fillvalue=()):
        placed = [(name, i * specs[name].page_size_bytes) for names in column for i, name in enumerate(names)]
        offsets = [offset for _, offset in placed]
        page_bytes = max(offset + specs[name].page_size_bytes for name, offset in placed)
        rows.append(_TensorRow(page_bytes, [name for name, _ in placed], offsets if any(offsets) else []))
    return rows


def _block_bytes(rows: Sequence[_TensorRow]) -> int:
    return sum(row.page_bytes for row in rows)


def _count_blocks(worker_rows: Sequence[Sequence[_TensorRow]], available_bytes: Sequence[int]) -> int:
    """Returns the number of blocks that fit on the worker with the least memory; 1 (the null block) if no layer has a
    cache."""
    counts = [
        max(available, 0) // _block_bytes(rows)
        for rows, available in zip(worker_rows, available_bytes, strict=True)
        if rows
    ]
    return min(counts, default=1)


def _own_part(group: KVCacheGroupSpec, specs: dict[str, AnyKVCacheSpec]) -> KVCacheGroupSpec:
    """Returns a worker's layers of a group, with its own number of heads."""
    names = [name for name in group.layer_names if name in specs]
    return KVCacheGroupSpec(names, specs[names[0]] if names else group.kv_cache_spec)


def _merge(specs_per_worker: Sequence[dict[str, AnyKVCacheSpec]]) -> dict[str, AnyKVCacheSpec]:
    """Returns the layers of all workers. Of one that several have in part, the largest part."""
    merged: dict[str, AnyKVCacheSpec] = {}
    for specs in specs_per_worker:
        for name, spec in specs.items():
            other = merged.setdefault(name, spec)
            if msgspec.structs.replace(other, num_kv_heads=spec.num_kv_heads) != spec:
                raise ConfigError(f"workers disagree on the KV cache of layer {name}: {other} and {spec}")
            merged[name] = max(other, spec, key=lambda one: one.num_kv_heads)
    return merged


def _split_evenly(names: list[str], group_size: int) -> list[list[str]]:
    """Returns consecutive parts of at most `group_size` names whose lengths differ by at most one."""
    num_parts = math.ceil(len(names) / group_size)
    bounds = [len(names) * part // num_parts for part in range(num_parts + 1)]
    return [names[start:stop] for start, stop in pairwise(bounds)]


def _too_little_memory_message(available: int, needed: int, model_len: int, fitted_len: int) -> str:
    remedy = "lower --max-model-len to it or set it to auto, or " if fitted_len else ""
    return (
        f"One request of {model_len} tokens (--max-model-len) needs {_gib(needed)} of KV cache and {_gib(available)} "
        f"are available; the longest that fits is {fitted_len} tokens: {remedy}raise --kv-cache-memory-bytes, or "
        f"--gpu-memory-utilization on an accelerator"
    )


def _too_few_blocks_message(num_blocks: int, needed: int, model_len: int, fitted_len: int) -> str:
    remedy = "lower --max-model-len to it or set it to auto, or " if fitted_len else ""
    return (
        f"One request of {model_len} tokens (--max-model-len) needs {needed} KV cache blocks, null block included, and "
        f"--num-gpu-blocks-override gives {num_blocks}; the longest that fits is {fitted_len} tokens: {remedy}raise "
        f"--num-gpu-blocks-override to {needed}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.2f} MiB"


GIB = 1 << 30


@dataclass(frozen=True)
class KVCacheSizes:
    """Results of start-up. `config` is the scheduler's: block counts are equal on all workers."""

    config: KVCacheConfig
    max_model_len: int
    max_concurrency: float
    """Number of requests of max_model_len tokens that fit at once; 0 without a KV cache, which sets no limit."""
    adapter_bytes: int = 0
    """Memory of LoRA adapters, of all workers together."""
    block_bytes: int = 0
    """Bytes of a block of every group, in the layers of all workers together."""

    @property
    def block_size(self) -> int:
        """Tokens per block, the smallest over the groups: the granularity of prefix caching. 1 without a KV cache."""
        return min(self.config.block_sizes, default=1)

    @property
    def num_tokens(self) -> int:
        """Number of tokens the cache holds in requests as long as the context allows; 0 without a cache."""
        return int(self.max_concurrency * self.max_model_len) if self.config.kv_cache_groups else 0


SMALL_ADAPTER_BYTES = 64 << 20
"""Least memory of adapters by default, where there is twice as much: a small model's cache is smaller than adapters."""


def adapter_budget(config: LoRAConfig, available_bytes: int) -> int:
    """Returns the memory of adapters: --lora-memory-bytes, or 1 GiB, at most a tenth of what is available, but 64 MiB
    where that is half of it or less; 0 without adapters."""
    if not config.enable_lora:
        return 0
    if config.lora_memory_bytes is not None:
        return config.lora_memory_bytes
    available_bytes = max(available_bytes, 0)
    return max(min(GIB, available_bytes // 10), min(SMALL_ADAPTER_BYTES, available_bytes // 2))


def without_adapters(available_bytes: Sequence[int], adapter_bytes: int) -> list[int]:
    """Returns what adapters leave each worker: they take the same part of each one's memory."""
    total = max(1, sum(available_bytes))
    return [available - adapter_bytes * max(0, available) // total for available in available_bytes]


def initialize_kv_caches(config: EngineConfig, executor: Executor) -> KVCacheSizes:
    """Sizes the cache from the memory the workers have left, allocates it there and warms up.

    Raises ConfigError if not even one request fits.
    """
    start = time.perf_counter()
    specs = executor.get_kv_cache_specs()
    drafting = config.speculative_config.drafting
    has_draft_layers = drafting is not None and drafting.model is not None
    draft_specs = executor.collective_rpc("get_draft_kv_cache_spec") if has_draft_layers else ()
    available_bytes = executor.determine_available_memory()
    adapter_bytes = adapter_budget(config.lora_config, sum(available_bytes))
    if config.cache_config.kv_cache_memory_bytes is None:  # else the cache gets what was asked for, beside adapters
        available_bytes = without_adapters(available_bytes, adapter_bytes)
    model_len, scheduler_config = config.model_config.model_len, config.scheduler_config
    step_tokens = scheduler_config.max_num_scheduled_tokens or scheduler_config.max_num_batched_tokens
    kv_cache_configs, max_model_len = make_kv_cache_configs(
        config.cache_config,
        specs,
        available_bytes,
        model_len,
        auto_fit=config.model_config.max_model_len == -1,
        max_step_tokens=step_tokens,
        extra_specs_per_worker=draft_specs,
    )
    if max_model_len != model_len:
        executor.collective_rpc("update_max_model_len", args=(max_model_len,))
    executor.initialize_from_config(kv_cache_configs)
    chosen = kv_cache_configs[0]
    if not chosen.kv_cache_groups:
        logger.info("no KV cache: texts are computed whole; weights loaded in %.2f s", time.perf_counter() - start)
        return KVCacheSizes(chosen, max_model_len, 0.0, adapter_bytes)
    concurrency = max_concurrency(chosen, max_model_len, step_tokens)
    block_bytes = sum(
        len(group.layer_names) * group.kv_cache_spec.page_size_bytes
        for each in kv_cache_configs
        for group in each.kv_cache_groups
    )
    sizes = KVCacheSizes(chosen, max_model_len, concurrency, adapter_bytes, block_bytes)
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

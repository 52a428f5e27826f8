"""A request and a cache layout as small as the KV cache's tests need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.kv_cache.block import KVCacheMetricsCollector
from quire.engine.kv_cache.hashing import HashFunction, make_block_hasher
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import RequestReport
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.block_hash import BlockHash, hash_block
from quire.wire.kv_cache import (
    AnyKVCacheSpec,
    ChunkedSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

BLOCK_SIZE = 4


@dataclass
class ModelRequest:
    """Has what the cache reads of a `Request`; hashes its blocks as tokens arrive."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None
    prompt_embeds: None = None
    sampling_params: SamplingParams | None = None
    lora_revision: int = 1
    lora_start: int = 0
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    block_size: int = BLOCK_SIZE
    hash_function: HashFunction = hash_block
    block_hashes: list[BlockHash] = field(default_factory=list)
    report: RequestReport = field(default_factory=RequestReport)

    def __post_init__(self) -> None:
        self.append()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def append(self, *token_ids: int) -> None:
        self.all_token_ids.extend(token_ids)
        self.block_hashes.extend(make_block_hasher(self.block_size, self.hash_function)(self))


def letters(text: str) -> list[int]:
    """'AB' -> [65, 66]."""
    return [ord(letter) for letter in text]


def full(block_size: int = BLOCK_SIZE) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, 1, 8, "float32")


def sliding(window: int, block_size: int = BLOCK_SIZE) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, 1, 8, "float32", sliding_window=window)


def chunked(chunk_size: int, block_size: int = BLOCK_SIZE) -> ChunkedSpec:
    return ChunkedSpec(block_size, 1, 8, "float32", chunk_size=chunk_size)


def make_manager(
    num_blocks: int,
    *specs: AnyKVCacheSpec,
    enable_caching: bool = True,
    max_model_len: int = 1000,
    max_step_tokens: int | None = None,
    metrics: KVCacheMetricsCollector | None = None,
) -> KVCacheManager:
    """A manager of `num_blocks` blocks (null block included), a group per spec, one full group by default."""
    groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs or (full(),))]
    return KVCacheManager(
        KVCacheConfig(num_blocks, [], groups),
        max_model_len,
        enable_caching=enable_caching,
        log_stats=True,
        metrics=metrics,
        max_step_tokens=max_step_tokens,
    )


def admit(manager: KVCacheManager, request: ModelRequest, num_new_tokens: int | None = None) -> int | None:
    """Look up, allocate and compute a request's first step, as a scheduler would; its hit tokens, None if refused."""
    blocks, num_hit = manager.get_computed_blocks(request)
    if num_new_tokens is None:
        num_new_tokens = request.num_tokens - num_hit
    if manager.allocate_slots(request, num_new_tokens, num_hit, blocks) is None:
        return None
    request.num_computed_tokens = num_hit + num_new_tokens
    return num_hit


def decode(manager: KVCacheManager, request: ModelRequest, token_ids: Sequence[int]) -> None:
    """Sample and compute each of `token_ids` in a step of its own."""
    for token_id in token_ids:
        request.append(token_id)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1


def table(manager: KVCacheManager, request: ModelRequest, group_id: int = 0) -> list[int]:
    """The request's block ids."""
    return manager.get_block_ids(request.request_id)[group_id]


def free_ids(manager: KVCacheManager) -> list[int]:
    """The free queue from head to tail."""
    return [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]

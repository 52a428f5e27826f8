"""`KVCacheManager` gives blocks to requests and takes them back: the scheduler's only view of the cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.kv_cache.block import (
    BlockContent,
    IntegrityError,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheMetricsCollector,
)
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.group_manager import GroupManager, PrefixLookUp, make_group_manager
from quire.engine.kv_cache.held import HeldBlocks
from quire.engine.kv_cache.sizing import blocks_needed
from quire.engine.request import Request
from quire.wire.execution import BlockIds
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.stats import KVCacheEvictionEvent, PrefixCacheStats


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """Blocks of an admitted request. Tables only grow; an entry may turn into the null block."""

    tables: tuple[list[KVCacheBlock], ...]
    """Per group; of equal lengths."""
    num_blocks: int = 0
    """Length of each table."""
    num_hit_blocks: int = 0
    """Leading blocks that came from the prefix cache."""
    num_cached_blocks: int = 0
    """Leading blocks that others may hit, or could have before a window dropped them."""
    last_content: BlockContent | None = None
    """Content of block `num_cached_blocks - 1`: the parent of the next."""


OnFullBlocks = Callable[[Request, int, int, Sequence[list[KVCacheBlock]]], None]
"""Takes blocks of a request that a step fills, or that it has filled: the index of the first, and of the first after
them; the request's tables, per group, null where a window has passed."""


class LoadingBlocks(NamedTuple):
    """Blocks of a load."""

    hits: KVCacheBlocks
    """Found in the prefix cache, before them."""
    tables: tuple[list[KVCacheBlock], ...]
    """To be written, per group; null where the token after them reads nothing."""
    num_to_come: int
    """Blocks that the request needs besides."""


class KVCacheManager:
    """Owns the block tables of admitted requests and the pool they draw from.

    Contract with the scheduler:

    * `get_computed_blocks` and the `allocate_slots` that uses its answer follow each other directly.
    * Full blocks can be hit as soon as they are allocated, so a request may share blocks that the same step computes: a
      worker writes all keys and values of a layer before any token of the step attends.
    * `free` comes before `num_computed_tokens` is reset. It unregisters blocks of a step that will not happen (a
      request scheduled and preempted in one `schedule()`). To share one of them with another request before preempting
      its owner is an error: running requests are scheduled first.

    One prefix query is counted per admission (promise P12 (i)): when the first `allocate_slots` of a request succeeds,
    and not at the look-up, which the head of the waiting queue repeats every step.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        enable_caching: bool,
        log_stats: bool = False,
        metrics: KVCacheMetricsCollector | None = None,
        max_step_tokens: int | None = None,
    ) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching and bool(specs)
        self.block_size = specs[0].block_size if specs else 1
        self.block_pool = BlockPool(kv_cache_config.num_blocks, len(specs), metrics)
        self.groups: list[GroupManager] = [
            make_group_manager(spec, group_id, self.block_pool, max_step_tokens) for group_id, spec in enumerate(specs)
        ]
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple([] for _ in specs))
        self._windowed_groups = [group for group in self.groups if group.drops_blocks]
        self.drops_blocks = bool(self._windowed_groups)
        """True: tables may have null blocks."""
        self._look_up = PrefixLookUp(self.groups, self.block_pool, self.block_size)
        self._requests: dict[str, RequestBlocks] = {}
        self.held = HeldBlocks(self.block_pool)
        """Blocks of transfers: they are in no table."""
        self.on_full_blocks: OnFullBlocks | None = None
        """Called for blocks that have become full; None: nothing is."""
        self._metrics = metrics
        self._prefix_cache_stats = PrefixCacheStats() if log_stats else None

    @property
    def usage(self) -> float:
        """Returns the share of blocks in use, 0...1."""
        return self.block_pool.get_usage()

    def count_blocks(self) -> tuple[int, int, int, int]:
        """Returns the numbers of blocks in tables, free with content that may be hit, free without, and only held."""
        num_free, num_held = self.block_pool.get_num_free_blocks(), self.held.count_alone()
        num_cached = self.block_pool.num_cached_free_blocks
        return self.block_pool.num_gpu_blocks - 1 - num_free - num_held, num_cached, num_free - num_cached, num_held

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Returns the longest cached prefix of a request about to be admitted: its blocks and its length in tokens.

        Always shorter than the request: its last token is computed to get logits. Changes nothing.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        max_blocks = min((request.num_tokens - 1) // self.block_size, len(request.block_hashes))
        hits = self._look_up.find(request, max_blocks)
        return KVCacheBlocks(tuple(hits)), len(hits[0]) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        *,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        num_external_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Allocates blocks for the next step of a request. Returns the new blocks, or None if too few are free.

        The request's tokens are: computed | newly computed (hits, at admission only) | new | lookahead. Blocks that
        fell out of a window are freed and count as free; hits without references leave the free queue and count as
        needed. Blocks that become full are registered for reuse up to the last certain token: never a draft.

        full_sequence_must_fit: admit only if every block the request will need for its present tokens is free.
        reserved_blocks: blocks that must stay free (the watermark), if any are taken at all.
        num_external_tokens: tokens among the hits that were loaded for this admission, which are no hits of this cache.

        On None nothing has changed. Raises ValueError for no new tokens, or hits of another length or for an admitted
        request.
        """
        held = self._requests.get(request.request_id)
        if held is not None and num_new_tokens == 1 and new_computed_blocks is None and not self._windowed_groups:
            num_after = request.num_computed_tokens + 1
            if num_after + num_lookahead_tokens <= held.num_blocks * self.block_size and not full_sequence_must_fit:
                # A decoding request with room in its last block: most calls, and the rest would do nothing.
                if self.enable_caching and num_after // self.block_size > held.num_cached_blocks:
                    self._cache_full_blocks(request, held, num_after)
                return self.empty_kv_cache_blocks
        hits = (new_computed_blocks or self.empty_kv_cache_blocks).blocks
        num_hit_blocks = len(hits[0]) if hits else 0
        if num_new_tokens < 1:
            raise ValueError(
                f"{num_new_tokens} new tokens for request {request.request_id}; a step computes at least 1"
            )
        if num_new_computed_tokens != num_hit_blocks * self.block_size or (num_hit_blocks and held is not None):
            raise ValueError(
                f"{num_hit_blocks} hit blocks as {num_new_computed_tokens} computed tokens for request "
                f"{request.request_id}; hits are whole blocks of {self.block_size} tokens and come at admission only"
            )
        is_admission = held is None
        if held is None:
            held = RequestBlocks(tuple([] for _ in self.groups))

        num_computed = request.num_computed_tokens + num_new_computed_tokens
        num_after = num_computed + num_new_tokens
        num_slots = max(num_after, min(num_after + num_lookahead_tokens, self.max_model_len))
        num_new_blocks = max(0, -(-num_slots // self.block_size) - held.num_blocks - num_hit_blocks)
        # Rejected drafts move a request back, but never to before its last certain token.
        dropped = self._find_dropped_blocks(held, min(num_computed, request.num_tokens - 1))
        if num_new_blocks or full_sequence_must_fit:
            needed = num_new_blocks * len(self.groups)
            if full_sequence_must_fit:
                needed = max(needed, self._count_blocks_to_come(request, held.tables, hits))
            needed += sum(block.ref_cnt == 0 for group in hits for block in group)
            regained = sum(table[index].ref_cnt == 1 for table, index in dropped)
            if needed and needed + reserved_blocks > self.block_pool.get_num_free_blocks() + regained:
                return None

        if is_admission:
            self._admit(request, held, hits, num_hit_blocks, num_external_tokens)
        if dropped:
            self._drop_blocks(dropped)
        new_blocks = self._append_new_blocks(held, num_new_blocks) if num_new_blocks else self.empty_kv_cache_blocks
        if self.enable_caching:
            self._cache_full_blocks(request, held, num_after)
        return new_blocks

    def free(self, request: Request) -> None:
        """Takes back all blocks of a finished, aborted or preempted request; nothing if it holds none.

        The end of the prefix is freed first, in all groups alike, so that the longest useful prefix survives longest.
        """
        held = self._requests.pop(request.request_id, None)
        if held is None:
            return
        if self.enable_caching:  # accepted drafts fill blocks after the step has registered its own
            self._cache_full_blocks(request, held, min(request.num_computed_tokens, request.num_tokens - 1))
        num_computed_blocks = max(held.num_hit_blocks, request.num_computed_tokens // self.block_size)
        if num_computed_blocks < held.num_cached_blocks:
            self._evict_uncomputed_blocks(request, held, num_computed_blocks)
        columns = list(zip(*held.tables, strict=True))
        self.block_pool.free_blocks(block for column in reversed(columns) for block in column)

    # -- loads -------------------------------------------------------------------------------------------------

    def allocate_loading(
        self, holder: Hashable, request: Request, hits: KVCacheBlocks, num_blocks: int, reserved_blocks: int = 0
    ) -> LoadingBlocks | None:
        """Takes blocks for a load of `num_blocks` after the hits of a waiting request. They cannot be hit.

        Returns None, with nothing changed, unless blocks for all present tokens of the request are free beside
        `reserved_blocks`. `holder` holds them, and the hits.
        """
        num_hits = len(hits.blocks[0])
        end = (num_hits + num_blocks) * self.block_size
        firsts = [max(num_hits, min(num_hits + num_blocks - 1, group.first_block_read(end))) for group in self.groups]
        num_new = sum(num_hits + num_blocks - first for first in firsts)
        needed = max(num_new, self._count_blocks_to_come(request, self.empty_kv_cache_blocks.blocks, hits.blocks))
        num_idle = sum(block.ref_cnt == 0 for group in hits.blocks for block in group)
        if needed + num_idle + reserved_blocks > self.block_pool.get_num_free_blocks():
            return None
        for group in hits.blocks:
            self.block_pool.touch(group)
        new, null = iter(self.block_pool.get_new_blocks(num_new)), self.block_pool.null_block
        places = range(num_hits, num_hits + num_blocks)
        tables = tuple([null if index < first else next(new) for index in places] for first in firsts)
        columns = zip(*(hit + table for hit, table in zip(hits.blocks, tables, strict=True)), strict=True)
        self.held.hold(holder, "loading", [block for column in columns for block in column])
        return LoadingBlocks(hits, tables, needed - num_new)

    def count_blocks_to_come(self, requests: Iterable[Request]) -> int:
        """Returns how many more blocks running requests need for their present tokens, at most."""
        size, count = self.block_size, 0
        for request in requests:
            count += max(0, -(-request.num_tokens // size) - self._requests[request.request_id].num_blocks)
        return count * len(self.groups)

    def accept_loaded(self, holder: Hashable, request: Request, loading: LoadingBlocks, num_verified: int) -> None:
        """Makes the first `num_verified` blocks of a load available to others, and frees the rest.

        The load has ended: nothing writes into its blocks any more. `holder` keeps what was accepted, and the hits.
        """
        hits, tables = loading.hits.blocks, loading.tables
        parent = hits[0][-1].content if hits[0] else None
        start = len(hits[0])
        whole = [hit + table for hit, table in zip(hits, tables, strict=True)]
        if num_verified:
            places = range(start, start + num_verified)
            self.block_pool.cache_full_blocks(request, whole, places, self.block_size, parent)
        self.held.release(holder, only=[block for table in tables for block in table[num_verified:]])
        self.held.change(holder, "loaded")
        self.held.observer.on_accepted(holder, num_verified)

    def find_cached(self, request: Request, num_blocks: int) -> Sequence[Sequence[KVCacheBlock]]:
        """Returns the longest cached prefix of at most `num_blocks` blocks, per group."""
        return self._look_up.find(request, num_blocks)

    def get_tables(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        """Returns a request's own block tables, not to be kept or changed; none if it was not admitted."""
        held = self._requests.get(request_id)
        return held.tables if held is not None else ()

    def count_slots(self, request_id: str) -> int:
        """Returns the number of tokens that a request's blocks hold."""
        return self._requests[request_id].num_blocks * self.block_size

    def get_block_ids(self, request_id: str) -> BlockIds:
        """Returns the ids of a request's blocks, per group."""
        held = self._requests.get(request_id)
        tables = held.tables if held is not None else self.empty_kv_cache_blocks.blocks
        return tuple([block.block_id for block in table] for table in tables)

    def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes. Returns False, and does nothing, while any request holds blocks.

        What transfers hold stays with them, and cannot be hit any more.
        """
        if any(held.num_blocks for held in self._requests.values()):
            return False
        self.block_pool.num_lent = self.held.count_blocks()
        if not self.block_pool.reset_prefix_cache():
            return False
        if self._prefix_cache_stats is not None:
            self._prefix_cache_stats.reset = True
        return True

    def take_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Returns queries and hits since the last call; None if statistics are off."""
        stats = self._prefix_cache_stats
        if stats is not None:
            self._prefix_cache_stats = PrefixCacheStats()
        return stats

    def take_events(self) -> list[KVCacheEvictionEvent]:
        """Returns the sampled evictions since the last call."""
        return self._metrics.take_events() if self._metrics is not None else []

    def check_integrity(self) -> None:
        """Raises IntegrityError if tables and pool contradict each other. O(blocks + table entries); changes
        nothing."""
        references = [0] * self.block_pool.num_gpu_blocks
        null = self.block_pool.null_block
        for request_id, held in self._requests.items():
            for group, table in zip(self.groups, held.tables, strict=True):
                if len(table) != held.num_blocks or not held.num_hit_blocks <= held.num_cached_blocks <= len(table):
                    raise IntegrityError(f"the tables of request {request_id} and their lengths differ: {held}")
                for block in table:
                    references[block.block_id] += 1
                if not group.drops_blocks and null in table:
                    raise IntegrityError(f"request {request_id} lost a block of full attention: {table}")
                if any(block.block_hash is not None for block in table[held.num_cached_blocks :]):
                    raise IntegrityError(f"request {request_id} shares blocks that are not full: {table}")
        holds = [0] * len(references)
        for block in self.held.references():
            references[block.block_id] += 1
            holds[block.block_id] += 1
        self.block_pool.check_holds(holds)
        references[null.block_id] = 1
        self.block_pool.check_integrity(references)

    def _find_dropped_blocks(self, held: RequestBlocks, position: int) -> list[tuple[list[KVCacheBlock], int]]:
        """Returns the entries (table, index) that tokens from `position` on no longer read, each table's end first."""
        dropped: list[tuple[list[KVCacheBlock], int]] = []
        for group in self._windowed_groups:
            table = held.tables[group.group_id]
            index = min(group.first_block_read(position), held.num_blocks) - 1
            while index >= 0 and not table[index].is_null:
                dropped.append((table, index))
                index -= 1
        return dropped

    def _drop_blocks(self, dropped: Sequence[tuple[list[KVCacheBlock], int]]) -> None:
        self.block_pool.free_blocks([table[index] for table, index in dropped])
        for table, index in dropped:
            table[index] = self.block_pool.null_block

    def _count_blocks_to_come(
        self,
        request: Request,
        tables: Sequence[Sequence[KVCacheBlock]],
        hits: Sequence[Sequence[KVCacheBlock]],
    ) -> int:
        """Returns how many new blocks the request's present tokens need in all, beyond what it holds and hits."""
        count = 0
        for group, table, hit in zip(self.groups, tables, hits, strict=True):
            num_owned = sum(not block.is_null for part in (table, hit) for block in part)
            count += max(0, blocks_needed(group.spec, request.num_tokens, group.max_step_tokens) - num_owned)
        return count

    def _admit(
        self,
        request: Request,
        held: RequestBlocks,
        hits: Sequence[Sequence[KVCacheBlock]],
        num_hit_blocks: int,
        num_external_tokens: int,
    ) -> None:
        self._requests[request.request_id] = held
        self._look_up.forget()
        if num_hit_blocks:
            for table, hit in zip(held.tables, hits, strict=True):
                self.block_pool.touch(hit)
                table.extend(hit)
            held.num_blocks = held.num_hit_blocks = held.num_cached_blocks = num_hit_blocks
            held.last_content = hits[0][-1].content
        if self._prefix_cache_stats is not None and self.enable_caching and not request.skip_reading_prefix_cache:
            num_hits = num_hit_blocks * self.block_size - num_external_tokens
            self._prefix_cache_stats.record(request.num_tokens, num_hits, preempted=request.num_preemptions > 0)

    def _append_new_blocks(self, held: RequestBlocks, num_new_blocks: int) -> KVCacheBlocks:
        blocks = self.block_pool.get_new_blocks(num_new_blocks * len(self.groups))
        parts = tuple(blocks[i : i + num_new_blocks] for i in range(0, len(blocks), num_new_blocks))
        for table, part in zip(held.tables, parts, strict=True):
            table.extend(part)
        held.num_blocks += num_new_blocks
        return KVCacheBlocks(parts)

    def _cache_full_blocks(self, request: Request, held: RequestBlocks, num_tokens: int) -> None:
        """Registers blocks that are full within the first `num_tokens` tokens. Drafts among them have no hashes yet."""
        num_full = min(num_tokens // self.block_size, len(request.block_hashes))
        if num_full > held.num_cached_blocks:
            held.last_content = self.block_pool.cache_full_blocks(
                request, held.tables, range(held.num_cached_blocks, num_full), self.block_size, held.last_content
            )
            if self.on_full_blocks is not None:
                self.on_full_blocks(request, held.num_cached_blocks, num_full, held.tables)
            held.num_cached_blocks = num_full

    def _evict_uncomputed_blocks(self, request: Request, held: RequestBlocks, num_computed_blocks: int) -> None:
        """Unregisters blocks that were allocated for a step which will not compute them."""
        for table in held.tables:
            blocks = table[num_computed_blocks : held.num_cached_blocks]
            if any(block.ref_cnt > 1 and not block.is_null for block in blocks):
                raise IntegrityError(
                    f"request {request.request_id} is freed with {request.num_computed_tokens} computed tokens, while "
                    f"another request shares blocks beyond them ({blocks}): nobody would compute these. Free a request "
                    f"before resetting its num_computed_tokens, and preempt before admitting"
                )
            self.block_pool.evict_blocks(blocks)

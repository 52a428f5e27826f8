"""Two oracles of the prefix cache that tokens cannot show: the longest prefix is found, the right blocks survive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import Request
from quire.wire.execution import SchedulerOutput

Prefix = tuple[object, ...]
"""All that decides what a block holds: salt, adapter, and every token up to its end."""


class CacheModel:
    """Which block holds which prefix, learnt from the steps alone; for engines with one group of full attention.

    A block holds a prefix from the step that fills it until it is given to someone else. So at every admission the
    longest cached prefix is known without looking into the block pool.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._prefix_of: dict[int, Prefix] = {}
        self._holders: defaultdict[Prefix, set[int]] = defaultdict(set)
        self._tables: dict[str, list[int]] = {}
        self._admitted: dict[str, tuple[Request, int]] = {}
        """Running requests, and how many of their tokens have been filled in."""
        self._num_preemptions: dict[str, int] = {}
        """Preemptions of requests before their admission."""

    def check_step(self, step: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Follow one step in the order it was scheduled: running requests, then admissions."""
        for req_id in step.preempted_req_ids | step.finished_req_ids:
            self._admitted.pop(req_id, None)
        cached, drafts = step.scheduled_cached_reqs, step.scheduled_spec_decode_tokens
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for req_id, new_block_ids, num_computed in rows:
            if new_block_ids is not None:
                self._give_out(new_block_ids[0])
                self._tables[req_id] += new_block_ids[0]
            self._fill(req_id, num_computed + step.num_scheduled_tokens[req_id] - len(drafts.get(req_id, ())))
        for data in step.scheduled_new_reqs:
            request, (table,) = requests[data.req_id], data.block_ids
            num_hits = data.num_computed_tokens // self.block_size
            self._check_hit(request, num_hits)
            self._give_out(table[num_hits:])
            self._tables[data.req_id] = list(table)
            self._admitted[data.req_id] = request, data.num_computed_tokens
            self._num_preemptions[data.req_id] = request.num_preemptions
            self._fill(data.req_id, data.num_computed_tokens + step.num_scheduled_tokens[data.req_id])

    def _check_hit(self, request: Request, num_hits: int) -> None:
        if request.skip_reading_prefix_cache:
            return
        longest = 0
        while (longest + 1) * self.block_size < request.num_tokens and self._holders.get(
            self._prefix(request, longest)
        ):
            longest += 1
        assert num_hits == longest, f"{request} was admitted with {num_hits} cached blocks, {longest} were there"

    def _prefix(self, request: Request, index: int) -> Prefix:
        tokens = request.all_token_ids[: (index + 1) * self.block_size]
        lora = request.lora_request
        adapter = None
        if lora is not None and request.lora_start < len(tokens):  # before it begins, the model is the base
            adapter = lora.lora_name, lora.lora_path, request.lora_revision, request.lora_start
        return (request.cache_salt, adapter, *tokens)

    def _give_out(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            prefix = self._prefix_of.pop(block_id, None)
            if prefix is not None:
                self._holders[prefix].discard(block_id)

    def accepted(self, req_id: str) -> None:
        """Its new tokens were sent to its client: all but the last are computed."""
        request, _ = self._admitted.get(req_id, (None, 0))
        if request is not None and request.num_preemptions == self._num_preemptions[req_id]:  # it still had its blocks
            self._fill(req_id, request.num_tokens - 1)

    def _fill(self, req_id: str, num_tokens: int) -> None:
        """Fills the blocks of its first `num_tokens` tokens."""
        table, (request, num_filled) = self._tables[req_id], self._admitted[req_id]
        for index in range(num_filled // self.block_size, num_tokens // self.block_size):
            prefix = self._prefix(request, index)
            self._prefix_of[table[index]] = prefix
            self._holders[prefix].add(table[index])
        self._admitted[req_id] = request, max(num_filled, num_tokens)

    def clear(self) -> None:
        """The cache was reset."""
        self._prefix_of.clear()
        self._holders.clear()
        self._admitted.clear()


def free_queue(manager: KVCacheManager) -> list[int]:
    """Ids of the free blocks, the next to be given out first."""
    return [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]


def check_order_of_new_blocks(before: list[int], after: list[int], step: SchedulerOutput, block_size: int) -> None:
    """One step took its hits out of the middle of the free queue and its new blocks from the head, in order.

    For steps without preemptions of engines with one group of full attention; `before` and `after` are the queue.
    """
    hits: set[int] = set()
    taken: list[int] = []
    for new_block_ids in step.scheduled_cached_reqs.new_block_ids:
        taken += new_block_ids[0] if new_block_ids is not None else []
    for data in step.scheduled_new_reqs:
        num_hits = data.num_computed_tokens // block_size
        hits.update(set(data.block_ids[0][:num_hits]).difference(taken))  # one may share what this very step fills
        taken += data.block_ids[0][num_hits:]
    left = [block_id for block_id in before if block_id not in hits]
    assert taken == left[: len(taken)], f"blocks {taken} were given out; the least recently used ones are {left}"
    assert after == left[len(taken) :], f"the free queue should be {left[len(taken) :]}, it is {after}"


@contextmanager
def check_order_of_freed_blocks(manager: KVCacheManager, request_id: str) -> Iterator[None]:
    """Checks the order in which the blocks of `request_id` alone are freed.

    Blocks that cannot be hit go to the head of the free queue, the others to its tail, the end of the prefix first, so
    that its start survives longest; the rest keeps its order.
    """
    before = free_queue(manager)
    freed = [[b for b in group if b.ref_cnt == 1 and not b.is_null] for group in manager.get_tables(request_id)]
    yield
    worthless = {b.block_id for group in freed for b in group if b.block_hash is None}
    after = free_queue(manager)
    start = len(worthless)
    assert set(after[:start]) == worthless, f"{worthless} should be the first to go: {after}"
    assert after[start : start + len(before)] == before, f"the free queue was {before}, it is {after}"
    tail = after[start + len(before) :]
    for group in freed:
        ids = [b.block_id for b in group if b.block_id not in worthless]
        assert [i for i in tail if i in ids] == ids[::-1], f"blocks {ids} went back in the order {tail}"

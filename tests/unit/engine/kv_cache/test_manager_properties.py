"""Any order of admissions, steps, drafts, preemptions and resets, on a cache whose slots say what was written to them.

The slots play the worker: computing a token writes its whole prefix (and salt) to its slot in every group, then reads
back everything it attends to. A wrong block table, a stale hit, a block evicted in use or a hash collision taken for a
hit makes a read find another prefix.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.engine.kv_cache.hashing import HashFunction
from quire.wire.block_hash import BlockHash, ExtraKeys, hash_block
from quire.wire.kv_cache import AnyKVCacheSpec, ChunkedSpec, SlidingWindowSpec
from quire.wire.stats import PrefixCacheStats
from tests.seeds import examples
from tests.unit.engine.kv_cache.model import BLOCK_SIZE, ModelRequest, chunked, full, make_manager, sliding

MAX_MODEL_LEN = 40
LAYOUTS: list[tuple[AnyKVCacheSpec, ...]] = [
    (full(),),
    (sliding(5),),
    (sliding(1),),
    (full(), sliding(6)),
    (full(), sliding(3), sliding(10)),
    (chunked(6),),
    (full(), chunked(8), chunked(11)),
]

Prefix = tuple[str | None, tuple[int, ...]]


def hash_to_two_bits(parent: BlockHash | None, token_ids: object, extra_keys: ExtraKeys | None) -> BlockHash:
    """So weak that every look-up collides."""
    return bytes([hash_block(parent, token_ids, extra_keys)[0] & 3])  # type: ignore[arg-type]


class World:
    """Scheduler and worker in a few lines: requests, the manager under test, and the slots."""

    def __init__(self, specs: tuple[AnyKVCacheSpec, ...], num_blocks: int, hash_function: HashFunction) -> None:
        self.specs = specs
        self.hash_function = hash_function
        self.manager = make_manager(num_blocks, *specs, max_model_len=MAX_MODEL_LEN)
        self.waiting: list[ModelRequest] = []
        self.running: list[ModelRequest] = []
        self.slots: dict[tuple[int, int], tuple[int, Prefix]] = {}
        self.num_added = 0
        self.num_admissions = 0
        self.num_hit_tokens = 0

    def add(self, prompt: list[int], salt: str | None) -> None:
        request_id = str(self.num_added)
        self.waiting.append(ModelRequest(request_id, prompt, salt, hash_function=self.hash_function))
        self.num_added += 1

    def admit(self, num_requests: int, max_chunk: int, *, full_sequence_must_fit: bool, reserved_blocks: int) -> None:
        """Several in one step: the later may share blocks that the step has yet to compute for the earlier."""
        step: list[tuple[ModelRequest, int]] = []
        for request in self.waiting[:num_requests]:
            blocks, num_hit = self.manager.get_computed_blocks(request)
            assert num_hit < request.num_tokens
            num_new = min(max_chunk, request.num_tokens - num_hit)
            new_blocks = self.manager.allocate_slots(
                request,
                num_new,
                num_hit,
                blocks,
                full_sequence_must_fit=full_sequence_must_fit,
                reserved_blocks=reserved_blocks,
            )
            if new_blocks is None:
                break
            tables = zip(self.manager.get_tables(request.request_id), blocks.blocks, new_blocks.blocks, strict=True)
            assert all(table == hits + new for table, hits, new in tables)
            request.num_computed_tokens = num_hit
            self.num_admissions += 1
            self.num_hit_tokens += num_hit
            step.append((request, num_new))
        for request, _ in step:
            self.waiting.remove(request)
            self.running.append(request)
        self._compute(step)
        for request, _ in step:
            self._sample(request)

    def go_on(self, request: ModelRequest, max_chunk: int, drafts: list[int], num_accepted: int) -> None:
        """One step of a running request; drafts only once its prompt is computed. Out of blocks: preempted."""
        num_new = min(max_chunk, request.num_tokens - request.num_computed_tokens)
        if request.num_computed_tokens + num_new < request.num_tokens:
            drafts, num_accepted = [], 0
        drafts = drafts[: MAX_MODEL_LEN - request.num_tokens]
        num_accepted = min(num_accepted, len(drafts))
        before = self.manager.get_block_ids(request.request_id)
        new_blocks = self.manager.allocate_slots(request, num_new + len(drafts))
        if new_blocks is None:
            assert self.manager.get_block_ids(request.request_id) == before
            self.preempt(request)
            return
        self._compute([(request, num_new)], drafts)
        request.append(*drafts[:num_accepted])
        request.num_computed_tokens += num_accepted
        self._sample(request)

    def preempt(self, request: ModelRequest) -> None:
        self.running.remove(request)
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def schedule_and_preempt(self, request: ModelRequest, max_chunk: int) -> None:
        """Allocates blocks for a step that is never computed."""
        num_new = min(max_chunk, request.num_tokens - request.num_computed_tokens)
        self.manager.allocate_slots(request, num_new)
        self.preempt(request)

    def finish(self, request: ModelRequest) -> None:
        self.running.remove(request)
        self.manager.free(request)

    def check(self) -> None:
        """Checks that no block is lost, and that no block in use is unaccounted for."""
        self.manager.check_integrity()
        if not self.running:
            assert self.manager.usage == 0.0

    def check_stats(self) -> None:
        """One query per admission, and the hits that were really taken."""
        stats = self.manager.take_prefix_cache_stats() or PrefixCacheStats()
        assert stats.requests + stats.preempted_requests == self.num_admissions
        assert stats.hits + stats.preempted_hits == self.num_hit_tokens
        self.num_admissions = self.num_hit_tokens = 0

    def _sample(self, request: ModelRequest) -> None:
        """Once all tokens are computed comes the next, or the end."""
        if request.num_computed_tokens < request.num_tokens:
            return
        if request.num_tokens == MAX_MODEL_LEN:
            self.finish(request)
        else:
            request.append(request.num_tokens // 3 % 2)

    def _compute(self, step: list[tuple[ModelRequest, int]], drafts: list[int] | None = None) -> None:
        spans: list[tuple[ModelRequest, list[int], range]] = []
        for request, num_new in step:
            tokens = request.all_token_ids + (drafts or [])
            start = request.num_computed_tokens
            spans.append((request, tokens, range(start, start + num_new + len(drafts or []))))
            request.num_computed_tokens += num_new
        for request, tokens, positions in spans:  # all writes come before all reads
            for group_id, table in enumerate(self.manager.get_block_ids(request.request_id)):
                for position in positions:
                    block_id = table[position // BLOCK_SIZE]
                    assert block_id != 0
                    prefix = (request.cache_salt, tuple(tokens[: position + 1]))
                    self.slots[block_id, position % BLOCK_SIZE] = (group_id, prefix)
        for request, tokens, positions in spans:
            for group_id, table in enumerate(self.manager.get_block_ids(request.request_id)):
                spec = self.specs[group_id]
                first = positions.start - spec.sliding_window + 1 if isinstance(spec, SlidingWindowSpec) else 0
                if isinstance(spec, ChunkedSpec):
                    first = positions.start // spec.chunk_size * spec.chunk_size
                for position in range(max(0, first), positions.stop):
                    prefix = (request.cache_salt, tuple(tokens[: position + 1]))
                    slot = (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                    assert self.slots[slot] == (group_id, prefix)


TOKENS = st.integers(0, 1)


class KVCacheMachine(RuleBasedStateMachine):
    """Prompts over two letters share prefixes all the time; pools are so small that most admissions evict."""

    @initialize(layout=st.sampled_from(LAYOUTS), num_blocks=st.integers(0, 16), weak=st.booleans())
    def start(self, layout: tuple[AnyKVCacheSpec, ...], num_blocks: int, weak: bool) -> None:
        smallest = 1 + len(layout) * MAX_MODEL_LEN // BLOCK_SIZE  # one request always fits
        self.world = World(layout, smallest + num_blocks, hash_to_two_bits if weak else hash_block)

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=20), salt=st.sampled_from([None, None, "", "a"]))
    def add(self, prompt: list[int], salt: str | None) -> None:
        self.world.add(prompt, salt)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        """The tokens of a running request, and perhaps some more: a long hit."""
        request = data.draw(st.sampled_from(self.world.running))
        more = data.draw(st.lists(TOKENS, min_size=1, max_size=4))
        self.world.add((request.all_token_ids + more)[: MAX_MODEL_LEN - 1], request.cache_salt)

    @precondition(lambda self: self.world.waiting)
    @rule(
        num_requests=st.integers(1, 3),
        max_chunk=st.integers(1, 20),
        must_fit=st.booleans(),
        reserved=st.integers(0, 2),
    )
    def admit(self, num_requests: int, max_chunk: int, must_fit: bool, reserved: int) -> None:
        self.world.admit(num_requests, max_chunk, full_sequence_must_fit=must_fit, reserved_blocks=reserved)

    @precondition(lambda self: self.world.running)
    @rule(
        data=st.data(),
        max_chunk=st.integers(1, 9),
        drafts=st.lists(TOKENS, max_size=5),
        num_accepted=st.integers(0, 5),
    )
    def go_on(self, data: st.DataObject, max_chunk: int, drafts: list[int], num_accepted: int) -> None:
        request = data.draw(st.sampled_from(self.world.running))
        self.world.go_on(request, max_chunk, drafts, num_accepted)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), max_chunk=st.integers(0, 9))
    def preempt(self, data: st.DataObject, max_chunk: int) -> None:
        request = data.draw(st.sampled_from(self.world.running))
        if max_chunk:
            self.world.schedule_and_preempt(request, max_chunk)
        else:
            self.world.preempt(request)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(self.world.running)))

    @rule()
    def reset(self) -> None:
        assert self.world.manager.reset_prefix_cache() is (not self.world.running)

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            self.world.check_stats()


KVCacheMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestKVCacheMachine = KVCacheMachine.TestCase


@pytest.mark.parametrize("weak_hash", [False, True])
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=["full", "window", "window of 1", "full+window", "full+windows", "chunks", "full+chunks"]
)
def test_long_runs_keep_every_invariant(layout: tuple[AnyKVCacheSpec, ...], weak_hash: bool) -> None:
    """3000 operations from a seed: long enough for pools to fill, and for content to outlive its parents."""
    rng = random.Random(f"{layout} {weak_hash}")
    smallest = 1 + len(layout) * MAX_MODEL_LEN // BLOCK_SIZE
    world = World(layout, smallest + 4, hash_to_two_bits if weak_hash else hash_block)
    num_hit_tokens = 0
    for _ in range(3000):
        action = rng.choice(["add", "admit", "admit", "go on", "go on", "go on", "go on", "preempt", "finish", "reset"])
        request = rng.choice(world.running) if world.running else None
        if action == "add" and len(world.waiting) < 4:
            world.add(rng.choices([0, 1], k=rng.randint(1, 24)), rng.choice([None, None, None, "", "a"]))
        elif action == "admit":
            world.admit(
                rng.randint(1, 3),
                rng.randint(1, 20),
                full_sequence_must_fit=rng.random() < 0.5,
                reserved_blocks=rng.randint(0, 2),
            )
        elif action == "reset" and rng.random() < 0.05:
            world.manager.reset_prefix_cache()
        elif request is None:
            continue
        elif action == "go on":
            drafts = rng.choices([0, 1], k=rng.choice([0, 0, 0, 3]))
            world.go_on(request, rng.randint(1, 9), drafts, rng.randint(0, 3))
        elif action == "preempt" and rng.random() < 0.5:
            world.schedule_and_preempt(request, rng.randint(1, 9))
        elif action == "finish" and rng.random() < 0.5:
            world.finish(request)
        world.check()
        num_hit_tokens += world.num_hit_tokens
        world.check_stats()
    assert num_hit_tokens > 1000

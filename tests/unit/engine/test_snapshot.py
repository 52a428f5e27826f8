"""A snapshot says what the pool and the tables say, whatever happens, and stays bounded."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from quire.engine import snapshot as snapshot_module
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.sched.scheduler import Scheduler
from quire.engine.snapshot import held_blocks, make_block_map
from quire.wire.stats import EngineSnapshot, RequestSnapshot
from tests.seeds import seeds

from .harness import make_request, make_scheduler
from .kv_cache.model import ModelRequest, admit, decode, full, make_manager, sliding
from .sched.test_scheduler_random import Life


def ids_of(request: RequestSnapshot) -> list[int]:
    ids = array("I")
    ids.frombytes(request.block_ids)
    return list(ids)


def check_blocks(found: EngineSnapshot, pool: BlockPool) -> None:
    """Block by block, by brute force."""
    blocks = found.blocks
    assert blocks.num_blocks == len(pool.blocks)
    assert blocks.num_free == sum(block.ref_cnt == 0 for block in pool.blocks)
    assert blocks.num_cached == sum(block.block_hash is not None for block in pool.blocks)
    listed = pool.blocks[: blocks.num_touched : blocks.stride]
    assert list(blocks.references) == [block.ref_cnt for block in listed]
    assert list(blocks.is_cached) == [block.block_hash is not None for block in listed]
    assert all(block.ref_cnt == 0 and block.block_hash is None for block in pool.blocks[blocks.num_touched :])


def check_requests(found: EngineSnapshot, scheduler: Scheduler) -> None:
    """Checks requests, places and blocks; the ids of all tables together are the references of the pool."""
    assert found.num_left_out == 0
    assert {r.request_id for r in found.requests} == scheduler.requests.keys()
    places = {place: [r.request_id for r in found.requests if r.place == place] for place in PLACES}
    assert places["running"] == [r.request_id for r in scheduler.running]
    ready = [r.request_id for r in found.requests if r.place in ("waiting", "preempted")]
    assert ready == [r.request_id for r in scheduler.waiting.ready]
    assert places["blocked"] == [r.request_id for r in scheduler.waiting.blocked]
    counts = [0] * len(scheduler.kv_cache_manager.block_pool.blocks)
    for one in found.requests:
        request = scheduler.requests[one.request_id]
        assert (one.num_prompt_tokens, one.num_tokens) == (request.num_prompt_tokens, request.num_tokens)
        assert (one.num_computed_tokens, one.num_preemptions) == (request.num_computed_tokens, request.num_preemptions)
        assert one.num_blocks == len(ids_of(one))
        for block_id in ids_of(one):
            counts[block_id] += 1
    counts[0] = 1
    assert counts == [block.ref_cnt for block in scheduler.kv_cache_manager.block_pool.blocks]


PLACES = ("running", "waiting", "preempted", "blocked")


@pytest.mark.fresh
def test_it_says_what_the_pool_and_the_tables_say() -> None:
    """At every moment of lives with shared prefixes, preemptions, aborts and resets."""
    seen: set[str] = set()
    for seed in seeds(6):
        life = Life(seed)
        for _ in range(150):
            life.act()
            scheduler = life.engine.scheduler
            found = scheduler.make_snapshot()
            check_blocks(found, scheduler.kv_cache_manager.block_pool)
            check_requests(found, scheduler)
            seen |= {one.place for one in found.requests}
            assert (found.num_running, found.num_waiting) == scheduler.get_request_counts()
    assert seen == set(PLACES)


def test_looking_changes_nothing() -> None:
    watched, alone = Life(3), Life(3)
    for _ in range(150):
        watched.act()
        watched.engine.scheduler.make_snapshot()
        alone.act()
    watched.finish()
    alone.finish()
    assert watched.engine.outputs.keys() == alone.engine.outputs.keys()
    assert all(watched.engine.tokens(name) == alone.engine.tokens(name) for name in alone.engine.outputs)


def test_a_large_cache_is_listed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_BLOCKS", 10)
    pool = BlockPool(100)
    assert make_block_map(pool).num_touched == 1
    blocks = pool.get_new_blocks(41)
    pool.touch(blocks[3:4])
    pool.free_blocks(blocks[20:])
    found = make_block_map(pool)
    assert (found.num_touched, found.stride, found.num_free) == (42, 5, 99 - 20)
    assert list(found.references) == [1, 1, 1, 1, 1, 0, 0, 0, 0]
    pool.touch(blocks[4:5] * 300)
    assert list(make_block_map(pool).references)[:3] == [1, 255, 1]


def test_many_requests_are_listed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_TABLE_ENTRIES", 8)
    monkeypatch.setattr("quire.engine.sched.scheduler.MAX_REQUESTS", 3)
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abcde":
        scheduler.add_request(make_request(name, 20))
    scheduler.schedule()
    found = scheduler.make_snapshot()
    assert [(r.request_id, r.place, r.num_blocks) for r in found.requests] == [
        ("a", "running", 5), ("b", "running", 5), ("c", "waiting", 0),
    ]  # fmt: skip
    assert [len(ids_of(r)) for r in found.requests] == [4, 4, 0]
    assert (found.num_left_out, found.num_running, found.num_waiting) == (2, 2, 3)


def test_blocks_that_a_window_has_left_are_not_held() -> None:
    manager = make_manager(60, full(), sliding(5), max_model_len=100)
    request = ModelRequest("a", list(range(20)))
    admit(manager, request)
    decode(manager, request, range(20, 30))
    tables = manager.get_tables("a")
    expected = [block.block_id for table in tables for block in table if not block.is_null]
    num_blocks, ids = held_blocks(tables, 1000)
    assert (num_blocks, list(ids)) == (len(expected), expected)
    assert len(expected) < sum(map(len, tables))
    num_blocks, ids = held_blocks(tables[1:], 1)
    assert list(ids) == [next(block.block_id for block in tables[1] if not block.is_null)]
    assert held_blocks(manager.get_tables("nobody"), 5)[0] == 0


def test_the_first_of_a_queue_are_those_that_would_be_popped_first() -> None:
    scheduler = make_scheduler(scheduling_policy="priority")
    for index, priority in enumerate([5, 1, 4, 1, 3, 9, 2, 6, 0]):
        scheduler.add_request(make_request(f"r{index}", 4, priority=priority))
    queue = scheduler.waiting.ready
    for count in range(12):
        assert queue.first(count) == list(queue)[:count]


def test_it_crosses_a_process() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 9, max_tokens=7))
    scheduler.schedule()
    found = scheduler.make_snapshot()
    crossed = msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(found)), EngineSnapshot)
    assert crossed == found
    assert crossed.requests[0].max_tokens == 7

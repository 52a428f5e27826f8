"""Lifetime, idle time and reuse gaps of blocks, on a clock of our own."""

from __future__ import annotations

import pytest

from quire.engine.kv_cache.block import KVCacheMetricsCollector
from quire.wire.stats import KVCacheEvictionEvent
from tests.unit.engine.kv_cache.model import ModelRequest, admit, letters, make_manager


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_life_of_a_block() -> None:
    clock = _Clock()
    collector = KVCacheMetricsCollector(1.0, clock)
    collector.on_block_allocated(7)
    for now in (103.0, 104.0):
        clock.now = now
        collector.on_block_accessed(7)
    clock.now = 110.0
    collector.on_block_evicted(7)
    assert collector.take_events() == [KVCacheEvictionEvent(10.0, 6.0, (3.0, 1.0))]
    assert collector.take_events() == []


def test_only_the_last_four_accesses_are_kept() -> None:
    clock = _Clock()
    collector = KVCacheMetricsCollector(1.0, clock)
    collector.on_block_allocated(7)
    for gap in (1, 2, 4, 8, 16):
        clock.now += gap
        collector.on_block_accessed(7)
    collector.on_block_evicted(7)
    assert collector.take_events() == [KVCacheEvictionEvent(31.0, 0.0, (4.0, 8.0, 16.0))]


def test_blocks_that_are_not_followed_make_no_event() -> None:
    collector = KVCacheMetricsCollector(0.0, _Clock())
    collector.on_block_allocated(7)
    collector.on_block_accessed(7)
    collector.on_block_evicted(7)
    assert collector.take_events() == []


@pytest.mark.parametrize("sample_rate", [0.1, 0.5])
def test_the_sample_rate_is_kept(sample_rate: float) -> None:
    def sample(seed: int) -> int:
        collector = KVCacheMetricsCollector(sample_rate, _Clock(), seed)
        for block_id in range(4000):
            collector.on_block_allocated(block_id)
            collector.on_block_evicted(block_id)
        return len(collector.take_events())

    assert sample(1) == sample(1)
    assert abs(sample(1) / 4000 - sample_rate) < 0.04


def test_reallocation_without_eviction_begins_a_new_life() -> None:
    clock = _Clock()
    collector = KVCacheMetricsCollector(1.0, clock)
    collector.on_block_allocated(7)
    clock.now = 200.0
    collector.on_block_allocated(7)
    clock.now = 201.0
    collector.on_block_evicted(7)
    assert collector.take_events() == [KVCacheEvictionEvent(1.0, 1.0)]


def test_through_the_manager() -> None:
    """One usable block: computed, hit once, evicted by other tokens."""
    clock = _Clock()
    manager = make_manager(3, metrics=KVCacheMetricsCollector(1.0, clock))
    first, second = ModelRequest("0", letters("ABCDE")), ModelRequest("1", letters("ABCDF"))
    assert admit(manager, first) == 0
    clock.now = 101.0
    manager.free(first)
    clock.now = 105.0
    assert admit(manager, second) == 4
    clock.now = 106.0
    manager.free(second)
    assert manager.take_events() == []
    clock.now = 109.0
    assert admit(manager, ModelRequest("2", letters("abcdefgh"))) == 0
    assert manager.take_events() == [KVCacheEvictionEvent(9.0, 4.0, (5.0,))]


def test_reset_of_the_cache_is_no_eviction() -> None:
    manager = make_manager(3, metrics=KVCacheMetricsCollector(1.0, _Clock()))
    request = ModelRequest("0", letters("ABCDE"))
    admit(manager, request)
    manager.free(request)
    assert manager.reset_prefix_cache()
    admit(manager, ModelRequest("1", letters("abcdefgh")))
    assert manager.take_events() == []


def test_no_collector_no_events() -> None:
    assert make_manager(3).take_events() == []

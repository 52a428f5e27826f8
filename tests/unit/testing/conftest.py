"""A FakeExecutor and the messages an engine would send it."""

from __future__ import annotations

import pytest

from quire.config.engine import EngineConfig, SchedulerConfig
from quire.config.model import ModelConfig
from quire.testing.fake_executor import FakeExecutor
from quire.wire.kv_cache import (
    AnyKVCacheSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

BLOCK_SIZE = 4
FULL = FullAttentionSpec(BLOCK_SIZE, 1, 1)
SLIDING = SlidingWindowSpec(BLOCK_SIZE, 1, 1, sliding_window=6)


def make_executor(*specs: AnyKVCacheSpec, pipeline_depth: int = 1, executor_class: type = FakeExecutor) -> FakeExecutor:
    """An initialized executor with a group per spec, ten blocks, a budget of 32 tokens and four requests."""
    config = EngineConfig(
        model_config=ModelConfig(max_model_len=64),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4),
    )
    configured = type("Configured", (executor_class,), {"pipeline_depth": pipeline_depth})
    executor = configured(config)
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs or (FULL,))]
    executor.initialize_from_config([KVCacheConfig(10, [], groups)])
    return executor


@pytest.fixture
def executor() -> FakeExecutor:
    """One group of full attention, blocks of four tokens."""
    return make_executor()

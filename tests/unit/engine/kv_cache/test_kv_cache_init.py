"""From the workers' reports to a cache."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from quire.config.lora import LoRAConfig
from quire.engine.kv_cache.sizing import initialize_kv_caches
from quire.errors import ConfigError

from ..harness import BLOCK_SIZE, SPEC, ScriptedExecutor, make_config


def test_the_order_of_calls_and_what_comes_of_them(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(num_blocks=None)
    executor = ScriptedExecutor(config)
    executor.num_bytes = 300 * SPEC.page_size_bytes
    with caplog.at_level(logging.INFO, logger="quire"):
        sizes = initialize_kv_caches(config, executor)
    assert executor.calls == ["get_kv_cache_specs", "determine_available_memory", "initialize_from_config"]
    assert executor.kv_cache_configs == [sizes.config]
    assert executor.rpcs == []
    assert (sizes.config.num_blocks, sizes.block_size, sizes.max_model_len) == (300, BLOCK_SIZE, 200)
    assert sizes.num_tokens == 299 * BLOCK_SIZE
    assert sizes.max_concurrency == pytest.approx(299 / 50)
    (line,) = [record.message for record in caplog.records]
    assert "300 blocks of 4 tokens, 1196 tokens, 5.98x concurrency at 200 tokens per request" in line


def test_a_context_fitted_to_the_memory_is_told_to_the_workers() -> None:
    config = make_config(max_model_len=-1, num_blocks=31)
    executor = ScriptedExecutor(config)
    sizes = initialize_kv_caches(config, executor)
    assert sizes.max_model_len == 120
    assert executor.rpcs == [("update_max_model_len", None, (120,), None)]
    assert sizes.max_concurrency == 1.0


def test_a_context_that_does_not_fit_is_an_error_before_anything_is_allocated() -> None:
    config = make_config(max_model_len=200, num_blocks=31)
    executor = ScriptedExecutor(config)
    with pytest.raises(ConfigError, match="longest that fits is 120 tokens"):
        initialize_kv_caches(config, executor)
    assert "initialize_from_config" not in executor.calls


def test_a_model_without_a_cache(caplog: pytest.LogCaptureFixture) -> None:
    """An encoder: nothing limits how many texts there are, and no number is made up."""
    config = make_config(num_blocks=None)
    executor = ScriptedExecutor(config)
    executor.get_kv_cache_specs = lambda: [{}]  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, logger="quire"):
        sizes = initialize_kv_caches(config, executor)
    assert (sizes.config.num_blocks, sizes.config.kv_cache_groups, sizes.block_size) == (1, [], 1)
    assert (sizes.num_tokens, sizes.max_concurrency, sizes.max_model_len) == (0, 0.0, 200)
    assert executor.calls[-1] == "initialize_from_config"
    assert "no KV cache" in caplog.records[-1].message


@pytest.mark.parametrize(
    ("lora", "available", "kv_cache_memory_bytes", "adapters", "left"),
    [
        (LoRAConfig(), 1000, None, 0, 1000),
        (LoRAConfig(enable_lora=True), 1000, None, 500, 500),  # half of a little: a tenth holds no adapter
        (LoRAConfig(enable_lora=True), 2 << 30, None, (2 << 30) // 10, (2 << 30) - (2 << 30) // 10),
        (LoRAConfig(enable_lora=True), 100 << 30, None, 1 << 30, 99 << 30),
        (LoRAConfig(enable_lora=True, lora_memory_bytes=300), 1000, None, 300, 700),
        (LoRAConfig(enable_lora=True, lora_memory_bytes=300), 1000, 1000, 300, 1000),  # the cache has its own size
    ],
)
def test_adapters_get_their_memory_before_the_cache(
    lora: LoRAConfig, available: int, kv_cache_memory_bytes: int | None, adapters: int, left: int
) -> None:
    config = make_config(num_blocks=None)
    cache = replace(config.cache_config, kv_cache_memory_bytes=kv_cache_memory_bytes)
    executor = ScriptedExecutor(config)
    executor.num_bytes = available * SPEC.page_size_bytes
    scaled = None if lora.lora_memory_bytes is None else lora.lora_memory_bytes * SPEC.page_size_bytes
    if available > 1 << 30:
        executor.num_bytes = available
    sizes = initialize_kv_caches(
        replace(config, lora_config=replace(lora, lora_memory_bytes=scaled), cache_config=cache), executor
    )
    unit = 1 if available > 1 << 30 else SPEC.page_size_bytes
    assert sizes.adapter_bytes == adapters * unit
    assert sizes.config.num_blocks == left * unit // SPEC.page_size_bytes

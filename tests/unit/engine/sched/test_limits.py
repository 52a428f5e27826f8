"""The limits that follow from a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.engine import SchedulerConfig
from quire.engine.request import Request
from quire.engine.sched.step import SchedulerLimits
from quire.errors import ConfigError, PromptTooLongError
from quire.pooling_params import PoolingParams
from quire.wire.engine_core import EngineCoreRequest

from ..harness import make_request


def make_limits(max_model_len: int = 10, **config: Any) -> SchedulerLimits:
    fields = {"max_num_batched_tokens": 64, "max_num_seqs": 4, **config}
    return SchedulerLimits.from_config(SchedulerConfig(**fields), max_model_len, num_blocks=41)


def test_the_step_budget_is_the_batch_budget_unless_said() -> None:
    assert make_limits().max_num_scheduled_tokens == 64
    assert make_limits(max_num_scheduled_tokens=5).max_num_scheduled_tokens == 5
    assert make_limits(max_num_batched_tokens=None, max_num_scheduled_tokens=5).max_num_scheduled_tokens == 5


@pytest.mark.parametrize("missing", ["max_num_batched_tokens", "max_num_seqs"])
def test_open_budgets_are_refused(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing}=None"):
        make_limits(10, **{missing: None})


@pytest.mark.parametrize("budget", ["max_num_batched_tokens", "max_num_scheduled_tokens"])
def test_a_prompt_that_may_not_be_split_must_fit_into_a_step(budget: str) -> None:
    make_limits(10, enable_chunked_prefill=False, **{budget: 10})
    with pytest.raises(ConfigError, match="a step of 9 tokens cannot take a prompt of up to 10"):
        make_limits(10, enable_chunked_prefill=False, **{budget: 9})


def test_the_watermark_is_a_share_of_the_blocks_rounded_down() -> None:
    assert make_limits(watermark=0.1).watermark_blocks == 4
    assert make_limits().watermark_blocks == 0


@pytest.mark.parametrize(
    ("missing", "budget", "threshold", "chunked", "expected"),
    [
        (30, 64, 0, True, 30),
        (30, 20, 0, True, 20),
        (30, 64, 8, True, 8),
        (30, 5, 8, True, 5),
        (8, 64, 8, True, 8),
        (7, 64, 8, True, 7),
        (30, 64, 8, False, 30),
        (30, 29, 8, False, 29),
    ],
)
def test_a_chunk_is_capped_by_budget_and_threshold(
    missing: int, budget: int, threshold: int, chunked: bool, expected: int
) -> None:
    limits = make_limits(long_prefill_token_threshold=threshold, enable_chunked_prefill=chunked)
    assert limits.cap_chunk(missing, budget) == expected


def test_a_prompt_leaves_room_for_one_token() -> None:
    make_limits().validate_length(make_request("a", 9))
    with pytest.raises(PromptTooLongError, match=r"has 10 tokens.*context of 10 takes at most 9"):
        make_limits().validate_length(make_request("a", 10))


def test_pooling_needs_no_room() -> None:
    def make(num_tokens: int) -> Request:
        return Request(EngineCoreRequest("a", [1] * num_tokens, None, PoolingParams(), 0.0))

    make_limits().validate_length(make(10))
    with pytest.raises(PromptTooLongError):
        make_limits().validate_length(make(11))

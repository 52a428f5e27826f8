"""Tokens, hashes, events and ends of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.request import Request, RequestStatus
from quire.errors import ValidationError
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreEventType, EngineCoreRequest

from .harness import make_core_request, make_request


def test_a_new_request_has_its_prompt_and_nothing_else() -> None:
    request = make_request("a", [5, 6, 7], priority=3, client_index=2, cache_salt="s", arrival_time=9.0)
    assert request.status is RequestStatus.WAITING
    assert list(request.all_token_ids) == [5, 6, 7]
    assert list(request.output_token_ids) == []
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.num_computed_tokens, request.report.num_cached_tokens, request.num_preemptions) == (0, -1, 0)
    assert (request.priority, request.origin.client_index, request.cache_salt, request.arrival_time) == (3, 2, "s", 9.0)
    assert request.status.finish_reason is None
    assert not request.is_finished
    assert request.origin.trace_headers is None
    assert request.lora_request is None
    assert request.origin.pooling_params is None


def test_tokens_that_came_before_a_restart_are_outputs() -> None:
    request = make_request("a", [5, 6, 7], output_token_ids=[8, 9])
    assert list(request.all_token_ids) == [5, 6, 7, 8, 9]
    assert list(request.output_token_ids) == [8, 9]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 2)
    assert len(request.block_hashes) == 1


def test_appending_tokens_leaves_what_the_frontend_sent_alone() -> None:
    origin = make_core_request("a", [5, 6, 7], output_token_ids=[8])
    request = Request(origin)
    request.append_output_token_ids([9, 10])
    request.append_output_token_ids(11)
    assert list(request.all_token_ids) == [5, 6, 7, 8, 9, 10, 11]
    assert list(request.output_token_ids) == [8, 9, 10, 11]
    assert (origin.prompt_token_ids, origin.output_token_ids) == ([5, 6, 7], [8])
    assert request.prompt_token_ids is origin.prompt_token_ids
    assert request.block_hashes == []


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    parts=st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=9),
    block_size=st.integers(1, 6),
)
def test_block_hashes_are_those_of_a_request_that_had_all_tokens_at_once(
    prompt: list[int], parts: list[list[int]], block_size: int
) -> None:
    hasher = make_block_hasher(block_size)
    request = Request(make_core_request("a", prompt), hasher)
    for part in parts:
        request.append_output_token_ids(part)
    outputs = [token for part in parts for token in part]
    whole = Request(make_core_request("b", prompt + outputs), hasher)
    assert request.block_hashes == whole.block_hashes
    assert len(request.block_hashes) == request.num_tokens // block_size
    assert request.num_tokens == len(request.all_token_ids) == len(prompt) + len(outputs)


@pytest.mark.parametrize("tokens", [None, []])
def test_a_request_without_prompt_tokens_is_refused(tokens: list[int] | None) -> None:
    origin = EngineCoreRequest("a", tokens, SamplingParams(), None, 0.0)
    with pytest.raises(ValidationError, match="no prompt tokens"):
        Request(origin)


@pytest.mark.parametrize(("sampling", "pooling"), [(None, None), (SamplingParams(), PoolingParams())])
def test_a_request_has_exactly_one_kind_of_parameters(
    sampling: SamplingParams | None, pooling: PoolingParams | None
) -> None:
    with pytest.raises(ValidationError, match="either sampling or pooling"):
        Request(EngineCoreRequest("a", [1], sampling, pooling, 0.0))


def test_prompt_logprobs_keep_a_request_off_the_prefix_cache() -> None:
    assert make_request("a", prompt_logprobs=1).skip_reading_prefix_cache is True
    assert make_request("a").skip_reading_prefix_cache is False
    pooling = Request(EngineCoreRequest("a", [1], None, PoolingParams(), 0.0))
    assert pooling.skip_reading_prefix_cache is False


def test_events_are_taken_once_and_in_order() -> None:
    request = make_request()
    assert request.report.take_events() is None
    request.report.record_event(EngineCoreEventType.QUEUED, 1.0)
    request.report.record_event(EngineCoreEventType.SCHEDULED, 2.0)
    events = request.report.take_events()
    assert events is not None
    assert [(event.type, event.timestamp) for event in events] == [
        (EngineCoreEventType.QUEUED, 1.0),
        (EngineCoreEventType.SCHEDULED, 2.0),
    ]
    assert request.report.take_events() is None

"""Tokens, hashes, events and ends of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.request import Request, RequestStatus, TokenView
from quire.errors import ValidationError
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreEventType, EngineCoreRequest, FinishReason

from .harness import make_core_request, make_request


def test_a_new_request_has_its_prompt_and_nothing_else() -> None:
    request = make_request("a", [5, 6, 7], priority=3, client_index=2, cache_salt="s", arrival_time=9.0)
    assert request.status is RequestStatus.WAITING
    assert list(request.all_token_ids) == [5, 6, 7]
    assert list(request.output_token_ids) == []
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.num_computed_tokens, request.num_cached_tokens, request.num_preemptions) == (0, -1, 0)
    assert (request.priority, request.client_index, request.cache_salt, request.arrival_time) == (3, 2, "s", 9.0)
    assert request.finish_reason is None
    assert not request.is_finished
    assert request.trace_headers is None
    assert request.lora_request is None
    assert request.pooling_params is None


def test_tokens_that_came_before_a_restart_are_outputs() -> None:
    request = make_request("a", [5, 6, 7], output_token_ids=[8, 9])
    assert list(request.all_token_ids) == [5, 6, 7, 8, 9]
    assert list(request.output_token_ids) == [8, 9]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 2)
    assert len(request.block_hashes) == 1


def test_appending_tokens_leaves_what_the_frontend_sent_alone() -> None:
    origin = make_core_request("a", [5, 6, 7], output_token_ids=[8])
    request = Request.from_engine_core_request(origin)
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
        Request.from_engine_core_request(origin)


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
    assert request.take_events() is None
    request.record_event(EngineCoreEventType.QUEUED, 1.0)
    request.record_event(EngineCoreEventType.SCHEDULED, 2.0)
    events = request.take_events()
    assert events is not None
    assert [(event.type, event.timestamp) for event in events] == [
        (EngineCoreEventType.QUEUED, 1.0),
        (EngineCoreEventType.SCHEDULED, 2.0),
    ]
    assert request.take_events() is None


# -- sessions --------------------------------------------------------------------------------------------------------


@given(
    segments=st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.lists(st.integers(0, 9), min_size=1)),
        min_size=1,
        max_size=5,
    ),
    block_size=st.integers(1, 6),
)
def test_a_session_is_a_request_with_all_the_tokens_it_keeps(
    segments: list[tuple[list[int], list[int]]], block_size: int
) -> None:
    """Every output but a segment's last one stays; hashes are those of a request that had all of it at once."""
    hasher = make_block_hasher(block_size)
    request, context = Request(make_core_request("a", segments[0][0], resumable=True), hasher), list[int]()
    for prompt, outputs in segments:
        if context:
            request.begin_segment(make_core_request("a", prompt, resumable=True, continues_session=True), block_size)
        context += prompt
        assert list(request.prompt_token_ids) == list(request.all_token_ids) == context
        assert (request.num_output_tokens, request.status) == (0, RequestStatus.WAITING)
        request.append_output_token_ids(outputs)
        assert request.block_hashes == Request(make_core_request("b", context + outputs), hasher).block_hashes
        assert list(request.output_token_ids) == outputs
        request.status, request.num_computed_tokens = RequestStatus.FINISHED_STOPPED, request.num_tokens - 1
        assert request.end_segment()
        assert (request.status, request.is_finished) == (RequestStatus.WAITING_FOR_STREAMING_REQ, False)
        context += outputs[:-1]
        assert request.num_computed_tokens == len(context)


def test_a_segment_has_its_own_parameters_and_starts_afresh() -> None:
    request = make_request("a", [1, 2], resumable=True, priority=3, cache_salt="s", client_index=1, max_tokens=1)
    request.append_output_token_ids(7)
    request.status, request.stop_reason, request.num_cached_tokens = RequestStatus.FINISHED_STOPPED, 7, 1
    request.spec_token_ids = [5]
    request.end_segment()
    request.begin_segment(
        make_core_request("a", [3], continues_session=True, arrival_time=50.0, max_tokens=9, priority=-1), 4
    )
    assert request.sampling_params is not None
    assert (request.sampling_params.max_tokens, request.arrival_time) == (9, 50.0)
    assert (request.priority, request.cache_salt, request.client_index) == (3, "s", 1), "those of the session"
    assert (request.stop_reason, request.num_cached_tokens, request.spec_token_ids) == (None, -1, [])
    request.append_output_token_ids(8)
    request.status = RequestStatus.FINISHED_STOPPED
    assert not request.end_segment(), "that was the last one"
    assert request.is_finished


def test_drafts_past_the_end_of_a_segment_are_not_computed_tokens() -> None:
    request = make_request("a", [1, 2, 3], resumable=True)
    request.append_output_token_ids([4, 5])
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 7
    assert request.end_segment()
    assert request.num_computed_tokens == 4


def test_an_input_of_a_session_may_be_empty() -> None:
    assert Request(make_core_request("a", [], continues_session=True)).num_tokens == 0


def test_every_end_has_a_reason_and_nothing_else_has() -> None:
    reasons = {status: status.finish_reason for status in RequestStatus}
    assert {status for status, reason in reasons.items() if reason is None} == {
        RequestStatus.WAITING,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
        RequestStatus.RUNNING,
        RequestStatus.PREEMPTED,
    }
    request = make_request()
    for status, reason in reasons.items():
        request.status = status
        assert request.is_finished == (reason is not None)
        assert request.finish_reason == reason
    assert [r for r in reasons.values() if r is not None] == [
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.ERROR,
        FinishReason.REPETITION,
    ]


def test_what_is_logged_of_a_request_holds_no_tokens() -> None:
    request = make_request("a", [123456, 234567, 345678], output_token_ids=[456789])
    shown = f"{request!r} {request.all_token_ids!r}"
    assert not any(str(token) in shown for token in request.all_token_ids)
    assert "WAITING" in shown


@given(
    tokens=st.lists(st.integers(), max_size=12),
    start=st.integers(0, 12),
    bounds=st.tuples(*[st.none() | st.integers(-15, 15)] * 2),
    step=st.none() | st.integers(-3, 3).filter(bool),
)
def test_a_view_behaves_as_the_list_it_shows(
    tokens: list[int], start: int, bounds: tuple[int | None, int | None], step: int | None
) -> None:
    start = min(start, len(tokens))
    view, shown = TokenView(tokens, start), tokens[start:]
    cut = slice(*bounds, step)
    assert view[cut] == shown[cut]
    assert list(view) == shown
    assert view == shown
    assert view != [*shown, 0]
    assert len(view) == len(shown)
    assert list(reversed(view)) == shown[::-1]
    for i in range(-len(shown), len(shown)):
        assert view[i] == shown[i]
    for i in (len(shown), -len(shown) - 1):
        with pytest.raises(IndexError):
            view[i]


def test_a_view_grows_with_its_list_and_cannot_be_written() -> None:
    tokens = [1, 2]
    view = TokenView(tokens, 1)
    tokens.append(3)
    assert list(view) == [2, 3]
    assert view != 3
    with pytest.raises(TypeError):
        view[0] = 5  # type: ignore[index]
    with pytest.raises(TypeError):
        hash(view)

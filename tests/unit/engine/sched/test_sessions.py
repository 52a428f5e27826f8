"""Streaming-input sessions (checklist S3-DEF-024): their tokens, their blocks, and every way they can end."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.request import RequestStatus
from quire.engine.sched.interface import PauseState
from quire.wire.engine_core import EngineCoreEventType, EngineCoreOutput, FinishReason

from ..harness import Engine, digest, make_request, make_scheduler

STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR
PROMPTS = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]


class Sessions(Engine):
    """An engine whose next token depends on every token before it. `context` is what session "a" must hold."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(make_scheduler(**fields), digest)
        self.context: list[int] = []

    def open(self, prompt: list[int], name: str = "a", **fields: Any) -> None:
        self.add(make_request(name, prompt, resumable=True, **fields))

    def send(self, prompt: list[int], name: str = "a", *, last: bool = False, **fields: Any) -> None:
        self.add(make_request(name, prompt, resumable=not last, continues_session=True, **fields))

    def take(self, name: str = "a") -> list[EngineCoreOutput]:
        """What the client was sent since the last time."""
        return self.outputs.pop(name, [])

    def answer(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The right answer to the next input of the session."""
        self.context += prompt
        tokens = list(self.context)
        for _ in range(num_tokens):
            tokens.append(digest("", tokens))
        outputs = tokens[len(self.context) :]
        self.context += outputs[:-1]
        return outputs

    @property
    def num_held(self) -> int:
        """Blocks in use."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def ends(outputs: list[EngineCoreOutput]) -> list[tuple[FinishReason | None, FinishReason | None]]:
    """(of a segment, of the session) where there is one."""
    found = [(output.segment_finish_reason, output.finish_reason) for output in outputs]
    return [end for end in found if end != (None, None)]


# -- tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enable_caching", [False, True])
@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "queued"])
def test_a_session_answers_each_input_as_one_request_with_all_before_it(at_once: bool, enable_caching: bool) -> None:
    engine = Sessions(enable_caching=enable_caching)
    engine.open(PROMPTS[0], max_tokens=5)
    if at_once:
        engine.send(PROMPTS[1], max_tokens=1)
        engine.send(PROMPTS[2], last=True, max_tokens=4)
    engine.run()
    if not at_once:
        assert tokens(engine.take()) == engine.answer(PROMPTS[0], 5)
        engine.send(PROMPTS[1], max_tokens=1)
        engine.run()
        outputs = engine.take()
        assert (tokens(outputs), ends(outputs)) == (engine.answer(PROMPTS[1], 1), [(LENGTH, None)])
        engine.send(PROMPTS[2], last=True, max_tokens=4)
        engine.run()
        outputs = engine.take()
        assert (tokens(outputs), ends(outputs)) == (engine.answer(PROMPTS[2], 4), [(None, LENGTH)])
    else:
        outputs = engine.take()
        assert ends(outputs) == [(LENGTH, None), (LENGTH, None), (None, LENGTH)]
        right = [engine.answer(prompt, n) for prompt, n in zip(PROMPTS, (5, 1, 4), strict=True)]
        assert tokens(outputs) == [token for part in right for token in part]
    assert engine.num_held == 0
    assert engine.scheduler.requests == {}
    assert engine.worker.tokens == {}


def test_a_segment_computes_its_input_and_nothing_again() -> None:
    engine = Sessions()
    engine.open(PROMPTS[0], max_tokens=4)
    engine.run()
    assert engine.num_held == 3, "6 + 3 tokens in blocks of 4"
    engine.send(PROMPTS[2], max_tokens=2)
    output = engine.step()
    assert output.finished_req_ids == set(), "the worker was told when the segment ended"
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, output.num_scheduled_tokens) == (9, {"a": 3})
    assert len(new.prompt_token_ids) == 12
    assert new.output_token_ids == []
    stats = engine.take()[-1].prefill_stats
    assert stats is not None
    assert (stats.num_prompt_tokens, stats.num_computed_tokens, stats.num_local_cached_tokens) == (12, 3, 9)


def test_an_input_can_be_computed_in_chunks() -> None:
    engine = Sessions(max_num_batched_tokens=4)
    engine.open([1, 2], max_tokens=2)
    engine.run()
    engine.answer([1, 2], 2)
    engine.take()
    long = list(range(100, 130))
    engine.send(long, max_tokens=3)
    engine.run()
    assert tokens(engine.take()) == engine.answer(long, 3)


def test_the_last_output_is_not_kept_however_a_segment_ends() -> None:
    engine = Sessions()
    stop = digest("", [1, 2, 3])
    engine.open([1, 2, 3], stop_token_ids=[stop])
    engine.run()
    (output,) = engine.take()
    assert (output.new_token_ids, output.segment_finish_reason, output.stop_reason) == ([stop], STOP, stop)
    engine.send([4], last=True, max_tokens=1)
    engine.run()
    (output,) = engine.take()
    assert (output.new_token_ids, output.stop_reason) == ([digest("", [1, 2, 3, 4])], None)


def test_min_tokens_and_max_tokens_count_within_a_segment() -> None:
    engine = Sessions()
    engine.open([1], max_tokens=6)
    engine.run()
    engine.take()
    engine.answer([1], 6)
    expected = engine.answer([2], 3)
    engine.send([2], max_tokens=3, min_tokens=2, stop_token_ids=expected[:1])
    engine.run()
    assert tokens(engine.take()) == expected


# -- at rest -------------------------------------------------------------------------------------------------------


def test_a_session_at_rest_is_no_work() -> None:
    engine = Sessions(include_finished_set=True)
    engine.open([1, 2], max_tokens=1)
    engine.step()
    output = engine.schedule()
    assert output.finished_req_ids == {"a"}, "the worker forgets it"
    assert engine.update(output)[0].finished_requests is None, "its client does not"
    scheduler = engine.scheduler
    assert not scheduler.has_requests()
    assert not scheduler.has_unfinished_requests()
    assert (scheduler.get_num_unfinished_requests(), scheduler.get_request_counts()) == (0, (0, 0))
    assert scheduler.requests["a"].status is RequestStatus.WAITING_FOR_STREAMING_REQ
    stats = scheduler.make_stats()
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (0, 0, 1)
    assert stats.kv_cache_usage > 0


def test_sessions_at_rest_leave_their_places_to_others() -> None:
    engine = Sessions(max_num_seqs=1)
    engine.open([1, 2], max_tokens=1)
    engine.step()
    engine.add(make_request("b", 4, max_tokens=3))
    engine.step()
    engine.send([3], max_tokens=1)
    assert engine.step().num_scheduled_tokens == {"b": 1}, "now it waits like everybody"
    engine.run()
    assert len(tokens(engine.take())) == 2


def test_events_of_a_segment() -> None:
    engine = Sessions()
    engine.open([1, 2], max_tokens=1)
    engine.run()
    engine.send([3], max_tokens=1)
    engine.run()
    queued, scheduled = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED
    assert [[e.type for e in o.events or ()] for o in engine.take()] == [[queued, scheduled]] * 2


def test_running_requests_take_the_blocks_of_sessions_before_those_of_one_another() -> None:
    engine = Sessions(num_blocks=6)
    engine.open([1, 2, 3, 4, 5], max_tokens=1)
    engine.open([5, 4, 3], name="b", max_tokens=1)
    engine.run()
    assert engine.num_held == 3
    engine.add(make_request("c", 4, max_tokens=14))
    engine.run()
    assert len(engine.tokens("c")) == 14
    assert engine.last("c").events is None, "it was never preempted"
    held = {name: len(engine.scheduler.kv_cache_manager.get_block_ids(name)[0]) for name in "ab"}
    assert held == {"a": 0, "b": 0}
    first = engine.answer([1, 2, 3, 4, 5], 1)
    assert tokens(engine.take()) == first
    engine.send([9], max_tokens=2)
    output = engine.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0, "computed again"
    engine.run()
    outputs = engine.take()
    assert tokens(outputs) == engine.answer([9], 2)
    assert next(event.type for event in outputs[0].events or ()) is EngineCoreEventType.PREEMPTED
    assert engine.scheduler.requests["a"].num_preemptions == 1


def test_the_session_that_has_rested_longest_loses_its_blocks_first() -> None:
    engine = Sessions(num_blocks=7)
    for name in "xyz":
        engine.open([ord(name)] * 5, name=name, max_tokens=1)
        engine.run()
    engine.send([1], name="x", max_tokens=1)  # x has been active since
    engine.run()
    engine.add(make_request("c", 4, max_tokens=3))
    engine.run()
    held = [len(engine.scheduler.kv_cache_manager.get_block_ids(name)[0]) for name in "xyz"]
    assert held == [2, 0, 2]


def test_what_a_session_lost_is_found_in_the_prefix_cache() -> None:
    engine = Sessions(num_blocks=5, enable_caching=True)
    engine.open(list(range(9)), max_tokens=1)
    engine.run()
    engine.add(make_request("c", 4, max_tokens=1))
    engine.add(make_request("d", 4, max_tokens=1))
    engine.run()
    assert engine.num_held == 0
    engine.send([9], max_tokens=1)
    assert engine.step().scheduled_new_reqs[0].num_computed_tokens == 8


def test_a_session_whose_input_waits_is_evicted_last_and_never_for_itself() -> None:
    """Two sessions hold all blocks, and both have more input than fits beside the other."""
    engine = Sessions(num_blocks=7)
    engine.open(list(range(11)), max_tokens=1)
    engine.open(list(range(50, 61)), name="b", max_tokens=1)
    engine.run()
    assert engine.num_held == 6
    engine.take(), engine.take("b")
    engine.answer(list(range(11)), 1)
    engine.send([99] * 8, max_tokens=2)
    engine.send([98] * 8, name="b", max_tokens=2)
    output = engine.step()
    assert [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs] == [("a", 11)]
    engine.run()
    assert tokens(engine.take()) == engine.answer([99] * 8, 2)
    assert len(tokens(engine.take("b"))) == 2


def test_an_input_is_reserved_room_for_though_its_first_chunk_needs_none() -> None:
    engine = Sessions(num_blocks=6, max_num_batched_tokens=2, scheduler_reserve_full_isl=True)
    engine.open([1], max_tokens=1)
    engine.run()
    engine.add(make_request("b", 12, max_tokens=9))
    while not engine.tokens("b"):
        engine.step()
    engine.send([2] * 11, max_tokens=1)
    assert "a" not in engine.step().num_scheduled_tokens, "3 blocks for its 12 tokens: 2 are not free"
    engine.run()
    assert len(tokens(engine.take())) == 2


def test_a_session_that_no_longer_fits_alone_ends_with_an_error() -> None:
    engine = Sessions(num_blocks=4, max_model_len=200)
    engine.open(list(range(9)), max_tokens=1)
    engine.run()
    engine.send([1] * 9, max_tokens=1)
    engine.run()
    assert ends(engine.take()) == [(LENGTH, None), (None, ERROR)]
    assert engine.num_held == 0


def test_prompt_logprobs_are_of_all_tokens_before_the_outputs() -> None:
    engine = Sessions(enable_caching=True)
    engine.open([1, 2, 3, 4, 5], max_tokens=1)
    engine.run()
    engine.send([6], max_tokens=1, prompt_logprobs=1)
    (new,) = engine.step().scheduled_new_reqs
    assert new.num_computed_tokens == 0, "all of them are computed: it reads no cache and keeps no block"


def test_reset_of_the_prefix_cache_takes_sessions_in() -> None:
    engine = Sessions(enable_caching=True)
    engine.open([1, 2, 3, 4, 5], max_tokens=1)
    engine.run()
    assert not engine.scheduler.reset_prefix_cache(), "its blocks are in use"
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.send([6], max_tokens=1)
    assert engine.step().scheduled_new_reqs[0].num_computed_tokens == 0
    engine.answer([1, 2, 3, 4, 5], 1)
    engine.run()
    assert tokens(engine.take())[1:] == engine.answer([6], 1)


def test_a_pause_holds_new_input_back() -> None:
    engine = Sessions()
    engine.open([1, 2], max_tokens=1)
    engine.run()
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL):
        engine.scheduler.set_pause_state(state)
        engine.send([3], max_tokens=1)
        assert not engine.scheduler.has_requests()
        assert engine.step().num_scheduled_tokens == {}
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.run()
        assert engine.num_held > 0
    assert len(tokens(engine.take())) == 3


def test_a_segment_whose_step_is_in_flight_when_it_is_preempted_ends_all_the_same() -> None:
    engine = Sessions()
    engine.open([1, 2, 3, 4, 5], max_tokens=1)
    output = engine.schedule()
    result = engine.worker.execute(output)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.update(output, result)
    assert engine.scheduler.get_request_counts() == (0, 0)
    assert engine.num_held == 0
    engine.run()
    engine.send([6], max_tokens=2)
    engine.run()
    assert tokens(engine.take()) == engine.answer([1, 2, 3, 4, 5], 1) + engine.answer([6], 2)


def test_a_lost_step_loses_no_session() -> None:
    engine = Sessions(enable_caching=True)
    engine.open([1, 2, 3, 4, 5], max_tokens=2)
    engine.open([7, 7, 7, 7], name="b", max_tokens=1)
    engine.step()  # b rests, a goes on
    engine.send([6], name="b", max_tokens=1)
    engine.worker.execute(engine.schedule())
    engine.scheduler.abandon_steps()
    engine.run()
    assert tokens(engine.take()) == engine.answer([1, 2, 3, 4, 5], 2)
    engine.send([6], max_tokens=2)
    engine.run()
    assert tokens(engine.take()) == engine.answer([6], 2)
    assert ends(engine.take("b")) == [(LENGTH, None), (LENGTH, None)]


# -- the end -------------------------------------------------------------------------------------------------------


def test_an_empty_last_input_ends_a_session_at_rest_at_once() -> None:
    engine = Sessions()
    engine.open([1, 2, 3], max_tokens=2, client_index=1)
    engine.run()
    engine.take()
    engine.send([], last=True)
    assert engine.num_held == 0
    assert engine.scheduler.has_requests(), "its client must hear"
    engine.step()
    (output,) = engine.take()
    assert (output.new_token_ids, output.finish_reason, output.segment_finish_reason) == ([], LENGTH, None)
    assert not engine.scheduler.has_requests()


def test_an_empty_last_input_makes_the_present_segment_the_last() -> None:
    engine = Sessions()
    stop = digest("", [1, 2, 3])
    engine.open([1, 2, 3], stop_token_ids=[stop])
    engine.send([], last=True)
    engine.run()
    (output,) = engine.take()
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([stop], STOP, stop)
    assert output.segment_finish_reason is None
    assert engine.num_held == 0


def test_the_reason_of_the_last_segment_is_that_of_the_session() -> None:
    engine = Sessions()
    stop = digest("", [1, 2, 3])
    engine.open([1, 2, 3], stop_token_ids=[stop])
    engine.run()
    engine.send([], last=True)
    engine.run()
    assert (engine.last("a").finish_reason, engine.last("a").stop_reason) == (STOP, stop)


def test_a_session_that_outgrows_the_context_ends_with_length() -> None:
    engine = Sessions(max_model_len=16)
    engine.open([1] * 10, max_tokens=3)
    engine.send([2] * 3, max_tokens=5)  # 12 + 3 tokens leave room for one
    engine.send([3])
    engine.run()
    outputs = engine.take()
    assert ends(outputs) == [(LENGTH, None), (LENGTH, None), (None, LENGTH)]
    assert len(tokens(outputs)) == 4
    assert engine.num_held == 0
    assert engine.scheduler.requests == {}


@pytest.mark.parametrize("when", ["waiting", "running", "queued", "at rest", "evicted", "input waits"])
def test_abort_ends_a_session_at_any_point(when: str) -> None:
    engine = Sessions()
    engine.open([1, 2, 3, 4, 5], max_tokens=3, client_index=2)
    if when != "waiting":
        engine.step()
    if when == "queued":
        engine.send([6], max_tokens=2)
    if when in ("at rest", "evicted", "input waits"):
        engine.run()
    if when == "evicted":
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    if when == "input waits":
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        engine.send([6], max_tokens=2)
        assert engine.num_held == 2
    assert engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED) == [("a", 2)]
    engine.take()
    assert engine.num_held == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert (engine.take(), engine.worker.tokens, len(engine.scheduler.waiting)) == ([], {}, 0)
    engine.send([9], max_tokens=1)  # it was on its way when the abort overtook it
    assert not engine.scheduler.has_requests(), "a session that has ended does not come back"
    engine.open([9], max_tokens=1)
    engine.run()
    assert len(tokens(engine.take())) == 1, "the id is free again"


@pytest.mark.parametrize("bad", ["no session", "closed", "empty"])
def test_an_input_out_of_place_ends_the_request_with_an_error(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = Sessions()
    engine.add(make_request("a", 4, max_tokens=9, resumable=bad != "no session"))
    engine.step()
    if bad == "closed":
        engine.send([1], last=True)
    engine.send([] if bad == "empty" else [1])
    engine.run()
    assert ends(engine.take()) == [(None, ERROR)]
    assert engine.num_held == 0
    assert "request a ends with an error" in caplog.text


# -- after a restart -----------------------------------------------------------------------------------------------


def test_a_session_resumes_in_the_middle_of_a_segment() -> None:
    """As it is added after a restart: the context so far, the outputs of its segment, and then what was queued."""
    engine = Sessions()
    first, second = engine.answer([1, 2, 3], 4), engine.answer([4], 3)
    engine.open([1, 2, 3, *first[:-1], 4], max_tokens=3, output_token_ids=second[:1])
    engine.send([5, 6], last=True, max_tokens=2)
    engine.run()
    outputs = engine.take()
    assert tokens(outputs) == second[1:] + engine.answer([5, 6], 2)
    assert ends(outputs) == [(LENGTH, None), (None, LENGTH)]


def test_a_session_resumes_at_rest_and_in_silence() -> None:
    engine = Sessions()
    first = engine.answer([1, 2, 3], 4)
    engine.open([1, 2, 3], max_tokens=4, output_token_ids=first)
    assert not engine.scheduler.has_requests()
    assert engine.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_STREAMING_REQ
    engine.send([5], max_tokens=2)
    engine.run()
    assert tokens(engine.take()) == engine.answer([5], 2)
    engine.send([], last=True)
    engine.run()
    assert ends(engine.take()) == [(None, LENGTH)]


def test_a_last_segment_that_resumes_with_its_last_token_ends_the_session() -> None:
    engine = Sessions()
    first = engine.answer([1, 2, 3], 2)
    engine.add(make_request("a", [1, 2, 3], max_tokens=2, output_token_ids=first))
    engine.run()
    assert ends(engine.take()) == [(None, LENGTH)]

"""Scheduling of steps, and admissions."""

from __future__ import annotations

import logging

import pytest

from quire.engine.request import RequestStatus
from quire.errors import PromptTooLongError, ValidationError
from quire.wire.engine_core import FinishReason

from ..harness import Engine, digest, make_request, make_scheduler


def test_an_empty_step_is_an_empty_diff() -> None:
    output = make_scheduler().schedule()
    assert output.num_scheduled_tokens == {}
    assert output.total_num_scheduled_tokens == 0


def test_a_prompt_then_one_token_at_a_time() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 6, max_tokens=3))
    first = engine.step()
    (new,) = first.scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens, new.output_token_ids) == ("a", 0, [])
    assert [len(group) for group in new.block_ids] == [2]
    assert first.num_scheduled_tokens == {"a": 6}
    for num_computed in (6, 7):
        output = engine.step()
        assert output.scheduled_new_reqs == []
        assert output.scheduled_cached_reqs.req_ids == ["a"]
        assert output.scheduled_cached_reqs.num_computed_tokens == [num_computed]
        assert output.num_scheduled_tokens == {"a": 1}
    assert engine.tokens("a") == [6, 7, 8]
    assert engine.last("a").finish_reason is FinishReason.LENGTH
    assert engine.step().finished_req_ids == {"a"}
    assert not engine.scheduler.has_requests()


def test_new_blocks_are_told_when_there_are_any() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 7))
    engine.step()
    new_block_ids = [engine.step().scheduled_cached_reqs.new_block_ids[0] for _ in range(6)]
    assert [ids is None for ids in new_block_ids] == [True, False, True, True, True, False]  # positions 7, 8, ... 12


def test_running_requests_come_before_waiting_ones_in_order_of_admission() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=10))
    engine.add(make_request("a", 4), make_request("b", 4))
    engine.step()
    engine.add(make_request("c", 30), make_request("d", 1))
    output = engine.step()
    assert list(output.num_scheduled_tokens.items()) == [("a", 1), ("b", 1), ("c", 8)]
    assert output.total_num_scheduled_tokens == 10


def test_a_long_prompt_is_computed_in_chunks_of_what_the_budget_leaves() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=16))
    engine.add(make_request("a", 4), make_request("b", 40))
    chunks = [engine.step().num_scheduled_tokens for _ in range(4)]
    assert chunks == [{"a": 4, "b": 12}, {"a": 1, "b": 15}, {"a": 1, "b": 13}, {"a": 1, "b": 1}]
    assert engine.tokens("b") == [40, 41]


def test_the_scheduled_budget_may_be_smaller_than_the_batch() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=64, max_num_scheduled_tokens=3))
    engine.add(*(make_request(name, 1) for name in "abcde"))
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}, "who came first goes on"


def test_a_threshold_keeps_long_prompts_from_filling_the_step() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=8))
    engine.add(make_request("a", 20), make_request("b", 20), make_request("c", 5))
    assert engine.step().num_scheduled_tokens == {"a": 8, "b": 8, "c": 5}
    assert engine.step().num_scheduled_tokens == {"a": 8, "b": 8, "c": 1}
    assert engine.step().num_scheduled_tokens == {"a": 4, "b": 4, "c": 1}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_it_fits_into() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=16, max_model_len=16, enable_chunked_prefill=False))
    engine.add(make_request("a", 10), make_request("b", 10), make_request("c", 2))
    assert engine.step().num_scheduled_tokens == {"a": 10}, "c does not overtake b"
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 10, "c": 2}


def test_no_more_run_at_once_than_max_num_seqs() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2))
    engine.add(*(make_request(name, 4, max_tokens=2) for name in "abc"))
    assert list(engine.step().num_scheduled_tokens) == ["a", "b"]
    assert list(engine.step().num_scheduled_tokens) == ["a", "b"]
    assert list(engine.step().num_scheduled_tokens) == ["c"]


def test_priority_decides_who_is_admitted_but_not_who_is_served_first() -> None:
    engine = Engine(make_scheduler(scheduling_policy="priority", max_num_seqs=2))
    engine.add(
        make_request("late", 4, priority=1, arrival_time=9.0, max_tokens=3),
        make_request("low", 4, priority=5),
        make_request("early", 4, priority=1, arrival_time=1.0, max_tokens=2),
    )
    assert list(engine.step().num_scheduled_tokens) == ["early", "late"]
    engine.add(make_request("urgent", 4, priority=-1))
    assert list(engine.step().num_scheduled_tokens) == ["early", "late"]
    assert list(engine.step().num_scheduled_tokens) == ["late", "urgent"]
    assert list(engine.step().num_scheduled_tokens) == ["urgent", "low"]


# -- blocks ----------------------------------------------------------------------------------------------------


def test_who_does_not_fit_waits_and_is_not_overtaken() -> None:
    engine = Engine(make_scheduler(num_blocks=11))  # ten usable
    engine.add(make_request("a", 24, max_tokens=2), make_request("b", 20, max_tokens=1), make_request("c", 4))
    assert engine.step().num_scheduled_tokens == {"a": 24}
    assert engine.step().num_scheduled_tokens == {"a": 1}
    assert engine.step().num_scheduled_tokens == {"b": 20, "c": 4}


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, ["a", "b"]), (0.3, ["a"])])
def test_the_watermark_keeps_blocks_free_at_admission(watermark: float, admitted: list[str]) -> None:
    engine = Engine(make_scheduler(num_blocks=11, watermark=watermark))  # 0.3 of 11: three blocks
    engine.add(make_request("a", 20), make_request("b", 12))
    assert list(engine.step().num_scheduled_tokens) == admitted


def test_the_watermark_never_keeps_the_only_request_out() -> None:
    engine = Engine(make_scheduler(num_blocks=11, watermark=0.5))
    engine.add(make_request("a", 40, max_tokens=1))
    assert engine.step().num_scheduled_tokens == {"a": 40}


@pytest.mark.parametrize(
    ("reserve", "steps"),
    [
        (True, [{"a": 16}, {"a": 1}]),  # b's prompt of 7 blocks is not free beside a's 5 of 11
        (False, [{"a": 16}, {"a": 1, "b": 15}]),
    ],
)
def test_reserve_full_isl_asks_for_the_whole_prompt(reserve: bool, steps: list[dict[str, int]]) -> None:
    engine = Engine(make_scheduler(num_blocks=12, max_num_batched_tokens=16, scheduler_reserve_full_isl=reserve))
    engine.add(make_request("a", 16), make_request("b", 28))
    assert [engine.step().num_scheduled_tokens for _ in steps] == steps


# -- prefixes --------------------------------------------------------------------------------------------------


def test_a_cached_prefix_is_not_computed_again_but_the_last_token_is() -> None:
    engine = Engine(make_scheduler(enable_caching=True), digest)
    prompt = list(range(12))
    engine.add(make_request("a", prompt, max_tokens=1))
    engine.run()
    engine.add(make_request("b", prompt, max_tokens=1), make_request("c", [*prompt, 7], max_tokens=1))
    output = engine.step()
    assert output.num_scheduled_tokens == {"b": 4, "c": 1}  # all of b's blocks are cached, its last is computed again
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [8, 12]
    assert engine.tokens("b") == engine.tokens("a")


def test_prefixes_are_looked_up_at_admission_only() -> None:
    engine = Engine(make_scheduler(enable_caching=True, max_num_batched_tokens=8), digest)
    prompt = list(range(40))
    engine.add(make_request("a", prompt), make_request("b", prompt))
    assert engine.step().num_scheduled_tokens == {"a": 8}
    chunks = []
    while len(engine.scheduler.running) < 2:
        chunks.append(engine.step().num_scheduled_tokens)
    assert chunks == [{"a": 8}] * 4 + [{"a": 1, "b": 4}]  # b finds all of a's blocks once it is admitted


def test_two_requests_of_one_step_share_blocks() -> None:
    engine = Engine(make_scheduler(enable_caching=True), digest)
    prompt = list(range(10))
    engine.add(make_request("a", prompt), make_request("b", prompt))
    output = engine.step()
    assert output.num_scheduled_tokens == {"a": 10, "b": 2}
    a, b = output.scheduled_new_reqs
    assert a.block_ids[0][:2] == b.block_ids[0][:2]


def test_requests_that_skip_the_cache_compute_everything() -> None:
    engine = Engine(make_scheduler(enable_caching=True), digest)
    prompt = list(range(12))
    engine.add(make_request("a", prompt, max_tokens=1))
    engine.run()
    engine.add(make_request("b", prompt, prompt_logprobs=0))
    assert engine.step().num_scheduled_tokens == {"b": 12}


# -- the door --------------------------------------------------------------------------------------------------


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4, max_tokens=1))
    with pytest.raises(ValidationError, match="'a' is in use"):
        engine.add(make_request("a", 4))
    assert engine.scheduler.get_num_unfinished_requests() == 1
    engine.run()
    engine.add(make_request("a", 4, max_tokens=1))
    engine.run()
    assert len(engine.outputs["a"]) == 2


def test_a_prompt_that_cannot_be_answered_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=10)
    with pytest.raises(PromptTooLongError):
        scheduler.add_request(make_request("a", 10))
    assert not scheduler.has_requests()


def test_a_request_resumed_after_a_restart_goes_on_where_it_stopped() -> None:
    engine = Engine(make_scheduler(), digest)
    engine.add(make_request("whole", [1, 2, 3], max_tokens=6))
    engine.run()
    tokens = engine.tokens("whole")
    engine.add(make_request("resumed", [1, 2, 3], max_tokens=6, output_token_ids=tokens[:4]))
    output = engine.step()
    assert output.num_scheduled_tokens == {"resumed": 7}
    assert output.scheduled_new_reqs[0].prompt_token_ids == [1, 2, 3]
    assert output.scheduled_new_reqs[0].output_token_ids == tokens[:4]
    engine.run()
    assert engine.tokens("resumed") == tokens[4:]
    assert engine.outputs["resumed"][0].prefill_stats is None, "its prompt was reported before the restart"


def test_a_request_resumed_with_its_last_token_only_ends() -> None:
    engine = Engine(make_scheduler(max_model_len=20))
    engine.add(
        make_request("stopped", 3, stop_token_ids=[7], output_token_ids=[5, 7]),
        make_request("full", 3, max_tokens=50, output_token_ids=range(17)),
    )
    assert engine.scheduler.has_requests()
    output = engine.step()
    assert output.num_scheduled_tokens == {}
    assert output.finished_req_ids == {"stopped", "full"}
    assert (engine.last("stopped").finish_reason, engine.last("stopped").stop_reason) == (FinishReason.STOP, 7)
    assert engine.last("full").finish_reason is FinishReason.LENGTH
    assert engine.tokens("stopped") == []
    assert not engine.scheduler.has_requests()


# -- never a deadlock ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reserve", [True, False])
def test_a_prompt_larger_than_the_cache_ends_with_an_error(reserve: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(make_scheduler(num_blocks=6, scheduler_reserve_full_isl=reserve))
    engine.add(make_request("a", 21), make_request("b", 4, max_tokens=1))
    with caplog.at_level(logging.ERROR, logger="quire"):
        engine.run()
    assert engine.last("a").finish_reason is FinishReason.ERROR
    assert "request a ends with an error: its 21 tokens do not fit into the KV cache" in caplog.text
    assert engine.tokens("b") == [4]


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_outputs_that_outgrow_the_cache_end_with_an_error(policy: str, reserve: bool) -> None:
    engine = Engine(make_scheduler(num_blocks=6, scheduler_reserve_full_isl=reserve, scheduling_policy=policy))
    engine.add(make_request("a", 10, max_tokens=50), make_request("b", 3, max_tokens=3))
    engine.run()
    assert engine.last("a").finish_reason is FinishReason.ERROR
    assert engine.tokens("a") == list(range(10, 21)), "twenty tokens fit, and they yield one more"
    assert engine.tokens("b") == [3, 4, 5]


def test_a_prompt_that_starts_but_never_fits_ends_with_an_error() -> None:
    engine = Engine(make_scheduler(num_blocks=6, max_num_batched_tokens=8, scheduler_reserve_full_isl=False))
    engine.add(make_request("b", 3, max_tokens=3), make_request("a", 30))
    engine.run()
    assert engine.last("a").finish_reason is FinishReason.ERROR
    assert engine.tokens("b") == [3, 4, 5]


def test_statuses_along_the_way() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1))
    a, b = make_request("a", 4, max_tokens=1), make_request("b", 4)
    engine.add(a, b)
    engine.step()
    assert (a.status, b.status) == (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.WAITING)
    engine.step()
    assert b.status is RequestStatus.RUNNING
    assert engine.scheduler.get_request_counts() == (1, 0)

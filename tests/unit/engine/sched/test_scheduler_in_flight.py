"""Steps that overlap: scheduled before the result of the last one is known."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.request import RequestStatus
from quire.wire.engine_core import FinishReason

from ..harness import Engine, digest, make_request, make_scheduler


def test_a_request_whose_token_is_in_flight_is_passed_over() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4))
    first = engine.schedule()
    engine.add(make_request("b", 4))
    second = engine.schedule()
    assert second.num_scheduled_tokens == {"b": 4}
    engine.update(first)
    engine.update(second)
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1}


def test_chunks_of_a_prompt_need_not_wait_for_each_other() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=8), digest)
    engine.add(make_request("a", 20, max_tokens=1))
    steps = [engine.schedule() for _ in range(4)]
    assert [step.num_scheduled_tokens for step in steps] == [{"a": 8}, {"a": 8}, {"a": 4}, {}]
    for step in steps:
        engine.update(step)
    assert len(engine.tokens("a")) == 1


def test_results_must_come_in_order_and_once() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4))
    first, second = engine.schedule(), engine.schedule()
    with pytest.raises(RuntimeError, match="out of order"):
        engine.update(second)
    engine.update(first)
    engine.update(second)
    with pytest.raises(RuntimeError, match="twice"):
        engine.update(second)


OVERLAPPING: dict[str, Any] = {
    "num_blocks": 6,  # five usable
    "max_num_batched_tokens": 12,
    "long_prefill_token_threshold": 8,
    "scheduler_reserve_full_isl": False,
}
"""So that a prompt of 20 tokens takes three steps and, in the third, the block of a request beside it."""


def test_a_request_preempted_in_flight_keeps_its_token_and_gets_it_once() -> None:
    engine = Engine(make_scheduler(**OVERLAPPING), digest)
    engine.add(make_request("a", 20, max_tokens=1), make_request("b", 4, max_tokens=3))
    b = engine.scheduler.requests["b"]
    first = engine.schedule()
    assert first.num_scheduled_tokens == {"a": 8, "b": 4}
    second = engine.schedule()  # a takes two more blocks, b's token is in flight
    assert second.num_scheduled_tokens == {"a": 8}
    third = engine.schedule()  # a needs the last block
    assert third.preempted_req_ids == {"b"}
    assert third.num_scheduled_tokens == {"a": 4}
    fourth = engine.schedule()
    assert fourth.num_scheduled_tokens == {}, "b must not be computed again while its token is on its way"
    assert engine.scheduler.get_request_counts() == (1, 1)
    engine.update(first)
    assert len(engine.tokens("b")) == 1
    assert (b.status, b.num_computed_tokens, b.num_tokens) == (RequestStatus.PREEMPTED, 0, 5)
    for step in (second, third, fourth):
        engine.update(step)
    engine.run()
    alone = Engine(make_scheduler(), digest)
    alone.add(make_request("b", 4, max_tokens=3))
    alone.run()
    assert engine.tokens("b") == alone.tokens("b")


def test_a_request_preempted_in_flight_may_end_by_the_token_in_flight() -> None:
    engine = Engine(make_scheduler(**OVERLAPPING, include_finished_set=True), digest)
    engine.add(make_request("a", 20, max_tokens=1), make_request("b", 4, max_tokens=1))
    steps = [engine.schedule() for _ in range(3)]
    assert steps[2].preempted_req_ids == {"b"}
    batches = engine.update(steps[0])
    assert batches[0].finished_requests == {"b"}
    assert engine.last("b").finish_reason is FinishReason.LENGTH
    assert engine.scheduler.get_request_counts() == (1, 0)
    engine.update(steps[1])
    engine.update(steps[2])
    assert engine.step().finished_req_ids == {"a", "b"}
    assert not engine.scheduler.has_requests()


def test_abandoned_steps_are_computed_again() -> None:
    engine = Engine(make_scheduler(enable_caching=True, max_num_batched_tokens=12), digest)
    engine.add(make_request("gone", 4), make_request("a", 16, max_tokens=3))
    engine.step()
    engine.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    engine.add(make_request("b", 5, max_tokens=3))
    lost = [engine.schedule(), engine.schedule()]
    assert lost[0].finished_req_ids == {"gone"}
    engine.scheduler.abandon_steps()
    with pytest.raises(RuntimeError, match="given up"):
        engine.update(lost[0])
    again = engine.schedule()
    assert again.finished_req_ids == {"gone"}, "the worker may not have heard of it"
    assert again.preempted_req_ids == {"a", "b"}
    assert [new.num_computed_tokens for new in again.scheduled_new_reqs] == [0], "nothing is cached any more"
    engine.update(again)
    engine.run()
    alone = Engine(make_scheduler(), digest)
    alone.add(make_request("a", 16, max_tokens=3), make_request("b", 5, max_tokens=3))
    alone.run()
    assert (engine.tokens("a"), engine.tokens("b")) == (alone.tokens("a"), alone.tokens("b"))


def test_abandoning_nothing_changes_nothing_but_the_cache() -> None:
    engine = Engine(make_scheduler())
    engine.scheduler.abandon_steps()
    assert not engine.scheduler.has_requests()

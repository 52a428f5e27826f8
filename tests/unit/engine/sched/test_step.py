"""The step being built, and the steps on their way."""

from __future__ import annotations

import pytest

from quire.engine.request import Request, RequestStatus
from quire.engine.sched.step import StepBuilder, StepsInFlight
from quire.wire.execution import ModelRunnerOutput

from ..harness import make_request, make_scheduler


def test_adding_spends_the_budget_and_advances_the_request() -> None:
    step = StepBuilder(token_budget=10, timestamp=1.0)
    a, b = make_request("a", 6), make_request("b", 3)
    step.add_new(a, 6, ([1, 2],))
    a.append_output_token_ids(9)
    step.add_running(b, 3, None)
    assert step.token_budget == 1
    assert (a.num_computed_tokens, b.num_computed_tokens) == (6, 3)
    steps = StepsInFlight()
    steps.finished_req_ids.add("x")
    steps.preempted_req_ids.add("y")
    output = steps.send(step)
    assert output.num_scheduled_tokens == {"a": 6, "b": 3}
    assert output.total_num_scheduled_tokens == 9
    assert (output.finished_req_ids, output.preempted_req_ids) == ({"x"}, {"y"})
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [0]
    assert output.scheduled_cached_reqs.num_computed_tokens == [0], "before the step"


def test_taking_back_undoes_adding() -> None:
    step = StepBuilder(token_budget=10, timestamp=1.0)
    requests = [make_request(name, 3) for name in "abc"]
    requests[1].spec_token_ids = [7, 8]
    for request in requests:
        request.num_computed_tokens = 2
        step.add_running(request, 1 + len(request.spec_token_ids), ([5],))
    step.take_back(requests[1])
    assert step.token_budget == 8
    assert [request.num_computed_tokens for request in requests] == [3, 2, 3]
    assert step.requests == [requests[0], requests[2]]
    output = StepsInFlight().send(step)
    assert list(output.num_scheduled_tokens) == output.scheduled_cached_reqs.req_ids == ["a", "c"]
    assert output.scheduled_spec_decode_tokens == {}
    assert len(output.scheduled_cached_reqs.new_block_ids) == len(output.scheduled_cached_reqs.num_computed_tokens) == 2


def test_taking_back_what_was_not_added_changes_nothing() -> None:
    step = StepBuilder(token_budget=10, timestamp=1.0)
    step.take_back(make_request("a", 3))
    assert step.token_budget == 10


def make_step(*requests: Request) -> StepBuilder:
    step = StepBuilder(token_budget=10, timestamp=1.0)
    for request in requests:
        step.add_running(request, 1, None)
    return step


def test_steps_come_back_in_order() -> None:
    steps = StepsInFlight()
    a, b = make_request("a"), make_request("b")
    first, second = steps.send(make_step(a)), steps.send(make_step(a, b))
    b.status = RequestStatus.PREEMPTED
    assert steps.get_preempted() == {b}
    with pytest.raises(RuntimeError, match="out of order"):
        steps.receive(second)
    assert steps.receive(first) == [a]
    assert steps.receive(second) == [a, b]
    with pytest.raises(RuntimeError, match="twice"):
        steps.receive(second)


def test_ids_are_told_once_and_again_if_the_step_was_lost() -> None:
    steps = StepsInFlight()
    steps.finished_req_ids.add("f")
    steps.preempted_req_ids.add("p")
    first = steps.send(make_step())
    assert (first.finished_req_ids, first.preempted_req_ids) == ({"f"}, {"p"})
    second = steps.send(make_step())
    assert (second.finished_req_ids, second.preempted_req_ids) == (set(), set())
    steps.finished_req_ids.add("g")
    steps.abandon()
    third = steps.send(make_step())
    assert (third.finished_req_ids, third.preempted_req_ids) == ({"f", "g"}, {"p"})
    with pytest.raises(RuntimeError, match="given up"):
        steps.receive(first)


def test_requests_are_divided_among_the_steps_in_flight() -> None:
    scheduler = make_scheduler(max_concurrent_steps=2, sends_tokens=True)
    for name in "abc":
        scheduler.add_request(make_request(name, 4))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert list(first.num_scheduled_tokens) == ["a", "b"]
    assert list(second.num_scheduled_tokens) == ["c"]
    scheduler.update_from_output(first, ModelRunnerOutput(["a", "b"], [[7], [8]]))
    third = scheduler.schedule()
    assert list(third.num_scheduled_tokens) == ["a", "b"], "the token of the other is in flight"
    assert third.scheduled_cached_reqs.new_token_ids == {"a": [7], "b": [8]}, "not all workers have sampled them"
    scheduler.update_from_output(second, ModelRunnerOutput(["c"], [[9]]))
    assert scheduler.schedule().scheduled_cached_reqs.new_token_ids == {"c": [9]}

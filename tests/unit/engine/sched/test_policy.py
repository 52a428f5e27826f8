"""The queues against lists, and the choice of victims."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.engine import SchedulerConfig
from quire.engine.request import Request
from quire.engine.sched.policy import (
    POLICIES,
    RequestQueue,
    arrival_key,
    last_admitted,
    least_urgent,
    priority_key,
)

from ..harness import make_request


def make_requests(priorities: list[int], arrivals: list[float] | None = None) -> list[Request]:
    requests = [
        make_request(f"r{i}", priority=priority, arrival_time=arrivals[i] if arrivals else 0.0)
        for i, priority in enumerate(priorities)
    ]
    for index, request in enumerate(requests):
        request.arrival_index = index
    return requests


def ids(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def drain(queue: RequestQueue) -> list[Request]:
    return [queue.pop() for _ in range(len(queue))]


def test_every_policy_is_a_choice_of_the_flag_and_the_other_way_round() -> None:
    field = next(f for f in dataclasses.fields(SchedulerConfig) if f.name == "scheduling_policy")
    (metadata,) = field.metadata.values()
    assert set(metadata["choices"]) == POLICIES.keys()


def test_fcfs_serves_in_order_of_arrival_whoever_comes_back_when() -> None:
    a, b, c, d = make_requests([0, -5, 3, 0])
    queue = RequestQueue(arrival_key)
    for request in (c, a, d, b):
        queue.add(request)
    assert ids(queue) == ["r0", "r1", "r2", "r3"]
    assert queue.peek() is a
    assert ids(drain(queue)) == ["r0", "r1", "r2", "r3"]


def test_priority_serves_smaller_first_then_earlier_then_by_id() -> None:
    requests = make_requests([1, 0, 0, 0, -1], [0.0, 5.0, 4.0, 4.0, 9.0])
    queue = RequestQueue(priority_key)
    for request in reversed(requests):
        queue.add(request)
    assert ids(queue) == ["r4", "r2", "r3", "r1", "r0"]
    assert ids(drain(queue)) == ["r4", "r2", "r3", "r1", "r0"]


def test_an_empty_queue_has_no_head() -> None:
    queue = RequestQueue(arrival_key)
    assert not queue
    assert list(queue) == []
    queue.remove(make_requests([0]))
    with pytest.raises(IndexError):
        queue.peek()
    with pytest.raises(IndexError):
        queue.pop()


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-2, 2), st.integers(0, 3)),
        st.tuples(st.just("come back"), st.integers(0, 30)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 30), max_size=5)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(operations=operations)
def test_queues_agree_with_a_list(name: str, operations: list[tuple[Any, ...]]) -> None:
    key = POLICIES[name].key
    queue = RequestQueue(key)
    model: list[Request] = []
    made: list[Request] = []
    for operation in operations:
        match operation:
            case ("add", priority, arrival):
                request = make_request(f"r{len(made)}", priority=priority, arrival_time=arrival)
                request.arrival_index = len(made)
                made.append(request)
                queue.add(request)
                model = sorted([*model, request], key=key)
            case ("come back", index) if index < len(made) and made[index] not in model:
                queue.add(made[index])
                model = sorted([*model, made[index]], key=key)
            case ("pop",) if model:
                assert queue.peek() is model[0]
                assert queue.pop() is model.pop(0)
            case ("remove", indices):
                gone = [request for i, request in enumerate(made) if i in indices]
                queue.remove(gone)
                model = [request for request in model if request not in gone]
        assert list(queue) == model
        assert len(queue) == len(model)


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 2)), min_size=1, max_size=12))
def test_the_last_or_the_least_urgent_is_preempted(rows: list[tuple[int, int]]) -> None:
    running = make_requests([p for p, _ in rows], [float(a) for _, a in rows])
    assert running[last_admitted(running)] is running[-1]
    assert running[least_urgent(running)] is sorted(running, key=priority_key)[-1]

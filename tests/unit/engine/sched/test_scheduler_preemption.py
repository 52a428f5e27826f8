"""Preemptions: the victims, and their way back."""

from __future__ import annotations

from quire.engine.request import RequestStatus
from quire.wire.engine_core import EngineCoreEventType

from ..harness import Engine, digest, make_request, make_scheduler


def test_fcfs_preempts_from_the_tail_back_to_the_head() -> None:
    engine = Engine(make_scheduler(num_blocks=7))  # six usable: two each
    engine.add(*(make_request(name, 8) for name in "abc"), make_request("d", 4))
    assert list(engine.step().num_scheduled_tokens) == ["a", "b", "c"]
    output = engine.step()  # a and b need a third block each: c gives two
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}
    assert output.preempted_req_ids == {"c"}
    assert [request.request_id for request in engine.scheduler.waiting] == ["c", "d"]
    assert engine.scheduler.requests["c"].status is RequestStatus.PREEMPTED
    assert engine.scheduler.requests["c"].num_computed_tokens == 0


def test_several_victims_of_one_step_keep_their_order() -> None:
    engine = Engine(make_scheduler(num_blocks=5, long_prefill_token_threshold=8, scheduler_reserve_full_isl=False))
    engine.add(make_request("a", 16), make_request("b", 2), make_request("c", 2))
    assert engine.step().num_scheduled_tokens == {"a": 8, "b": 2, "c": 2}, "all four blocks"
    output = engine.step()
    assert output.num_scheduled_tokens == {"a": 8}
    assert output.preempted_req_ids == {"b", "c"}
    assert [request.request_id for request in engine.scheduler.waiting] == ["b", "c"]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    engine = Engine(make_scheduler(num_blocks=8, scheduling_policy="priority"))  # seven usable
    engine.add(*(make_request(name, size, priority=5) for name, size in (("a", 8), ("b", 8), ("c", 12))))
    engine.step()
    engine.add(make_request("urgent", 1, priority=0))
    output = engine.step()
    assert output.preempted_req_ids == {"c"}
    assert list(output.num_scheduled_tokens) == ["a", "b"], "a block is free, but it was given up for the running"
    assert list(engine.step().num_scheduled_tokens) == ["a", "b", "urgent"]


def test_a_preempted_request_is_computed_again_and_loses_no_token() -> None:
    alone = Engine(make_scheduler(), digest)
    alone.add(*(make_request(name, 8, max_tokens=12) for name in "abc"))
    alone.run()
    for caching in (False, True):
        engine = Engine(make_scheduler(num_blocks=8, enable_caching=caching), digest)
        engine.add(*(make_request(name, 8, max_tokens=12) for name in "abc"))
        engine.run()
        assert {name: engine.tokens(name) for name in "abc"} == {name: alone.tokens(name) for name in "abc"}
        preempted = [name for name in "abc" if any(_preemptions(engine, name))]
        assert preempted == ["b", "c"], "the first is never preempted"


def _preemptions(engine: Engine, request_id: str) -> list[float]:
    return [
        event.timestamp
        for output in engine.outputs[request_id]
        for event in output.events or ()
        if event.type is EngineCoreEventType.PREEMPTED
    ]


def test_a_resumed_request_is_new_to_the_worker_and_brings_its_outputs() -> None:
    engine = Engine(make_scheduler(num_blocks=6, enable_caching=True), digest)  # five usable
    engine.add(make_request("a", 8, max_tokens=2), make_request("b", 8, max_tokens=9))
    engine.step()
    output = engine.step()
    assert output.preempted_req_ids == {"b"}
    request = engine.scheduler.requests["b"]
    resumed = engine.step()
    (new,) = resumed.scheduled_new_reqs
    assert new.output_token_ids == engine.tokens("b")[:1]
    assert new.num_computed_tokens == 8, "its own blocks were still in the prefix cache"
    assert resumed.num_scheduled_tokens == {"b": 1}
    assert request.num_preemptions == 1
    assert request.report.num_cached_tokens == 0, "as found when it was first admitted"


# -- priority --------------------------------------------------------------------------------------------------


def test_priority_preempts_the_least_urgent_and_takes_back_what_it_was_given() -> None:
    engine = Engine(make_scheduler(num_blocks=7, scheduling_policy="priority"))  # six usable
    engine.add(make_request("low", 8, priority=9))
    engine.step()
    engine.add(make_request("mid", 4, priority=5), make_request("high", 7, priority=1))
    assert list(engine.step().num_scheduled_tokens) == ["low", "high", "mid"], "3 + 2 + 1 blocks"
    low = engine.scheduler.requests["low"]
    assert (low.num_tokens, low.num_computed_tokens) == (10, 9)

    output = engine.step()  # low and high have room; mid needs a second block

    assert output.preempted_req_ids == {"low"}
    assert output.num_scheduled_tokens == {"high": 1, "mid": 1}
    assert output.total_num_scheduled_tokens == 2
    assert output.scheduled_cached_reqs.req_ids == ["high", "mid"]
    assert output.scheduled_cached_reqs.num_computed_tokens == [7, 4]
    assert [ids is None for ids in output.scheduled_cached_reqs.new_block_ids] == [True, False]
    assert (low.num_tokens, low.num_computed_tokens) == (10, 0)
    assert len(engine.outputs["low"]) == 2, "no token came of the step that was taken back"


def test_tokens_taken_back_are_never_found_in_the_prefix_cache() -> None:
    """The victim's block became full in the step that will not compute it: no request may read it."""
    engine = Engine(make_scheduler(num_blocks=6, scheduling_policy="priority", enable_caching=True), digest)
    engine.add(make_request("low", [1, 2, 3], priority=9, max_tokens=20))
    engine.step()  # three of four slots of its block are computed
    engine.add(make_request("high", 16, priority=1, max_tokens=2))
    assert engine.step().num_scheduled_tokens == {"low": 1, "high": 16}
    low = engine.scheduler.requests["low"]
    tokens_of_low = list(low.all_token_ids)
    output = engine.step()
    assert output.preempted_req_ids == {"low"}
    engine.add(make_request("reader", [*tokens_of_low, 5, 6, 7, 8], priority=0, max_tokens=1))
    engine.run()  # the worker compares every slot that is read
    assert engine.last("low").finish_reason is not None


def test_a_request_that_is_the_least_urgent_itself_gives_way_and_the_others_go_on() -> None:
    engine = Engine(make_scheduler(num_blocks=7, scheduling_policy="priority"))
    engine.add(make_request("low", 8, priority=9))
    engine.step()
    engine.add(make_request("mid", 1, priority=5), make_request("high", 5, priority=1))
    for _ in range(4):
        assert list(engine.step().num_scheduled_tokens) == ["low", "high", "mid"], "3 + 2 + 1 blocks, all in use"
    output = engine.step()  # low, first in the row, needs a fourth block
    assert output.preempted_req_ids == {"low"}
    assert output.num_scheduled_tokens == {"high": 1, "mid": 1}

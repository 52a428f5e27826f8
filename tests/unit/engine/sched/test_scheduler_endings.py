"""Aborts and other ends from outside, in every state a request can be in."""

from __future__ import annotations

import pytest

from quire.engine.request import RequestStatus
from quire.engine.sched.interface import PauseState
from quire.wire.engine_core import FinishReason

from ..harness import Engine, make_request, make_scheduler

ABORTED = RequestStatus.FINISHED_ABORTED


def free_blocks(engine: Engine) -> int:
    return engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def test_abort_of_a_waiting_request() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4, client_index=3), make_request("b", 4, max_tokens=1))
    assert engine.scheduler.finish_requests("a", ABORTED) == [("a", 3)]
    output = engine.step()
    assert output.num_scheduled_tokens == {"b": 4}
    assert output.finished_req_ids == {"a"}
    assert "a" not in engine.outputs


def test_abort_of_running_requests_frees_their_blocks_at_once() -> None:
    engine = Engine(make_scheduler(num_blocks=21))
    engine.add(*(make_request(name, 4) for name in "abcd"))
    engine.step()
    assert free_blocks(engine) == 16
    assert engine.scheduler.finish_requests(["d", "b"], ABORTED) == [("d", 0), ("b", 0)]
    assert free_blocks(engine) == 18
    output = engine.step()
    assert list(output.num_scheduled_tokens) == ["a", "c"]
    assert output.finished_req_ids == {"b", "d"}
    assert engine.step().finished_req_ids == set(), "told once"


def test_abort_of_a_preempted_request() -> None:
    engine = Engine(make_scheduler(num_blocks=7))
    engine.add(*(make_request(name, 8) for name in "abc"))
    engine.step()
    assert engine.step().preempted_req_ids == {"c"}
    engine.scheduler.finish_requests("c", ABORTED)
    assert engine.step().finished_req_ids == {"c"}
    assert engine.scheduler.get_request_counts() == (2, 0)


def test_abort_of_a_request_in_the_middle_of_its_prompt() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=8))
    engine.add(make_request("a", 30))
    engine.step()
    engine.scheduler.finish_requests("a", ABORTED)
    assert free_blocks(engine) == 100
    engine.run()
    assert "a" not in engine.outputs


def test_abort_while_the_step_is_in_flight() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4), make_request("b", 4))
    output = engine.schedule()
    result = engine.worker.execute(output)
    engine.scheduler.finish_requests("a", ABORTED)
    engine.update(output, result)
    assert "a" not in engine.outputs
    assert engine.tokens("b") == [4]
    assert engine.step().finished_req_ids == {"a"}


def test_an_id_used_again_while_the_old_step_is_in_flight_gets_its_own_tokens_only() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4))
    output = engine.schedule()
    result = engine.worker.execute(output)
    engine.scheduler.finish_requests("a", ABORTED)
    engine.add(make_request("a", 9, max_tokens=2))
    engine.update(output, result)
    assert "a" not in engine.outputs
    output = engine.step()
    assert (output.finished_req_ids, output.num_scheduled_tokens) == ({"a"}, {"a": 9})
    engine.run()
    assert engine.tokens("a") == [9, 10]


def test_unknown_and_finished_ids_are_ignored() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4, max_tokens=1))
    engine.run()
    assert engine.scheduler.finish_requests(["a", "nobody", "a"], ABORTED) == []
    assert not engine.scheduler.has_requests()


def test_an_id_given_twice_is_ended_once() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4))
    assert engine.scheduler.finish_requests(["a", "a"], ABORTED) == [("a", 0)]


@pytest.mark.parametrize("report", [False, True])
def test_all_can_be_ended_and_their_clients_told(report: bool) -> None:
    engine = Engine(make_scheduler(max_num_seqs=1, num_blocks=21))
    engine.add(make_request("a", 4), make_request("b", 4, client_index=1))
    engine.step()
    assert engine.scheduler.finish_requests(None, ABORTED, report=report) == [("a", 0), ("b", 1)]
    assert engine.scheduler.get_num_unfinished_requests() == 0
    assert not engine.scheduler.has_unfinished_requests()
    assert free_blocks(engine) == 20
    batches = engine.update(engine.schedule())
    reasons = {
        client: [(one.request_id, one.finish_reason) for one in batch.outputs] for client, batch in batches.items()
    }
    if report:
        assert reasons == {0: [("a", FinishReason.ABORT)], 1: [("b", FinishReason.ABORT)]}
    else:
        assert reasons == {0: []}, "statistics only"
    assert not engine.scheduler.has_requests()


# -- pauses ----------------------------------------------------------------------------------------------------


def test_paused_all_schedules_nothing_but_tells_who_finished() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4), make_request("b", 4))
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.scheduler.pause_state is PauseState.PAUSED_ALL
    assert not engine.scheduler.has_requests()
    assert engine.scheduler.has_unfinished_requests()
    engine.scheduler.finish_requests("b", ABORTED)
    assert engine.scheduler.has_requests()
    output = engine.step()
    assert (output.num_scheduled_tokens, output.finished_req_ids) == ({}, {"b"})
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.step().num_scheduled_tokens == {"a": 1}


def test_paused_new_lets_running_requests_end_and_new_ones_wait_in_order() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4, max_tokens=2))
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.add(make_request("b", 4), make_request("c", 4))
    assert engine.step().num_scheduled_tokens == {"a": 1}
    stats = engine.scheduler.make_stats()
    assert stats is not None
    assert (stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (0, 2), "they wait for no capacity"
    engine.step()  # the worker is sent the end of a
    assert not engine.scheduler.has_requests()
    engine.add(make_request("d", 4))
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.scheduler.has_requests()
    assert list(engine.step().num_scheduled_tokens) == ["b", "c", "d"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_paused_new_lets_preempted_requests_end_even_behind_more_urgent_new_ones(policy: str) -> None:
    engine = Engine(make_scheduler(num_blocks=7, scheduling_policy=policy))
    engine.add(*(make_request(name, 8, max_tokens=6, priority=5) for name in "abc"))
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.add(make_request("urgent", 4, priority=0))
    engine.run()
    assert [len(engine.tokens(name)) for name in "abc"] == [6, 6, 6]
    assert [request.request_id for request in engine.scheduler.waiting] == ["urgent"]


def test_paused_new_has_work_while_a_preempted_request_waits_alone() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 8, max_tokens=3))
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert engine.scheduler.running == []
    engine.run()
    assert len(engine.tokens("a")) == 3


# -- resets ----------------------------------------------------------------------------------------------------


def test_reset_of_the_prefix_cache() -> None:
    engine = Engine(make_scheduler(enable_caching=True))
    prompt = list(range(12))
    engine.add(make_request("a", prompt), make_request("b", 9))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(), "blocks are in use"
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert [request.request_id for request in engine.scheduler.waiting] == ["a", "b"]
    output = engine.step()
    assert output.preempted_req_ids == {"a", "b"}
    assert [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs] == [("a", 0), ("b", 0)]
    assert output.num_scheduled_tokens == {"a": 13, "b": 10}


def test_shutdown_is_quiet() -> None:
    make_scheduler().shutdown()

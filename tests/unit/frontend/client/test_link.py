"""The link between frontend and core, case by case (promises P1, P2, P18)."""

from __future__ import annotations

import pytest

from quire.errors import EngineDeadError
from quire.frontend.client.control_calls import Answer
from quire.frontend.client.link import EngineLink, LinkState
from quire.frontend.supervision.quarantine import CoreDeath
from quire.wire.engine_core import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    UtilityOutput,
)
from quire.wire.heartbeat import WorkerEnd
from quire.wire.stats import PrefillStats, SchedulerStats

from .model_core import ABORT, ADD, UTILITY, Driver, expected_tokens, make_ready, make_request


def sent_ids(driver: Driver) -> list[str]:
    assert driver.core is not None
    return [message.payload.request_id for message in driver.core.inbox if message.type is ADD]


def outputs(*tokens: tuple[str, list[int]], incarnation: int = 0, sequence: int = 0) -> EngineCoreOutputs:
    given = [EngineCoreOutput(request_id, ids) for request_id, ids in tokens]
    return EngineCoreOutputs(outputs=given, incarnation=incarnation, sequence=sequence)


# -- an undisturbed life ----------------------------------------------------------------------------------------------


def test_requests_wait_for_the_first_core_and_are_sent_as_they_are() -> None:
    driver, request = Driver(), make_request("a")
    driver.add(request)
    assert driver.link.state is LinkState.DOWN
    driver.start_core()
    assert driver.core is not None
    assert driver.core.inbox[0].payload is request
    driver.add(later := make_request("b"))
    assert driver.core.inbox[1].payload is later
    driver.run()
    for wanted in (request, later):
        assert driver.delivered[wanted.request_id] == expected_tokens(wanted)
        assert driver.ends[wanted.request_id].finish_reason is FinishReason.LENGTH
    assert driver.link.num_live_requests == 0


def test_an_id_in_use_is_refused() -> None:
    link = EngineLink()
    link.add_request(make_request("a"))
    with pytest.raises(ValueError, match="a is in use"):
        link.add_request(make_request("a"))


def test_an_abort_reaches_the_core_and_silences_the_request() -> None:
    driver = Driver()
    driver.start_core()
    driver.add(make_request("a"))
    driver.step()
    assert driver.core is not None
    driver.core.step()
    driver.abort("a")
    driver.deliver()  # its second token was on its way: delivering it would fail in `Driver`
    assert [m.payload for m in driver.core.inbox] == [["a"]]
    assert driver.core.inbox[0].type is ABORT
    driver.link.abort_requests(["a", "never heard of"])
    assert not driver.link.messages


def test_an_abort_before_the_core_is_there_sends_nothing() -> None:
    driver = Driver()
    driver.add(make_request("a"))
    driver.abort("a")
    driver.start_core()
    assert driver.core is not None
    assert not driver.core.inbox


def test_statistics_are_handed_on_without_outputs() -> None:
    link = EngineLink()
    link.on_ready(make_ready())
    link.on_outputs(EngineCoreOutputs(scheduler_stats=SchedulerStats(3)))
    link.on_outputs(EngineCoreOutputs())
    (delivered,) = link.deliveries
    assert delivered.scheduler_stats == SchedulerStats(3)


# -- deaths -----------------------------------------------------------------------------------------------------------


def test_a_killed_core_costs_no_token() -> None:
    driver = Driver()
    requests = [make_request(name, 9) for name in "abc"]
    driver.start_core()
    for request in requests:
        driver.add(request)
    for _ in range(4):
        driver.step()
        driver.step()
        driver.die("killed")
        driver.start_core()
        if driver.link.num_live_requests:
            assert sent_ids(driver) == ["a", "b", "c"]
    driver.run()
    for request in requests:
        assert driver.delivered[request.request_id] == expected_tokens(request)
    assert driver.num_prefill_stats == {"a": 1, "b": 1, "c": 1}
    assert driver.link.counts["deaths"] == 4
    assert driver.link.counts["resumed_requests"] == 12


def test_what_a_dead_core_had_sent_still_counts() -> None:
    driver = Driver()
    driver.start_core()
    driver.add(request := make_request("a"))
    assert driver.core is not None
    for _ in range(3):
        driver.core.step()
    in_flight = driver.core.outbox
    driver.die("killed")
    for message in in_flight[:2]:
        driver.link.on_outputs(message)
    driver.start_core()
    driver.link.on_outputs(in_flight[2])  # too late: the next core makes this token again
    driver.settle()
    assert driver.core is not None
    assert driver.core.inbox[0].payload.output_token_ids == expected_tokens(request)[:2]
    assert driver.link.counts["stale"] == 1
    driver.run()
    assert driver.delivered["a"] == expected_tokens(request)


def test_what_came_with_the_first_output_comes_once() -> None:
    driver = Driver()
    driver.start_core()
    driver.add(make_request("a"))
    driver.step()
    driver.die("killed")
    driver.start_core()
    events = [EngineCoreEvent(EngineCoreEventType(kind), 1.0) for kind in (1, 2, 3)]
    again = EngineCoreOutput("a", [7], prefill_stats=PrefillStats(1, 1), events=events)
    driver.link.on_outputs(EngineCoreOutputs(outputs=[again], incarnation=1))
    ((given,),) = [delivered.outputs for delivered in driver.link.deliveries]
    assert given.prefill_stats is None
    assert given.events == events[2:], "queued and scheduled were told, a preemption was not"


def test_a_core_that_shuts_down_by_itself_gives_its_requests_to_the_next() -> None:
    """SIGTERM to the core alone: it ends every request, and the frontend's users need not notice."""
    driver = Driver()
    driver.start_core()
    driver.add(request := make_request("a"))
    driver.step()
    goodbye = EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT, error_message="the engine is shutting down")
    driver.link.on_outputs(EngineCoreOutputs(outputs=[goodbye]))
    driver.settle()
    driver.die("killed")
    driver.run()
    assert driver.delivered["a"] == expected_tokens(request)


@pytest.mark.parametrize(("is_closing", "message"), [(True, "the engine is shutting down"), (False, None)])
def test_other_aborts_by_the_core_are_final(is_closing: bool, message: str | None) -> None:
    """The end we asked for, or a pause that aborts."""
    driver = Driver()
    driver.start_core()
    driver.add(make_request("a"))
    driver.link.is_closing = is_closing
    end = EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT, error_message=message)
    driver.link.on_outputs(EngineCoreOutputs(outputs=[end]))
    driver.settle()
    assert driver.ends["a"].finish_reason is FinishReason.ABORT


def test_a_core_that_lost_us_and_found_us_gets_everything_anew() -> None:
    driver = Driver()
    driver.start_core()
    driver.add(request := make_request("a"))
    driver.step()
    assert driver.core is not None
    driver.core.requests.clear()  # it has aborted what was ours
    driver.link.on_ready(make_ready(0))
    driver.settle()
    assert sent_ids(driver) == ["a"]
    driver.run()
    assert driver.delivered["a"] == expected_tokens(request)


def test_the_ready_frame_of_an_older_core_is_ignored() -> None:
    link = EngineLink()
    link.on_ready(make_ready(3))
    link.on_ready(make_ready(2))
    assert link.ready_response == make_ready(3)


def test_past_the_last_core_everything_ends_with_the_reason() -> None:
    driver = Driver()
    driver.start_core()
    driver.add(make_request("a"))
    driver.step()
    driver.link.on_gone("no core any more")
    driver.settle()
    assert (driver.ends["a"].finish_reason, driver.ends["a"].error_message) == (FinishReason.ERROR, "no core any more")
    assert driver.delivered["a"] == expected_tokens(make_request("a"))[:1]
    driver.add(make_request("b"))
    assert driver.ends["b"].error_message == "no core any more"
    driver.link.on_ready(make_ready(7))
    driver.link.on_death(CoreDeath("crash", "", ()))
    driver.link.on_gone("twice")
    assert (driver.link.state, driver.link.gone_reason) == (LinkState.GONE, "no core any more")


# -- poison -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deadly_at", [0, 2])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_poison_costs_two_restarts_and_fails_alone(deadly_at: int, position: int) -> None:
    driver = Driver(max_num_seqs=8)
    requests = [make_request(str(i), 5, deadly_at if i == position else None) for i in range(8)]
    driver.start_core()
    for request in requests:
        driver.add(request)
    driver.run()
    assert driver.num_cores <= 3
    for request in requests:
        end = driver.ends[request.request_id]
        if request is requests[position]:
            assert end.finish_reason is FinishReason.ERROR
            assert f"request {position} " in (end.error_message or "")
            assert driver.delivered[request.request_id] == expected_tokens(request)[:deadly_at]
        else:
            assert end.finish_reason is FinishReason.LENGTH
            assert driver.delivered[request.request_id] == expected_tokens(request)


def test_two_poisons_cost_three_restarts() -> None:
    driver = Driver(max_num_seqs=8)
    driver.start_core()
    for i in range(8):
        driver.add(make_request(str(i), 5, 1 if i in (2, 5) else None))
    driver.run()
    assert driver.num_cores == 4
    assert [i for i, end in driver.ends.items() if end.finish_reason is FinishReason.ERROR] == ["2", "5"]


def test_during_a_trial_the_suspect_is_alone_and_newcomers_wait() -> None:
    driver = Driver()
    driver.start_core()
    for name in "ab":
        driver.add(make_request(name))
    driver.step()
    driver.die("crash")
    driver.start_core()
    driver.add(make_request("c"))
    assert sent_ids(driver) == ["a"]
    assert driver.core is not None
    driver.core.take_in()
    driver.core.step()
    driver.deliver()
    assert [(m.type, m.payload if m.type is ABORT else m.payload.request_id) for m in driver.core.inbox] == [
        (ABORT, ["a"]),
        (ADD, "b"),
    ]
    driver.step()
    assert sent_ids(driver) == ["a~1", "c"], "b has come through its trial and stays with the core"
    driver.run()
    assert driver.num_cores == 2
    assert driver.delivered == {name: expected_tokens(make_request(name)) for name in "abc"}


def test_what_a_cleared_suspect_still_had_on_its_way_is_made_again() -> None:
    driver = Driver()
    driver.start_core()
    for name in "ab":
        driver.add(make_request(name))
    driver.die("crash")
    driver.start_core()
    assert driver.core is not None
    tried = sent_ids(driver)[0]
    for _ in range(3):
        driver.core.step()  # the core runs ahead: two more tokens are on their way when the first clears the suspect
    while driver.core.outbox:
        driver.deliver()
    assert driver.link.counts["unknown"] == 2
    driver.run()
    assert driver.delivered[tried] == expected_tokens(make_request(tried))


def test_aborting_the_suspect_on_trial_goes_on_with_the_next() -> None:
    driver = Driver()
    driver.start_core()
    for name in "ab":
        driver.add(make_request(name))
    driver.step()
    driver.die("hang")
    driver.start_core()
    driver.abort("a")
    assert sent_ids(driver) == ["a", "b"]
    driver.run()
    assert driver.delivered["b"] == expected_tokens(make_request("b"))


def test_workers_that_end_are_counted_by_how() -> None:
    driver = Driver()
    for end in (WorkerEnd.KILLED, WorkerEnd.EXITED, WorkerEnd.KILLED, WorkerEnd.NONE):
        driver.start_core()
        driver.link.on_death(CoreDeath("crash", "exited with code 1", worker_end=end))
        driver.core = None
    found = {name: count for name, count in driver.link.counts.items() if name.startswith("worker_deaths.")}
    assert found == {"worker_deaths.killed": 2, "worker_deaths.exited": 1}


# -- messages that are not what they should be ------------------------------------------------------------------------


def test_messages_of_another_core_and_outputs_of_nobody_are_dropped() -> None:
    link = EngineLink()
    link.on_outputs(outputs(("a", [1])))
    link.on_ready(make_ready(5))
    link.add_request(make_request("a"))
    link.on_outputs(outputs(("a", [1]), incarnation=4))
    link.on_outputs(outputs(("x", [1]), ("a", [2]), ("y", [3]), incarnation=5))
    link.on_corrupt_message()
    assert [[o.request_id for o in delivered.outputs] for delivered in link.deliveries] == [["a"]]
    assert link.counts == {"stale": 2, "unknown": 2, "corrupt": 1}


def test_a_repeated_message_is_dropped() -> None:
    driver = Driver()
    driver.start_core()
    driver.add(make_request("a"))
    assert driver.core is not None
    driver.core.step()
    message = driver.core.outbox[0]
    driver.deliver()
    driver.link.on_outputs(message)
    driver.settle()
    assert len(driver.delivered["a"]) == 1
    assert driver.link.counts["repeated"] == 1


def test_a_client_that_comes_later_knows_where_the_numbers_stand() -> None:
    """The sender was another process before: messages to that one are neither lost nor still to come."""
    link = EngineLink(2, is_shared=True)
    link.on_ready(make_ready(4, next_sequence=58))
    link.add_request(make_request("a"))
    link.on_outputs(outputs(("a", [9]), incarnation=4, sequence=57))
    link.on_outputs(outputs(("a", [1]), incarnation=4, sequence=58))
    link.on_outputs(outputs(("a", [2]), incarnation=4, sequence=59))
    tokens = [output.new_token_ids for delivered in link.deliveries for output in delivered.outputs]
    assert tokens == [[1], [2]]
    assert link.counts == {"repeated": 1}
    assert len(link.messages) == 1


def test_a_message_lost_before_the_first_that_comes_is_noticed() -> None:
    link = EngineLink(2, is_shared=True)
    link.on_ready(make_ready(4, next_sequence=58))
    link.add_request(make_request("a"))
    link.on_outputs(outputs(("a", [2]), incarnation=4, sequence=59))
    assert link.counts["lost"] == 1
    assert link.deliveries == []
    assert link.messages[-1].payload.request_id == "a~1"


def test_a_message_that_overtakes_the_ready_frame_is_not_lost() -> None:
    """A core that takes in news at its start sends statistics as soon as a client is connected."""
    link = EngineLink(0)
    link.on_outputs(outputs(incarnation=4, sequence=1))
    link.on_ready(make_ready(4, next_sequence=1))
    link.on_outputs(outputs(incarnation=4, sequence=2))
    assert (link.counts["stale"], link.counts["lost"]) == (1, 0)
    link.on_outputs(outputs(incarnation=4, sequence=4))
    assert link.counts["lost"] == 1
    link.on_ready(make_ready(5, next_sequence=1))
    link.on_outputs(outputs(incarnation=5, sequence=1))
    assert link.counts["lost"] == 1, "numbers of another core do not count"


def test_a_connection_that_was_lost_goes_on_at_the_number_it_is_told() -> None:
    link = EngineLink(1, is_shared=True)
    link.on_ready(make_ready())
    link.add_request(make_request("a"))
    link.on_outputs(outputs(("a", [1]), sequence=1))
    link.on_ready(make_ready(0, next_sequence=4))
    for sequence in (2, 3):  # of the connection before
        link.on_outputs(outputs(("a", [9]), sequence=sequence))
    link.on_outputs(outputs(("a", [2]), sequence=4))
    tokens = [output.new_token_ids for delivered in link.deliveries for output in delivered.outputs]
    assert tokens == [[1], [2]]
    assert (link.counts["repeated"], link.counts["lost"]) == (2, 0)


@pytest.mark.parametrize(("is_owner", "is_shared"), [(True, False), (True, True), (False, True)])
def test_the_owner_of_a_shared_core_lets_the_others_in_when_it_is_restored(is_owner: bool, is_shared: bool) -> None:
    link = EngineLink(is_shared=is_shared, is_owner=is_owner)
    link.on_ready(make_ready(0))
    call_id = link.call_utility("pause_scheduler", ("keep", False))
    link.on_outputs(EngineCoreOutputs(utility_output=UtilityOutput(call_id)))
    link.on_death(CoreDeath("killed", "was killed", ()))
    link.messages.clear()
    link.on_ready(make_ready(1))
    assert [message.payload[2] for message in link.messages] == ["pause_scheduler"]
    restoring = link.messages.pop().payload[1]
    link.on_outputs(EngineCoreOutputs(utility_output=UtilityOutput(restoring), incarnation=1))
    owns = is_shared and is_owner
    assert [message.payload[2] for message in link.messages] == ["admit_clients"] * owns
    if owns:
        admission = link.messages.pop().payload[1]
        link.on_outputs(EngineCoreOutputs(utility_output=UtilityOutput(admission), incarnation=1))
        assert [answer.call_id for answer in link.answers] == [call_id], "nobody waits for that one"


def test_after_a_lost_message_everything_is_sent_again() -> None:
    driver = Driver()
    requests = [make_request(name, 6) for name in "ab"]
    driver.start_core()
    for request in requests:
        driver.add(request)
    driver.step()
    assert driver.core is not None
    driver.core.step()
    driver.core.outbox.clear()
    driver.core.step()
    driver.deliver()
    assert driver.link.counts["lost"] == 1
    assert sent_ids(driver) == ["a~1", "b~1"]
    driver.run()
    for request in requests:
        assert driver.delivered[request.request_id] == expected_tokens(request)
    assert driver.num_cores == 1


def test_a_corrupt_last_message_is_not_waited_for() -> None:
    """No message would follow it that shows the gap: the link asks for one, but does not answer a flood by a flood."""
    driver = Driver()
    driver.start_core()
    driver.add(request := make_request("a", 1))
    assert driver.core is not None
    driver.core.step()
    driver.core.outbox.clear()
    for _ in range(100):
        driver.link.on_corrupt_message()
    driver.settle()
    assert [message.payload[2] for message in driver.core.inbox] == ["get_supported_tasks"] * 8
    driver.run()
    assert driver.delivered["a"] == expected_tokens(request)
    assert not driver.link.answers


@pytest.mark.parametrize("after_restart", [False, True])
def test_a_number_that_is_no_token_id_fails_its_request(after_restart: bool) -> None:
    driver = Driver()
    driver.start_core()
    driver.add(make_request("a"))
    if after_restart:
        driver.die("killed")
        driver.start_core()
    incarnation = int(after_restart)
    driver.link.on_outputs(outputs(("a", [1 << 40]), incarnation=incarnation))
    driver.settle()
    assert driver.ends["a"].finish_reason is FinishReason.ERROR
    assert driver.delivered["a"] == []
    assert driver.core is not None
    assert driver.core.inbox[-1].payload == ["a"]


# -- control calls ----------------------------------------------------------------------------------------------------


def answers(driver: Driver) -> dict[int, UtilityOutput | EngineDeadError]:
    taken, driver.link.answers = driver.link.answers, []
    return {answer.call_id: answer.output for answer in taken}


def test_a_call_is_answered() -> None:
    driver = Driver()
    call_id = driver.link.call_utility("is_sleeping", (1, "x"))
    assert not driver.link.messages, "there is no core yet"
    driver.start_core()
    assert driver.core is not None
    assert driver.core.inbox[0].payload == (0, call_id, "is_sleeping", (1, "x"))
    driver.step()
    assert answers(driver) == {call_id: UtilityOutput(call_id, result="is_sleeping")}
    driver.link.on_outputs(EngineCoreOutputs(utility_output=UtilityOutput(call_id)))
    assert driver.link.counts["unknown"] == 1


def test_a_safe_call_is_made_again_and_another_fails() -> None:
    driver = Driver()
    driver.start_core()
    safe, unsafe = driver.link.call_utility("reset_prefix_cache", ()), driver.link.call_utility("collective_rpc", ())
    driver.settle()
    driver.die("killed")
    ((failed_id, error),) = answers(driver).items()
    assert failed_id == unsafe
    assert isinstance(error, EngineDeadError)
    assert "collective_rpc, which may or may not have been carried out" in str(error)
    later = driver.link.call_utility("collective_rpc", ())
    driver.link.on_death(CoreDeath("start", "did not start"))
    assert not answers(driver), "it has not been sent to any core"
    driver.start_core()
    driver.step()
    assert answers(driver).keys() == {safe, later}


def test_a_core_that_shuts_down_by_itself_has_not_answered() -> None:
    driver = Driver()
    driver.start_core()
    call_id = driver.link.call_utility("is_sleeping", ())
    refusal = UtilityOutput(call_id, failure_message="Server shutting down", error_type="EngineDeadError")
    driver.link.on_outputs(EngineCoreOutputs(utility_output=refusal))
    assert not answers(driver)
    driver.settle()
    driver.die("killed")
    driver.start_core()
    driver.step()
    assert answers(driver) == {call_id: UtilityOutput(call_id, result="is_sleeping")}
    driver.link.is_closing = True
    late = driver.link.call_utility("is_sleeping", ())
    refusal.call_id = late
    driver.link.on_outputs(EngineCoreOutputs(utility_output=refusal, incarnation=1))
    assert answers(driver) == {late: refusal}


def test_a_call_that_was_pending_in_two_deaths_is_not_made_again() -> None:
    driver = Driver()
    driver.start_core()
    call_id = driver.link.call_utility("update_weights", ("/w",))
    driver.settle()
    for _ in range(2):
        assert not answers(driver)
        driver.die("crash")
        driver.start_core()
    assert "2 times; each time the engine core died" in str(answers(driver)[call_id])
    assert driver.core is not None
    assert not driver.core.inbox


def test_a_new_core_is_brought_into_the_state_of_the_last_before_it_gets_requests() -> None:
    driver = Driver()
    driver.start_core()
    driver.link.call_utility("update_weights", ("/w",))
    driver.link.call_utility("pause_scheduler", ("keep", True))
    driver.add(make_request("a"))
    driver.step()
    driver.die("killed")
    driver.start_core()
    assert driver.link.state is LinkState.RESTORING
    assert driver.core is not None
    assert [m.type for m in driver.core.inbox] == [UTILITY, UTILITY]
    answers(driver)
    driver.step()
    assert driver.core.calls == [("update_weights", ("/w", "update_weights")), ("pause_scheduler", ("keep", False))]
    assert (driver.link.state, sent_ids(driver)) == (LinkState.UP, ["a"])
    assert not answers(driver), "nobody waits for these"


def test_a_death_while_the_state_is_restored_begins_anew() -> None:
    driver = Driver()
    driver.start_core()
    driver.link.call_utility("sleep", (2,))
    driver.settle()
    driver.step()
    for _ in range(3):
        driver.die("killed")
        driver.start_core()
        assert driver.core is not None
        assert [m.payload[2] for m in driver.core.inbox] == ["sleep"]


def test_a_core_that_cannot_be_restored_is_of_no_use() -> None:
    driver = Driver()
    driver.start_core()
    driver.link.call_utility("update_weights", ("/w",))
    driver.settle()
    driver.step()
    driver.die("killed")
    driver.add(make_request("a"))
    driver.start_core()
    assert driver.core is not None
    call_id = driver.core.inbox[0].payload[1]
    failure = UtilityOutput(call_id, failure_message="no such directory")
    driver.link.on_outputs(EngineCoreOutputs(utility_output=failure, incarnation=1))
    driver.settle()
    assert driver.link.state is LinkState.GONE
    assert "not into its former state: no such directory" in (driver.ends["a"].error_message or "")


def test_at_the_end_calls_fail_with_the_reason() -> None:
    driver = Driver()
    before = driver.link.call_utility("is_sleeping", ())
    driver.link.on_gone("that was it")
    after = driver.link.call_utility("is_sleeping", ())
    given = {answer.call_id: str(answer.output) for answer in driver.link.answers if isinstance(answer, Answer)}
    assert given == {before: "that was it", after: "that was it"}


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_an_id_may_be_used_again_when_its_request_has_ended() -> None:
    """The next request of a session, on whatever core."""
    driver = Driver()
    driver.start_core()
    for prompt_len in (3, 5):
        driver.add(make_request("s", prompt_len))
        assert driver.core is not None
        ((sent, message),) = [(m.payload.request_id, m.payload) for m in driver.core.inbox if m.type is ADD]
        assert (sent, message.output_token_ids) == ("s", [])
        driver.core.inbox.clear()
        driver.die("killed")
        driver.start_core()
        assert [m.payload.request_id for m in driver.core.inbox if m.type is ADD] == ["s"]
        driver.core.inbox.clear()
        end = EngineCoreOutput("s", [7], finish_reason=FinishReason.LENGTH)
        assert driver.link.ready_response is not None
        driver.link.on_outputs(EngineCoreOutputs(outputs=[end], incarnation=driver.link.ready_response.incarnation))
        assert driver.link.num_live_requests == 0

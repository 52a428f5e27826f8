"""A set of engines, case by case. `test_engine_set_random.py` has the rest."""

from __future__ import annotations

import pytest

from quire.frontend.client.link import EngineLink, LinkState
from quire.wire.engine_core import EngineCoreOutputs, FinishReason, UtilityOutput
from quire.wire.stats import SchedulerStats

from .model_core import UTILITY, expected_tokens, make_ready, make_request
from .set_driver import SetDriver


def running(size: int = 2, num_requests: int = 8, num_tokens: int = 9, **fields: object) -> SetDriver:
    """Engines that have computed two tokens of each request."""
    driver = SetDriver(size, max_num_seqs=64, **fields)
    driver.start_all()
    for i in range(num_requests):
        driver.add(make_request(f"r{i}", num_tokens))
    for _ in range(2):
        for index in list(driver.cores):
            driver.step(index)
    return driver


def finish(driver: SetDriver) -> None:
    driver.run()
    for name, tokens in driver.delivered.items():
        assert tokens == expected_tokens(make_request(name, len(tokens)))
        assert driver.ends[name].finish_reason is FinishReason.LENGTH


def num_at(driver: SetDriver, index: int) -> int:
    return driver.set.links[index].num_live_requests


def test_requests_are_shared_among_the_engines() -> None:
    driver = running()
    assert num_at(driver, 0) == num_at(driver, 1) == 4
    finish(driver)


def test_a_killed_engine_gives_its_requests_to_the_other_at_once() -> None:
    driver = running()
    driver.die(1, "killed")
    assert (num_at(driver, 0), num_at(driver, 1)) == (8, 0)
    assert driver.set.state is LinkState.UP
    counts = driver.set.counts
    assert (counts["moved_requests"], counts["moves.1.killed"], counts["moved_tokens"]) == (4, 4, 4 * (3 + 2))
    driver.step(0)
    assert all(len(tokens) == 3 for tokens in driver.delivered.values())
    finish(driver)


def test_the_suspects_of_a_crash_wait_for_their_engine_and_nobody_else_does() -> None:
    driver = running(num_requests=0)
    driver.max_num_seqs = 1
    for i in range(60):
        driver.add(make_request(f"r{i}", 9))
    for index in (0, 1):
        driver.cores[index].max_num_seqs = 1
        driver.step(index)
    driver.die(1, "crash")
    suspects, others = driver.set.links[1].get_entries()
    assert len(suspects) == 1 + 16, "the step's only member, and the newcomers"
    assert others == []
    later = driver.add(make_request("later", 2))
    assert later == 0
    driver.start(1)
    assert len(driver.cores[1].inbox) == 1, "one is tried alone"
    finish(driver)
    assert driver.set.counts["poisoned_requests"] == 0


def test_a_poison_never_reaches_the_other_engine() -> None:
    driver = running(num_requests=0)
    poison = make_request("poison", 6, deadly_at=2)
    index = driver.add(poison)
    for i in range(6):
        driver.add(make_request(f"r{i}", 9))
    driver.run()
    assert driver.ends["poison"].finish_reason is FinishReason.ERROR
    assert driver.num_cores == {index: 3, 1 - index: 1}


def test_without_another_engine_requests_wait_for_whichever_comes_first() -> None:
    driver = running()
    driver.die(0)
    driver.die(1)
    assert driver.set.state is LinkState.DOWN
    driver.add(make_request("later", 2))
    driver.start(1)
    assert (num_at(driver, 0), num_at(driver, 1)) == (0, 9)
    assert driver.set.counts["moves.0.waiting"] > 0
    finish(driver)


@pytest.mark.parametrize("reroute", ["wait", "never"])
def test_requests_stay_where_they_are_if_asked_for(reroute: str) -> None:
    driver = running(reroute=reroute)
    driver.die(1)
    assert num_at(driver, 1) == 4
    driver.start(1)
    finish(driver)


def test_an_engine_that_is_gone_for_good_loses_nothing() -> None:
    driver = running(reroute="wait")
    driver.give_up(1)
    assert num_at(driver, 0) == 8
    assert driver.set.counts["moves.1.gone"] == 4
    assert not driver.set.is_gone
    finish(driver)


def test_an_engine_that_is_gone_fails_its_requests_if_they_may_not_move() -> None:
    driver = running(reroute="never")
    driver.give_up(1)
    failed = [end for end in driver.ends.values() if end.finish_reason is FinishReason.ERROR]
    assert len(failed) == 4
    assert failed[0].error_message == "the budget of restarts is used up"


def test_the_last_engine_that_goes_fails_everything() -> None:
    driver = running()
    driver.give_up(1)
    driver.give_up(0)
    assert driver.set.is_gone
    assert driver.set.gone_reason == "the budget of restarts is used up"
    assert len(driver.ends) == 8
    driver.add(make_request("later"))
    assert driver.ends["later"].finish_reason is FinishReason.ERROR


def test_suspects_of_an_engine_that_is_gone_are_tried_on_an_empty_one() -> None:
    driver = running(size=3, num_requests=9)
    driver.die(2, "crash")
    assert num_at(driver, 2) == 3
    driver.give_up(2)
    tried = [index for index in (0, 1) if not driver.set.links[index].is_open]
    assert len(tried) == 1
    assert num_at(driver, tried[0]) == 3, "the others of that engine have moved, too"
    finish(driver)


def test_it_is_not_worth_moving_what_takes_longer_than_a_restart() -> None:
    driver = SetDriver(2)
    driver.start_all()
    driver.now = 10.0
    driver.die(1)
    driver.now = 10.001
    driver.start(1)
    for i in range(4):
        driver.add(make_request(f"r{i}", 9))
    for name in ("r0", "r1", "r2", "r3"):  # each engine has long prompts in its queue
        driver.set.router.put(make_request(f"{name} of another client", prompt=[0] * 20_000), 0)
    before = num_at(driver, 1)
    driver.die(1)
    assert num_at(driver, 1) == before == 2


def test_statistics_of_a_dead_engine_end() -> None:
    driver = running()
    stats = SchedulerStats(num_running_reqs=4, num_used_blocks=3, num_free_blocks=5)
    core = driver.cores[1]
    core.send(scheduler_stats=stats)
    driver.set.on_outputs(core.outbox.pop(0))
    driver.settle()
    driver.set.on_death(1, core.death("killed"))
    told = [o for o in driver.set.deliveries if o.scheduler_stats is not None]
    assert [(o.engine_index, o.scheduler_stats) for o in told] == [(1, SchedulerStats(num_free_blocks=8))]


def test_control_calls_go_to_all_and_a_new_engine_is_brought_into_their_state() -> None:
    driver = running(num_requests=0)
    call_id = driver.set.call_utility("pause_scheduler", ("keep", False))
    driver.settle()
    for index in (0, 1):
        driver.step(index)
    assert [answer.call_id for answer in driver.answers] == [call_id]
    index = driver.grow()
    core = driver.start(index)
    assert [message.payload[2] for message in core.inbox if message.type is UTILITY] == ["pause_scheduler"]
    driver.add(make_request("a"))
    driver.step(index)
    assert driver.set.links[index].state is LinkState.UP


def test_a_call_under_way_reaches_an_engine_that_joins() -> None:
    driver = running(num_requests=0)
    driver.set.call_utility("sleep", (1, "keep"))
    driver.settle()
    index = driver.grow()
    for other in (0, 1):
        driver.step(other)
    assert driver.answers == []
    core = driver.start(index)
    driver.step(index)
    assert [method for method, _ in core.calls] == ["sleep"]
    assert len(driver.answers) == 1


def test_a_question_is_not_put_to_an_engine_that_is_down() -> None:
    driver = running(num_requests=0)
    driver.die(1)
    driver.set.call_utility("is_sleeping", ())
    driver.settle()
    driver.step(0)
    (answer,) = driver.answers
    assert isinstance(answer.output, UtilityOutput)


def test_an_engine_that_drains_gets_nothing_new() -> None:
    driver = running()
    driver.set.drain(0, moves=False)
    driver.settle()
    assert num_at(driver, 0) == 4
    assert {driver.add(make_request(f"n{i}", 2)) for i in range(6)} == {1}
    driver.set.drain(1, moves=True)  # no other engine takes any: they stay
    driver.settle()
    assert num_at(driver, 1) == 10
    driver.set.undrain(0)
    driver.settle()
    finish(driver)


def test_the_last_engine_is_not_removed() -> None:
    driver = SetDriver(1)
    with pytest.raises(ValueError, match="engine 0 is the last one"):
        driver.set.remove_engine(0)


def test_a_set_that_grows_from_one_engine_knows_what_is_there() -> None:
    driver = running(size=1, num_requests=6)
    index = driver.grow()
    driver.start(index)
    assert driver.set.router.num_requests(0) == 6
    assert driver.add(make_request("new")) == index
    finish(driver)


def test_messages_of_an_engine_that_was_removed_are_stale() -> None:
    driver = running()
    driver.shrink(1)
    driver.set.on_outputs(EngineCoreOutputs(1))
    driver.set.on_ready(1, make_ready(engine_index=1))
    assert driver.set.counts["stale"] == 2
    driver.deliver_late(10)
    finish(driver)


def test_an_id_in_use_is_refused() -> None:
    driver = running()
    with pytest.raises(ValueError, match="r3 is in use"):
        driver.set.add_request(make_request("r3"))


def test_links_have_their_own_control_state() -> None:
    first, second = EngineLink(), EngineLink()
    second.inherit_calls(first)
    assert second._calls._state is not first._calls._state


def test_a_lost_machine_gives_up_everything_at_once() -> None:
    """Also calls: it is unknown when the engine is back."""
    driver = running()
    driver.set.call_utility("is_sleeping", ())
    driver.settle()
    driver.lose(1)
    assert (num_at(driver, 0), num_at(driver, 1)) == (8, 0)
    assert driver.set.counts["moves.1.lost"] == 4
    driver.step(0)
    assert len(driver.answers) == 1, "the lost one is not waited for"
    assert driver.set.call_utility("is_sleeping", ()) == 2
    driver.settle()
    driver.step(0)
    assert len(driver.answers) == 2
    driver.step(1)  # it lives on, and nothing of it counts
    driver.regain(1)
    assert driver.cores[1].requests == {}
    driver.add(make_request("later", 5))
    assert num_at(driver, 1) == 1
    finish(driver)


def test_a_machine_that_comes_has_the_state_of_the_others() -> None:
    driver = running(3, num_requests=0)
    driver.lose(2)
    driver.set.call_utility("pause_scheduler", ("keep", True))
    driver.settle()
    for index in (0, 1):
        driver.step(index)
    assert len(driver.answers) == 1
    driver.regain(2)
    driver.step(2)
    assert driver.cores[2].calls[-1] == ("pause_scheduler", ("keep", False))
    assert driver.set.links[2].state is LinkState.UP


def test_a_machine_with_too_short_a_context_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    driver = SetDriver(2, remote_engines=(1,))
    driver.start(0)
    driver.set.least_model_len = 65
    driver.start(1)
    driver.regain(1)
    assert driver.set.links[1].state is LinkState.DOWN
    assert "engine 1 is left out: it has a context of 64 tokens, and clients were promised 65" in caplog.text


def unlike(**fields: object) -> SetDriver:
    """Two engines of unlike numerics; three requests at each have output, and one at each has none."""
    driver = SetDriver(2, max_num_seqs=3, **fields)
    driver.numerics = {0: "avx2", 1: "amx"}
    driver.start_all()
    for i in range(8):
        driver.add(make_request(f"r{i}", 4))
    for index in (0, 1):
        driver.step(index)
    return driver


def test_streams_do_not_move_to_an_engine_that_computes_other_bits() -> None:
    driver = unlike()
    driver.die(1)
    assert (num_at(driver, 0), num_at(driver, 1)) == (5, 3), "the one without a token has moved"
    assert driver.set.counts["foreign_moves"] == 0
    assert not driver.set.can_empty(1)
    driver.start(1)
    finish(driver)


def test_streams_that_can_go_on_nowhere_end_with_the_reason() -> None:
    driver = unlike()
    driver.give_up(1)
    (message,) = {end.error_message for end in driver.ends.values()}
    assert message is not None
    assert "no other engine computes the same numbers (--reroute-any-numerics" in message
    assert num_at(driver, 0) == 5


def test_streams_move_anywhere_if_the_operator_wants_it() -> None:
    driver = unlike(reroutes_any=True)
    driver.die(1)
    assert (num_at(driver, 0), num_at(driver, 1)) == (8, 0)
    assert driver.set.counts["foreign_moves"] == 3
    finish(driver)

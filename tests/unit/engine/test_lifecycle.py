"""Pause, sleep and new weights, on a core that is driven by hand and on one that runs its own loop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import pytest

from quire.engine.sched.interface import PauseState
from quire.errors import ClientError, ModelLoadError, ServerError
from quire.lora_request import LoRARequest
from quire.wire.engine_core import FinishReason
from quire.wire.execution import SchedulerOutput

from .driver import Core
from .harness import ScriptedExecutor, make_core_request


def make_loop(executor_class: type[ScriptedExecutor] = ScriptedExecutor) -> Core:
    """A core with a loop of its own: here that of `run_loop`."""
    engine = Core(executor_class, enable_prefix_caching=True)
    engine.core.lifecycle.can_wait = True
    return engine


def run_loop(engine: Core, max_steps: int = 50) -> None:
    """Runs steps as an engine's own loop does, until no work is left."""
    for _ in range(max_steps):
        if not engine.core.has_work():
            engine.core.lifecycle.notify_idle()
            return
        engine.step()
    raise AssertionError("no end in sight")


class Held(ScriptedExecutor):
    """Two steps at once, resolved by hand."""

    max_batches = 2
    hold = True


def sent_to_workers(engine: Core) -> list[Any]:
    """Control calls: a name, or a name and its arguments."""
    return [(method, *args) if args else method for method, _, args, _ in engine.executor.rpcs]


def scheduled_next(engine: Core) -> dict[str, int]:
    """Tokens per request in the next step."""
    steps: list[SchedulerOutput] = []
    engine.executor.on_execute = steps.append
    engine.step()
    engine.executor.on_execute = lambda output: None
    return steps[0].num_scheduled_tokens


# -- pause, where the caller runs the steps -------------------------------------------------------------------


def test_pause_by_abort_ends_everything_and_tells_it() -> None:
    engine = Core()
    engine.add("a")
    engine.step()
    assert engine.core.lifecycle.pause_scheduler("abort") is None
    assert engine.core.lifecycle.is_scheduler_paused()
    engine.add("b", max_tokens=1)
    engine.step()
    assert engine.outputs["a"][-1].finish_reason is FinishReason.ABORT
    assert engine.step() is False
    assert "b" not in engine.outputs
    engine.core.lifecycle.resume_scheduler()
    assert not engine.core.lifecycle.is_scheduler_paused()
    engine.run()
    assert engine.tokens("b") == [4]


@pytest.mark.parametrize("clear_cache", [False, True])
def test_pause_by_keep_freezes_and_goes_on(clear_cache: bool) -> None:
    engine = Core(enable_prefix_caching=True)
    engine.add("a", 9, max_tokens=3)
    engine.step()
    engine.core.lifecycle.pause_scheduler("keep", clear_cache=clear_cache)
    assert engine.step() is False
    engine.core.lifecycle.resume_scheduler()
    assert scheduled_next(engine) == {"a": 10 if clear_cache else 1}
    engine.run()
    assert engine.tokens("a") == [9, 10, 11]


def test_pauses_that_are_not_possible() -> None:
    lifecycle = Core().core.lifecycle
    with pytest.raises(ValueError, match=r"'wait' is not possible.*run steps until none is left"):
        lifecycle.pause_scheduler("wait")
    with pytest.raises(ValueError, match=r"'wait' is not possible"):
        lifecycle.sleep(1, "wait")
    with pytest.raises(ValueError, match=r"'soon' is not known; use 'abort', 'wait', 'keep'"):
        lifecycle.pause_scheduler("soon")  # type: ignore[arg-type]
    assert not lifecycle.is_scheduler_paused()


@pytest.mark.parametrize(("mode", "outputs"), [("keep", [4]), ("abort", [])])
def test_a_pause_waits_for_steps_in_flight_and_their_outputs_come_after_it(mode: str, outputs: list[int]) -> None:
    engine = Core(Held)
    engine.add("a", max_tokens=3)
    engine.step()  # in flight
    engine.executor.release()
    engine.core.lifecycle.pause_scheduler(cast("Any", mode))
    assert not engine.core.batch_queue
    assert engine.core.has_work()
    engine.step()
    assert engine.tokens("a") == outputs
    engine.executor.hold = False
    engine.core.lifecycle.resume_scheduler()
    engine.run()
    assert engine.tokens("a") == ([4, 5, 6] if mode == "keep" else [])


def test_a_step_in_flight_that_fails_fails_the_pause_and_loses_no_request() -> None:
    engine = Core(Held)
    engine.add("a", max_tokens=2)
    engine.step()
    engine.executor.held[0][0].set_exception(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        engine.core.lifecycle.pause_scheduler("keep")
    engine.executor.hold = False
    engine.core.lifecycle.resume_scheduler()
    engine.run()
    assert engine.tokens("a") == [4, 5]


@pytest.mark.parametrize(
    "call",
    [
        lambda lifecycle: lifecycle.pause_scheduler("keep"),
        lambda lifecycle: lifecycle.reset_prefix_cache(True),
    ],
)
def test_ctrl_c_does_not_tear_a_verb_apart(call: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Core(enable_prefix_caching=True)
    engine.add("a", 9, max_tokens=2)
    engine.step()
    original = engine.core.scheduler.reset_prefix_cache

    def interrupted(*args: Any) -> bool:
        signal.raise_signal(signal.SIGINT)
        return original(*args)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(engine.core.scheduler, "reset_prefix_cache", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(engine.core.lifecycle)
    signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    engine.core.lifecycle.resume_scheduler()
    assert scheduled_next(engine) == {"a": 10}  # the reset was done, whole


# -- pause, where a loop of its own runs the steps -------------------------------------------------------------


def test_pause_by_wait_ends_when_what_runs_has_ended() -> None:
    engine = make_loop()
    engine.add("a", 9, max_tokens=3)
    engine.step()
    paused = engine.core.lifecycle.pause_scheduler("wait")
    engine.add("b", 9, max_tokens=1)
    assert isinstance(paused, Future)
    engine.step()
    assert not paused.done()
    run_loop(engine)
    assert paused.result(0) is None
    assert (engine.tokens("a"), engine.tokens("b")) == ([9, 10, 11], [])
    engine.core.lifecycle.resume_scheduler()
    assert scheduled_next(engine) == {"b": 9}, "the prefixes of a are forgotten"
    run_loop(engine)
    assert engine.tokens("b") == [9]


def test_without_clear_cache_prefixes_outlive_a_pause() -> None:
    engine = make_loop()
    engine.add("a", list(range(9)), max_tokens=2)
    engine.step()
    paused = engine.core.lifecycle.pause_scheduler("wait", clear_cache=False)
    run_loop(engine)
    assert paused is not None
    assert paused.done()
    engine.core.lifecycle.resume_scheduler()
    engine.add("b", list(range(9)), max_tokens=1)
    assert scheduled_next(engine) == {"b": 1}, "two blocks of 4 are still there"


def test_a_pause_by_abort_ends_after_the_clients_were_told() -> None:
    engine = make_loop()
    engine.add("a")
    engine.step()
    paused = engine.core.lifecycle.pause_scheduler("abort")
    assert paused is not None
    engine.core.lifecycle.pause_scheduler("abort")
    assert not paused.done()
    run_loop(engine)
    assert engine.outputs["a"][-1].finish_reason is FinishReason.ABORT
    assert paused.done()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_an_engine_that_has_nothing_to_do_pauses_at_once(mode: Any) -> None:
    engine = make_loop()
    assert engine.core.lifecycle.pause_scheduler(mode) is None
    assert engine.core.scheduler.pause_state is (PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)


def test_keep_delivers_what_was_in_flight_before_the_pause_is_complete() -> None:
    engine = make_loop(Held)
    engine.add("a", max_tokens=3)
    engine.step()
    engine.executor.release()
    paused = engine.core.lifecycle.pause_scheduler("keep")
    assert paused is not None
    run_loop(engine)
    assert engine.tokens("a") == [4]
    assert paused.done()


def test_resume_calls_off_a_pause_that_is_not_complete() -> None:
    engine = make_loop()
    engine.add("a", max_tokens=3)
    engine.step()
    slept = engine.core.lifecycle.sleep(1, "wait")
    engine.core.lifecycle.resume_scheduler()
    run_loop(engine)
    assert slept is not None
    with pytest.raises(ClientError, match="resumed before the pause was complete"):
        slept.result(0)
    assert engine.tokens("a") == [4, 5, 6]
    assert sent_to_workers(engine) == []


def test_sleep_by_wait_sleeps_when_everything_has_ended() -> None:
    engine = make_loop()
    engine.add("a", max_tokens=2)
    engine.step()
    slept = engine.core.lifecycle.sleep(2, "wait")
    assert not engine.core.lifecycle.is_sleeping()
    assert sent_to_workers(engine) == []
    run_loop(engine)
    assert slept is not None
    assert slept.done()
    assert engine.core.lifecycle.is_sleeping()
    assert sent_to_workers(engine) == [("sleep", 2)]


def test_a_worker_that_cannot_sleep_fails_the_call_and_not_the_engine() -> None:
    engine = make_loop()
    engine.add("a", max_tokens=2)
    engine.step()
    slept = engine.core.lifecycle.sleep(1, "wait")
    engine.executor.rpc_failures = [("sleep", RuntimeError("no bed"))]
    run_loop(engine)
    assert slept is not None
    with pytest.raises(RuntimeError, match="no bed"):
        slept.result(0)
    assert engine.core.lifecycle.is_sleeping(), "nobody knows what is left of its memory"
    assert engine.core.lifecycle.wake_up() is True
    assert sent_to_workers(engine)[1:] == [("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]


# -- sleep -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_arrives_during_a_sleep_waits_and_what_was_kept_goes_on(level: int) -> None:
    engine = Core(enable_prefix_caching=True)
    engine.add("a", 9, max_tokens=3)
    engine.step()
    assert engine.core.lifecycle.sleep(level, "keep") is None
    assert engine.core.lifecycle.is_sleeping()
    assert engine.core.lifecycle.is_scheduler_paused()
    engine.add("b", 9, max_tokens=1)
    assert engine.step() is False
    assert engine.core.lifecycle.wake_up() is True
    assert not engine.core.lifecycle.is_sleeping()
    assert not engine.core.lifecycle.is_scheduler_paused()
    first = scheduled_next(engine)
    assert first["a"] == (1 if level == 0 else 10), "without its KV it is computed again"
    engine.run()
    assert (engine.tokens("a"), engine.tokens("b")) == ([9, 10, 11], [9])
    told = [] if level == 0 else [("sleep", level), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    assert sent_to_workers(engine) == told


def test_a_sleep_by_abort_tells_the_clients_while_it_sleeps() -> None:
    engine = Core()
    engine.add("a")
    engine.step()
    engine.core.lifecycle.sleep()
    assert engine.step() is False
    assert engine.outputs["a"][-1].finish_reason is FinishReason.ABORT


def test_waking_up_part_by_part() -> None:
    lifecycle = (engine := Core()).core.lifecycle
    lifecycle.sleep(2)
    assert lifecycle.wake_up(["scheduling"]) is False
    assert lifecycle.wake_up(["weights"]) is False
    assert lifecycle.is_sleeping()
    assert lifecycle.is_scheduler_paused()
    with pytest.raises(ClientError, match=r"asleep \(kv_cache given back\); call wake_up"):
        lifecycle.resume_scheduler()
    assert lifecycle.wake_up(["kv_cache", "scheduling"]) is True
    assert lifecycle.wake_up() is True, "awake already"
    assert sent_to_workers(engine) == [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    assert not lifecycle.is_scheduler_paused()


def test_resume_ends_a_sleep_of_level_0_and_wake_up_a_pause() -> None:
    lifecycle = Core().core.lifecycle
    lifecycle.sleep(0)
    lifecycle.resume_scheduler()
    assert not lifecycle.is_sleeping()
    lifecycle.pause_scheduler("keep")
    assert not lifecycle.is_sleeping()
    assert lifecycle.wake_up() is True
    assert not lifecycle.is_scheduler_paused()


def test_what_sleep_and_wake_up_refuse() -> None:
    lifecycle = Core().core.lifecycle
    with pytest.raises(ValueError, match="sleep level 3 is not known"):
        lifecycle.sleep(3)
    with pytest.raises(ValueError, match=r"tags \['kv'\] are not known"):
        lifecycle.wake_up(["weights", "kv"])
    assert not lifecycle.is_scheduler_paused()
    loop = make_loop().core.lifecycle
    loop.sleep(1)
    with pytest.raises(ClientError, match="'wait' needs an engine that runs; this one has kv_cache and weights given"):
        loop.pause_scheduler("wait")


def test_a_sleeper_can_be_sent_deeper() -> None:
    lifecycle = (engine := Core()).core.lifecycle
    for level in (0, 1, 2, 1, 0):
        lifecycle.sleep(level)
    assert sent_to_workers(engine) == [("sleep", 1), ("sleep", 2), ("sleep", 1)]
    assert lifecycle.is_sleeping()
    assert lifecycle.wake_up() is True


def test_the_cache_alone_can_be_given_back() -> None:
    lifecycle = (engine := Core()).core.lifecycle
    lifecycle.release_kv_cache_memory("keep")
    assert lifecycle.is_sleeping()
    assert lifecycle.wake_up(["kv_cache"]) is True
    assert sent_to_workers(engine) == ["release_kv_cache_memory", ("wake_up", ["kv_cache"])]


def test_a_failed_awakening_can_be_tried_again() -> None:
    lifecycle = (engine := Core()).core.lifecycle
    lifecycle.sleep(2)
    engine.executor.rpc_failures = [("wake_up", ModelLoadError("the disk is gone"))]
    with pytest.raises(ModelLoadError):
        lifecycle.wake_up()
    assert lifecycle.is_sleeping()
    assert lifecycle.wake_up() is True


# -- caches ----------------------------------------------------------------------------------------------------


def test_reset_of_the_prefix_cache() -> None:
    engine = Core(enable_prefix_caching=True)
    engine.add("a", 9, max_tokens=2)
    engine.step()
    assert engine.core.lifecycle.reset_prefix_cache() is False
    assert engine.core.lifecycle.reset_prefix_cache(reset_running_requests=True) is True
    engine.run()
    assert engine.tokens("a") == [9, 10]


def test_a_cache_that_cannot_be_reset_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Core()
    monkeypatch.setattr(engine.core.scheduler, "reset_prefix_cache", lambda with_running: False)
    with pytest.raises(ServerError, match="blocks are in use though no request runs"):
        engine.core.lifecycle.pause_scheduler("keep")


# -- weights ---------------------------------------------------------------------------------------------------


def test_new_weights_while_requests_run() -> None:
    engine = Core(enable_prefix_caching=True)
    engine.add("a", 9, max_tokens=3)
    engine.step()
    lifecycle = engine.core.lifecycle
    assert lifecycle.get_weight_version() == "0"
    assert lifecycle.update_weights("/new") == "1" == lifecycle.get_weight_version()
    assert sent_to_workers(engine) == [("check_weights", "/new"), ("load_weights", "/new")]
    assert scheduled_next(engine) == {"a": 10}, "its KV was of the old weights"
    assert lifecycle.update_weights("/newer", "step 7") == "step 7" == lifecycle.get_weight_version()
    assert lifecycle.update_weights("/newest") == "step 7+1"
    assert lifecycle.update_weights("/newest") == "step 7+2"
    assert lifecycle.update_weights("/newest", "9") == "9"
    assert lifecycle.update_weights("/newest") == "10", "counted on, by a core that was started again, too"
    engine.run()
    assert engine.tokens("a") == [9, 10, 11]


def test_new_weights_wait_for_steps_in_flight() -> None:
    engine = Core(Held)
    engine.add("a", max_tokens=1)
    engine.step()
    engine.executor.release()
    engine.core.lifecycle.update_weights("/new")
    assert not engine.core.batch_queue
    engine.step()
    assert engine.tokens("a") == [4], "the old weights' token is not lost"


def test_pause_update_resume() -> None:
    engine = Core(enable_prefix_caching=True)
    engine.add("a", 9, max_tokens=3)
    engine.step()
    lifecycle = engine.core.lifecycle
    lifecycle.pause_scheduler("keep", clear_cache=False)
    lifecycle.update_weights("/new")
    assert lifecycle.is_scheduler_paused(), "the update does not end the pause"
    assert engine.step() is False
    lifecycle.resume_scheduler()
    assert scheduled_next(engine) == {"a": 10}


def test_a_checkpoint_that_does_not_fit_changes_nothing() -> None:
    engine = Core(enable_prefix_caching=True)
    engine.add("a", 9, max_tokens=3)
    engine.step()
    engine.executor.rpc_failures = [("check_weights", ModelLoadError("another shape"))]
    with pytest.raises(ModelLoadError, match="another shape"):
        engine.core.lifecycle.update_weights("/new")
    assert sent_to_workers(engine) == [("check_weights", "/new")]
    assert engine.core.lifecycle.get_weight_version() == "0"
    assert scheduled_next(engine) == {"a": 1}


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()])
def test_an_update_that_fails_half_way_reads_the_old_weights_again(error: BaseException) -> None:
    engine = Core()
    engine.executor.rpc_failures = [("load_weights", error)]
    with pytest.raises(type(error)):
        engine.core.lifecycle.update_weights("/new")
    assert sent_to_workers(engine)[1:] == [("load_weights", "/new"), "undo_weights", "load_weights"]
    assert not engine.core.lifecycle.is_sleeping()
    engine.add("a", max_tokens=1)
    engine.run()
    assert engine.tokens("a") == [4]


def test_without_any_weights_the_engine_sleeps_until_there_are_some() -> None:
    lifecycle = (engine := Core()).core.lifecycle
    failures = [("load_weights", OSError("the disk is gone"))] * 2
    engine.executor.rpc_failures = [*failures]
    engine.add("a", max_tokens=1)
    with pytest.raises(OSError, match="the disk is gone"):
        lifecycle.update_weights("/new")
    assert lifecycle.is_sleeping()
    assert engine.step() is False, "nothing runs on half-read weights"
    assert lifecycle.wake_up() is True
    engine.run()
    assert engine.tokens("a") == [4]


def test_weights_that_were_given_back_are_loaded_by_an_update() -> None:
    lifecycle = (engine := Core()).core.lifecycle
    lifecycle.sleep(2)
    engine.executor.rpc_failures = [("load_weights", OSError("the disk is gone"))]
    with pytest.raises(OSError, match="the disk is gone"):
        lifecycle.update_weights("/gone")
    lifecycle.update_weights("/new")
    assert lifecycle.is_sleeping()
    assert lifecycle.wake_up() is True
    loads = [call for call in sent_to_workers(engine) if call[0] != "check_weights"]
    failed = [("load_weights", "/gone"), "undo_weights"]
    assert loads == [("sleep", 2), *failed, ("load_weights", "/new"), ("wake_up", ["kv_cache"])]


# -- adapters --------------------------------------------------------------------------------------------------


def test_adapters_are_refused_in_words() -> None:
    core = Core().core
    for call in (
        lambda: core.adapters.add_lora(LoRARequest("a", 1, "/a")),
        lambda: core.adapters.remove_lora(1),
        lambda: core.adapters.pin_lora(1),
        lambda: core.adapters.list_loras(),
        lambda: core.adapters.register_loras([]),
        lambda: core.preprocess_add_request(
            msgspec.structs.replace(make_core_request("a"), lora_request=LoRARequest("a", 1, "/a"))
        ),
    ):
        with pytest.raises(ClientError, match="serves no LoRA adapters; start it with --enable-lora"):
            call()

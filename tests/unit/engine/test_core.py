"""The engine core with a scripted executor: start-up, steps, failures, interrupts and control calls."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.config.speculative import Drafting
from quire.engine.core import EngineCore
from quire.engine.executor.abstract import Executor
from quire.engine.request import Request
from quire.engine.sched.scheduler import Scheduler
from quire.errors import ServerError, ValidationError
from quire.pooling_params import PoolingParams
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.execution import DraftTokenIds, SchedulerOutput

from .driver import Core
from .harness import BLOCK_SIZE, ScriptedExecutor, make_config, make_core_request, make_request


@pytest.fixture(autouse=True)
def default_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    gc.unfreeze()


def press_ctrl_c(_: Any = None) -> None:
    signal.raise_signal(signal.SIGINT)


# -- start-up --------------------------------------------------------------------------------------------------


def test_a_core_starts_its_executor_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.core.gc", gc)
    called = []
    core = EngineCore(make_config(), ScriptedExecutor, True, executor_fail_callback=lambda: called.append(1))
    assert isinstance(core.executor, ScriptedExecutor)
    assert core.executor.calls == [
        "register_failure_callback",
        "get_kv_cache_specs",
        "determine_available_memory",
        "initialize_from_config",
    ]
    ready = core.ready_response
    assert (ready.max_model_len, ready.num_gpu_blocks, ready.block_size) == (200, 101, BLOCK_SIZE)
    assert (ready.kv_cache_size_tokens, ready.kv_cache_max_concurrency) == (400, 2.0)
    assert ready.supported_tasks == core.executor.get_supported_tasks() == ("generate",)
    assert core.step_fn == core.step
    assert core.block_hasher is None
    assert isinstance(core.scheduler, Scheduler)
    assert gc.get_freeze_count() > 0


def test_what_lives_at_start_up_is_thawed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.core.gc", gc)
    core = Core().core
    assert gc.get_freeze_count() > 0
    core.shutdown()
    core.shutdown()
    assert gc.get_freeze_count() == 0
    assert isinstance(core.executor, ScriptedExecutor)
    assert core.executor.calls[-2:] == ["shutdown", "shutdown"]


class OtherScheduler(Scheduler):
    """Anyone's."""


def test_the_scheduler_can_be_replaced() -> None:
    core = Core(scheduler_cls=f"{__name__}:OtherScheduler").core
    assert type(core.scheduler) is OtherScheduler


def test_prefix_caching_hashes_requests() -> None:
    engine = Core(enable_prefix_caching=True)
    request, wave = engine.core.preprocess_add_request(make_core_request("a", 9))
    assert (len(request.block_hashes), wave) == (2, 0)


# -- requests --------------------------------------------------------------------------------------------------


def test_ids_are_strings() -> None:
    engine = Core()
    origin = make_core_request("a")
    origin.request_id = 7  # type: ignore[assignment]
    with pytest.raises(TypeError, match="request_id must be a str, got int"):
        engine.core.add_request(Request(origin))
    assert not engine.core.scheduler.has_requests()


def test_tasks_the_model_does_not_do_are_refused() -> None:
    class Pooler(ScriptedExecutor):
        tasks = ("embed",)

    pooling = Request(EngineCoreRequest("a", [1], None, PoolingParams(task="embed"), 0.0))
    with pytest.raises(ValueError, match="task 'embed' is not supported by this model; it does: generate"):
        Core().core.add_request(pooling)
    pooler = Core(Pooler).core
    pooler.add_request(pooling)
    with pytest.raises(ValidationError, match="task 'generate'"):
        pooler.add_request(make_request("b"))


def test_a_request_that_is_refused_harms_no_other() -> None:
    engine = Core()
    engine.add("a", max_tokens=2)
    for request_id, prompt in (("a", 4), ("long", 200), ("empty", [])):
        with pytest.raises(ValidationError):
            engine.add(request_id, prompt)
    engine.run()
    assert engine.tokens("a") == [4, 5]
    assert list(engine.outputs) == ["a"]


def test_aborts_of_unknown_requests_are_ignored() -> None:
    engine = Core()
    engine.core.abort_requests(["nobody"])
    assert not engine.core.scheduler.has_requests()


# -- a step ----------------------------------------------------------------------------------------------------


def test_no_requests_no_step() -> None:
    engine = Core()
    assert engine.core.step() == ({}, False)
    assert "execute_model" not in engine.executor.calls


def test_a_step_runs_the_model_and_then_tells_the_worker_who_finished() -> None:
    engine = Core()
    engine.add("a", max_tokens=1)
    assert engine.step() is True
    assert engine.step() is False, "no token was computed"
    assert engine.step() is False
    assert engine.executor.calls[3:] == [
        "execute_model",
        "sample_tokens",
        "execute_model",
    ]


def test_a_result_without_sampling_is_taken_as_it_is() -> None:
    engine = Core()
    engine.executor.samples_apart = False
    engine.add("a", max_tokens=2)
    engine.run()
    assert engine.tokens("a") == [4, 5]
    assert "sample_tokens" not in engine.executor.calls


def test_the_order_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Core()
    engine.add("a", max_tokens=1)
    calls = engine.executor.calls
    scheduler = engine.core.scheduler
    for name in ("schedule", "get_grammar_bitmask", "finish_requests", "update_from_output"):
        method = getattr(scheduler, name)

        def noted(*args: Any, _name: str = name, _method: Any = method, **kwargs: Any) -> Any:
            calls.append(_name)
            return _method(*args, **kwargs)

        monkeypatch.setattr(scheduler, name, noted)
    engine.core.aborts_queue.put("nobody")
    del calls[:]
    engine.core.step()
    assert calls == [
        "schedule",
        "execute_model",
        "get_grammar_bitmask",
        "sample_tokens",
        "finish_requests",
        "update_from_output",
    ]


def test_what_is_aborted_while_the_model_runs_is_not_sent() -> None:
    engine = Core()
    for name in "abcd":
        engine.add(name, max_tokens=1)

    def abort(_: SchedulerOutput) -> None:
        engine.core.aborts_queue.put(["a", "nobody"])
        engine.core.aborts_queue.put("c")

    engine.executor.on_execute = abort
    engine.step()
    assert sorted(engine.outputs) == ["b", "d"]
    assert engine.core.aborts_queue.empty()


def test_drafts_are_taken_after_a_step_that_ran() -> None:
    engine = Core(drafting=Drafting(method="ngram", num_speculative_tokens=2))
    engine.add("a", max_tokens=9)
    engine.executor.drafts = DraftTokenIds(["a"], [[5, -1]])
    engine.step()
    scheduler = engine.core.scheduler
    assert isinstance(scheduler, Scheduler)
    assert scheduler.requests["a"].spec_token_ids == [5, -1]
    engine.step()
    assert engine.tokens("a") == [4, 5, 6]


def test_iterations_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = Core(log_iterations=True)
    engine.add("a", max_tokens=2)
    with caplog.at_level(logging.INFO, logger="quire"):
        engine.run()
    lines = [record.message for record in caplog.records if record.message.startswith("Iteration")]
    assert [line.split(", elapsed")[0] for line in lines] == [
        "Iteration(0): 1 context requests, 4 context tokens, 0 generation requests, 0 generation tokens",
        "Iteration(1): 0 context requests, 0 context tokens, 1 generation requests, 1 generation tokens",
        "Iteration(2): 0 context requests, 0 context tokens, 0 generation requests, 0 generation tokens",
    ]


# -- failures --------------------------------------------------------------------------------------------------


def test_a_failed_step_is_reported_and_its_requests_are_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = Core(enable_prefix_caching=True)
    engine.add("a", [111111, 222222, 333333, 444444, 555555], max_tokens=4)
    engine.step()
    engine.executor.failures = [ValueError("the device is on fire")]
    with caplog.at_level(logging.ERROR, logger="quire"), pytest.raises(ValueError, match="on fire"):
        engine.step()
    assert "the step that failed: 1 tokens of 1 requests" in caplog.text
    assert "111111" not in caplog.text
    engine.run()
    assert engine.tokens("a") == [5, 6, 7, 8]


def test_a_failure_leaves_no_wrong_prefix_behind() -> None:
    engine = Core(enable_prefix_caching=True)
    prompt = list(range(50, 70))
    engine.add("a", prompt)
    engine.executor.failures = [ValueError("nothing was computed")]
    with pytest.raises(ValueError, match="nothing was computed"):
        engine.step()
    engine.core.abort_requests(["a"])
    engine.add("b", prompt, max_tokens=1)
    engine.run()  # the worker compares every slot it reads
    assert engine.tokens("b") == [20]


def test_a_failure_in_sampling() -> None:
    engine = Core()
    engine.add("a", max_tokens=2)
    sample_tokens = engine.executor.sample_tokens

    def fail(*args: Any, **kwargs: Any) -> Any:
        engine.executor.sample_tokens = sample_tokens  # type: ignore[method-assign]
        raise RuntimeError("no dice")

    engine.executor.sample_tokens = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no dice"):
        engine.step()
    engine.run()
    assert engine.tokens("a") == [4, 5]


# -- interrupts ------------------------------------------------------------------------------------------------


def test_ctrl_c_during_a_step_takes_effect_after_it_and_loses_nothing() -> None:
    engine = Core()
    engine.add("a", max_tokens=3)
    engine.executor.on_execute = press_ctrl_c
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.executor.on_execute = lambda _: None
    engine.run()
    assert engine.tokens("a") == [4, 5, 6]


def test_a_second_ctrl_c_breaks_off_the_model_and_the_engine_stays_usable() -> None:
    engine = Core(enable_prefix_caching=True)
    engine.add("a", 9, max_tokens=3)
    engine.step()
    engine.add("b", 9, max_tokens=3)
    unreached = []

    def press_twice(_: SchedulerOutput) -> None:
        press_ctrl_c()
        press_ctrl_c()
        unreached.append(1)

    engine.executor.on_execute = press_twice
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert unreached == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.executor.on_execute = lambda _: None
    engine.core.abort_requests(["a"])
    engine.run()
    assert engine.tokens("a") == [9]
    assert engine.tokens("b") == [9, 10, 11]


@pytest.mark.parametrize(
    ("method", "call", "answered"),
    [
        ("add_request", lambda engine: engine.add("b", max_tokens=1), ["a", "b"]),
        ("finish_requests", lambda engine: engine.core.abort_requests(["a"]), []),
    ],
)
def test_ctrl_c_does_not_tear_other_calls_apart(
    method: str, call: Callable[[Core], None], answered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Core()
    engine.add("a", max_tokens=1)
    original = getattr(engine.core.scheduler, method)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        press_ctrl_c()
        return original(*args, **kwargs)

    monkeypatch.setattr(engine.core.scheduler, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(engine)
    monkeypatch.undo()
    engine.run()
    assert sorted(engine.outputs) == answered


# -- steps that overlap ----------------------------------------------------------------------------------------


class Held(ScriptedExecutor):
    """Two steps at once, resolved by hand."""

    max_batches = 2
    hold = True


def test_filling_the_queue_comes_first_and_results_come_in_order() -> None:
    engine = Core(Held, max_num_batched_tokens=16)
    assert engine.core.step_fn == engine.core.step_with_batch_queue
    engine.add("a", 16, max_tokens=2)
    engine.add("b", 16, max_tokens=1)
    assert engine.core.step_fn() == (None, True), "one in flight, one more fits"
    assert len(engine.core.batch_queue) == 1
    engine.executor.release()
    engine.step()  # b's step goes out before a's result is fetched
    assert engine.executor.calls[3:] == ["execute_model", "sample_tokens"] * 2
    assert (engine.tokens("a"), engine.tokens("b")) == ([16], [])
    assert len(engine.core.batch_queue) == 1
    engine.executor.release()
    engine.executor.hold = False
    engine.run()
    assert (engine.tokens("a"), engine.tokens("b")) == ([16, 17], [16])


def test_a_result_that_is_there_is_fetched_at_once() -> None:
    class Ready(ScriptedExecutor):
        max_batches = 3

    engine = Core(Ready)
    engine.add("a", max_tokens=2)
    engine.step()
    assert engine.tokens("a") == [4]
    engine.run()
    assert engine.tokens("a") == [4, 5]


def test_nothing_to_do_with_a_queue() -> None:
    engine = Core(Held)
    assert engine.core.step_fn() == (None, False)


def test_steps_without_tokens_are_not_sampled() -> None:
    engine = Core(Held)
    engine.executor.hold = False
    engine.add("a", max_tokens=1)
    engine.run()
    assert engine.executor.calls[3:] == ["execute_model", "sample_tokens", "execute_model"]


def test_pooling_models_do_not_sample() -> None:
    class Pooler(Held):
        tasks = ("embed",)
        hold = False
        samples_apart = False

    engine = Core(Pooler)
    engine.core.add_request(Request(EngineCoreRequest("a", [1, 2], None, PoolingParams(task="embed"), 0.0)))
    engine.step()
    assert "sample_tokens" not in engine.executor.calls


def test_a_failure_with_steps_in_flight_gives_all_of_them_up() -> None:
    engine = Core(Held, max_num_batched_tokens=16)
    engine.add("a", 16, max_tokens=2)
    engine.add("b", 16, max_tokens=2)
    assert engine.step() is True
    engine.executor.held[0][0].set_exception(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        engine.step()
    assert len(engine.core.batch_queue) == 0
    engine.executor.hold = False
    engine.executor.held.clear()
    engine.run()
    assert (engine.tokens("a"), engine.tokens("b")) == ([16, 17], [16, 17])


def test_a_result_that_is_neither_output_nor_error_is_an_error() -> None:
    engine = Core(Held)
    engine.add("a")
    engine.step()
    for future, _ in engine.executor.held:
        future.set_result(None)
    with pytest.raises(ServerError, match="neither an output nor an error"):
        engine.step()


class PendingGrammar(Scheduler):
    """A grammar whose second mask must wait for the first step."""

    num_steps = 0

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        self.num_steps += 1
        output.pending_structured_output_tokens = self.num_steps == 2
        return output


def test_a_step_whose_mask_must_wait_is_sampled_after_the_one_before() -> None:
    engine = Core(Held, max_num_batched_tokens=16, scheduler_cls=f"{__name__}:PendingGrammar")
    engine.add("a", 16, max_tokens=1)
    engine.add("b", 16, max_tokens=1)
    engine.step()
    engine.executor.release()
    sampled_when = len(engine.executor.calls)
    engine.step()
    assert engine.executor.calls[sampled_when:] == ["execute_model", "sample_tokens"]
    assert engine.tokens("a") == [16], "a's result was taken in between"
    engine.executor.release()
    engine.executor.hold = False
    engine.run()
    assert engine.tokens("b") == [16]


def test_an_executor_runs_one_step_at_a_time_unless_it_says_more() -> None:
    class Plain(ScriptedExecutor):
        max_concurrent_batches = Executor.max_concurrent_batches

    assert Core(Plain).core.step_fn.__name__ == "step"

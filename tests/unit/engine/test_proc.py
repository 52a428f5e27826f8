"""The loop of an engine core process, without sockets: what goes into its queues and what comes out."""

from __future__ import annotations

import gc
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.engine import LifecycleConfig
from quire.config.parallel import ParallelConfig
from quire.engine.heartbeat import UTILITY_S, HeartbeatWriter
from quire.engine.intake import ClientLink, RefusedRequest, UtilityCall
from quire.engine.proc import EngineCoreProc, EngineShutdownState, StopSignals
from quire.errors import ServerError
from quire.testing.failpoints import InjectedError, injected
from quire.wire.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from quire.wire.heartbeat import HeartbeatPage

from .harness import ScriptedExecutor, make_config, make_core_request

ADD, ABORT, UTILITY = EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.UTILITY
WAKEUP = EngineCoreRequestType.WAKEUP
DEADLINE_S = 120.0


class Gated(ScriptedExecutor):
    """Runs no step until the test lets it."""

    steps: threading.Semaphore

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        assert self.steps.acquire(timeout=DEADLINE_S)
        return super().execute_model(*args, **kwargs)


class Loop:
    """A core with its loop on a thread. What is put goes straight into its queues, as the input thread would."""

    def __init__(
        self,
        executor_class: type[ScriptedExecutor] = ScriptedExecutor,
        *,
        shutdown_timeout: float = 0.0,
        heartbeat: HeartbeatWriter | None = None,
        make: Callable[..., EngineCoreProc] = EngineCoreProc,
        parallel: ParallelConfig | None = None,
        **config: Any,
    ) -> None:
        parts: dict[str, Any] = {"lifecycle_config": LifecycleConfig(shutdown_timeout=shutdown_timeout)}
        if parallel is not None:
            parts["parallel_config"] = parallel
        engine_config = replace(make_config(**config), **parts)
        self.core = make(engine_config, executor_class, False, heartbeat=heartbeat)
        assert isinstance(self.core.executor, ScriptedExecutor)
        self.executor = self.core.executor
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.error: Exception | None = None
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.clients: dict[str, set[int]] = {}
        self.answers: dict[int, UtilityOutput] = {}
        self.links: list[ClientLink] = []

    def _run(self) -> None:
        try:
            self.core.run_busy_loop()
        except Exception as e:
            self.error = e

    def start(self) -> Loop:
        self.thread.start()
        return self

    def add(self, request_id: str, prompt: Any = 4, **fields: Any) -> None:
        self.core.input_queue.put(
            (ADD, self.core.preprocess_add_request(make_core_request(request_id, prompt, **fields)))
        )

    def abort(self, *request_ids: str) -> None:
        self.core.aborts_queue.put(list(request_ids))
        self.core.input_queue.put((ABORT, list(request_ids)))

    def call(self, call_id: int, method: str, *args: Any, client_index: int = 0) -> None:
        self.core.input_queue.put((UTILITY, UtilityCall(client_index, call_id, method, args)))

    def receive(self) -> None:
        """Take in one item of the output queue."""
        try:
            item = self.core.output_queue.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise AssertionError("the loop says nothing") from None
        if isinstance(item, ClientLink):
            self.links.append(item)
            return
        assert isinstance(item, tuple)
        client_index, batch = item
        for output in batch.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
            self.clients.setdefault(output.request_id, set()).add(client_index)
        if batch.utility_output is not None:
            self.answers[batch.utility_output.call_id] = batch.utility_output

    def wait_for(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self.receive()

    def finish_reason(self, request_id: str) -> FinishReason | None:
        ends = [o.finish_reason for o in self.outputs.get(request_id, []) if o.finish_reason is not None]
        assert len(ends) <= 1
        return ends[0] if ends else None

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.new_token_ids]

    def wait_finished(self, *request_ids: str) -> None:
        self.wait_for(lambda: all(self.finish_reason(i) is not None for i in request_ids))

    def wait_end(self) -> None:
        """The loop has returned, and everything it put out is taken in."""
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        while not self.core.output_queue.empty():
            self.receive()


@pytest.fixture
def loops(gate: threading.Semaphore) -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(*args: Any, **config: Any) -> Loop:
        made.append(Loop(*args, **config))
        return made[-1]

    yield make
    for loop in made:
        if loop.thread.is_alive():
            if isinstance(loop.executor, Gated):
                loop.executor.steps.release(10_000)
            loop.core.request_shutdown(now=True)
            loop.thread.join(DEADLINE_S)
            assert not loop.thread.is_alive()
        loop.core.shutdown()
    gc.unfreeze()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Lets steps of a Gated executor through."""
    semaphore = threading.Semaphore(0)
    monkeypatch.setattr(Gated, "steps", semaphore, raising=False)
    return semaphore


# -- requests --------------------------------------------------------------------------------------------------


def test_requests_are_served_and_outputs_grouped_by_client(loops: Callable[..., Loop]) -> None:
    loop = loops().start()
    loop.add("a", max_tokens=3)
    loop.add("b", max_tokens=5, client_index=1)
    loop.wait_finished("a", "b")
    assert (loop.tokens("a"), loop.tokens("b")) == ([4, 5, 6], [4, 5, 6, 7, 8])
    assert loop.clients == {"a": {0}, "b": {1}}
    assert loop.finish_reason("a") is FinishReason.LENGTH


def test_an_idle_loop_goes_on(loops: Callable[..., Loop]) -> None:
    loop = loops().start()
    for name in ("a", "b"):
        loop.add(name, max_tokens=1)
        loop.wait_finished(name)
    loop.call(1, "is_sleeping")  # answered between steps: the one that the last output came from is over
    loop.wait_for(lambda: 1 in loop.answers)
    assert loop.core.is_running
    assert not loop.core.has_work()


def test_a_request_that_cannot_be_accepted_fails_alone(loops: Callable[..., Loop]) -> None:
    loop = loops().start()
    loop.add("long", 200)
    loop.core.input_queue.put((ADD, RefusedRequest(1, "odd", "it has no parameters")))
    loop.add("good", max_tokens=2)
    loop.wait_finished("long", "odd", "good")
    assert loop.finish_reason("long") is loop.finish_reason("odd") is FinishReason.ERROR
    assert "has 200 tokens" in (loop.outputs["long"][-1].error_message or "")
    assert loop.outputs["odd"][-1].error_message == "it has no parameters"
    assert loop.clients["odd"] == {1}
    assert loop.finish_reason("good") is FinishReason.LENGTH


def test_a_request_that_breaks_the_scheduler_fails_alone(
    loops: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loops()
    add_request = loop.core.scheduler.add_request

    def add_half(request: Any) -> None:
        add_request(request)
        if request.request_id == "bad":
            raise ZeroDivisionError("surprise")

    monkeypatch.setattr(loop.core.scheduler, "add_request", add_half)
    loop.start()
    loop.add("bad")
    loop.add("good", max_tokens=2)
    loop.wait_finished("bad", "good")
    assert loop.outputs["bad"][-1].error_message == "ZeroDivisionError: surprise"
    assert loop.finish_reason("good") is FinishReason.LENGTH
    assert loop.core.scheduler.get_request_counts() == (0, 0)


def test_a_replay_does_not_touch_the_request_that_lives(loops: Callable[..., Loop], gate: threading.Semaphore) -> None:
    loop = loops(Gated).start()
    loop.add("a", max_tokens=2)
    loop.add("a", max_tokens=2)
    loop.core.input_queue.put((ADD, RefusedRequest(0, "a", "corrupt")))
    gate.release(1000)
    loop.wait_finished("a")
    assert (loop.tokens("a"), loop.finish_reason("a")) == ([4, 5], FinishReason.LENGTH)
    assert loop.core.get_dropped_messages() == {"replayed": 2}


# -- aborts ----------------------------------------------------------------------------------------------------


def test_an_abort_is_heard_while_a_step_runs(loops: Callable[..., Loop], gate: threading.Semaphore) -> None:
    """Its token must not be sent any more: the client may have reused what it knew of the request."""
    loop = loops(Gated).start()
    loop.add("a")
    loop.add("b", max_tokens=5)
    gate.release()
    loop.wait_for(lambda: loop.tokens("b"))
    loop.executor.on_execute = lambda output: loop.core.aborts_queue.put(["a"])
    seen = len(loop.tokens("a"))
    gate.release(1000)
    loop.wait_finished("b")
    assert len(loop.tokens("a")) == seen
    assert loop.finish_reason("a") is None, "its client knows"


def test_an_abort_does_not_reach_a_later_request_of_that_id(
    loops: Callable[..., Loop], gate: threading.Semaphore
) -> None:
    loop = loops(Gated)
    loop.add("a")
    loop.abort("a")
    loop.add("a", max_tokens=2)
    gate.release(1000)
    loop.start()
    loop.wait_finished("a")
    assert loop.tokens("a") == [4, 5]


def test_aborting_what_is_not_there_is_nothing(loops: Callable[..., Loop]) -> None:
    loop = loops().start()
    loop.abort("never", "heard", "of")
    loop.add("a", max_tokens=1)
    loop.wait_finished("a")
    loop.abort("a")
    loop.abort("a")
    loop.add("b", max_tokens=1)
    loop.wait_finished("b")


def test_a_lost_client_takes_its_requests_with_it(loops: Callable[..., Loop], gate: threading.Semaphore) -> None:
    loop = loops(Gated).start()
    loop.add("a", client_index=1)
    loop.add("b", client_index=1, prompt=150)
    loop.add("c", max_tokens=3)
    gate.release(3)
    loop.wait_for(lambda: loop.tokens("c"))
    loop.core.input_queue.put((WAKEUP, ClientLink(1, is_up=False)))
    gate.release(1000)
    loop.wait_finished("c")
    assert loop.links == [ClientLink(1, is_up=False)]
    assert loop.core.scheduler.get_request_counts() == (0, 0)
    loop.core.input_queue.put((WAKEUP, ClientLink(1, is_up=True)))
    loop.add("d", client_index=1, max_tokens=1)
    loop.wait_finished("d")
    assert loop.links[1:] == [ClientLink(1, is_up=True)]


# -- control calls ---------------------------------------------------------------------------------------------


def test_control_calls_are_answered(loops: Callable[..., Loop]) -> None:
    loop = loops().start()
    loop.call(1, "get_supported_tasks")
    loop.call(2, "get_supported_task")
    loop.call(3, "profile", "no switch")
    loop.call(4, "shutdown")
    loop.call(5, "get_dropped_messages", client_index=3)
    loop.wait_for(lambda: 5 in loop.answers)
    assert loop.answers[1].result == ("generate",)
    assert "no control verb 'get_supported_task'; did you mean" in (loop.answers[2].failure_message or "")
    assert "Expected `bool`, got `str`" in (loop.answers[3].failure_message or "")
    assert "no control verb 'shutdown'" in (loop.answers[4].failure_message or "")
    assert loop.answers[5].result == {}
    assert loop.core.is_running


def test_a_pause_is_answered_once_nothing_runs(loops: Callable[..., Loop], gate: threading.Semaphore) -> None:
    loop = loops(Gated).start()
    loop.add("a", max_tokens=3)
    gate.release()
    loop.wait_for(lambda: loop.tokens("a"))
    loop.call(1, "pause_scheduler", "wait")
    loop.call(2, "is_scheduler_paused")
    gate.release()
    loop.wait_for(lambda: 2 in loop.answers)
    assert loop.answers[2].result is True
    assert 1 not in loop.answers
    gate.release(1000)
    loop.wait_for(lambda: 1 in loop.answers)
    assert loop.finish_reason("a") is FinishReason.LENGTH


def test_a_control_call_may_take_its_time(loops: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights is no hang: the page shows the expected duration."""
    heartbeat = HeartbeatWriter()
    expected: list[float] = []
    monkeypatch.setattr(heartbeat, "input", lambda expected_s=0.0: expected.append(expected_s))
    loop = loops()
    monkeypatch.setattr(loop.core, "heartbeat", heartbeat)
    loop.start()
    loop.add("a", max_tokens=1)
    loop.wait_finished("a")
    loop.call(1, "is_sleeping")
    loop.wait_for(lambda: 1 in loop.answers)
    assert expected == [0.0, UTILITY_S]


def test_an_idle_core_says_so_every_second(loops: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.proc.IDLE_STAMP_INTERVAL_S", 0.001)
    stamped = threading.Semaphore(0)
    loop = loops()
    monkeypatch.setattr(loop.core.heartbeat, "idle", stamped.release)
    loop.start()
    for _ in range(3):
        assert stamped.acquire(timeout=DEADLINE_S)


def test_the_first_step_is_expected_to_take_no_longer_than_its_tokens_one_by_one(
    loops: Callable[..., Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core that is watched tries a step of one token before it serves; else a hang in the first could go unseen."""
    now = [100.0]

    class Slow(ScriptedExecutor):
        def execute_dummy_batch(self) -> None:
            super().execute_dummy_batch()
            now[0] += 0.01

    monkeypatch.setattr("quire.engine.heartbeat.time", SimpleNamespace(monotonic=lambda: now[0]))
    page = HeartbeatPage.create(tmp_path / "page")
    expected: list[float] = []
    loop = loops(Slow, heartbeat=HeartbeatWriter(page))
    loop.executor.on_execute = lambda output: expected.append(page.get_heartbeat().expected_s)
    loop.add("a", 64, max_tokens=1)
    loop.start()
    loop.wait_finished("a")
    assert loop.executor.calls.count("execute_dummy_batch") == 1
    assert 64 * 0.01 <= expected[0] <= 2 * 64 * 0.01
    assert "execute_dummy_batch" not in loops().executor.calls, "nobody watches"


# -- failures --------------------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_the_loop(loops: Callable[..., Loop]) -> None:
    loop = loops()
    loop.executor.failures.append(RuntimeError("the worker is lost"))
    loop.add("a")
    loop.start().wait_end()
    assert str(loop.error) == "the worker is lost"


def test_a_lost_executor_ends_the_loop(loops: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: list[Callable[[], None]] = []
    monkeypatch.setattr(
        ScriptedExecutor, "register_failure_callback", lambda self, callback: callbacks.append(callback)
    )
    loop = loops().start()
    callbacks[0]()
    loop.wait_end()
    assert isinstance(loop.error, ServerError)
    assert str(loop.error) == "Executor failed."


@pytest.mark.parametrize("name", ["core.loop.input", "core.step.schedule", "core.step.execute", "core.step.update"])
def test_a_fault_anywhere_in_the_loop_ends_it(loops: Callable[..., Loop], name: str) -> None:
    def fail(where: str, key: str) -> None:
        raise InjectedError(where)

    loop = loops()
    with injected(name, fail):
        loop.add("a")
        loop.start().wait_end()
    assert isinstance(loop.error, InjectedError)


def test_a_loop_that_waits_for_something_outside_rests(
    loops: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    loop = loops()
    loop.add("a", max_tokens=2)
    steps = iter([({}, False), ({}, False)])
    step = loop.core.step_fn
    loop.core.step_fn = lambda: next(steps, None) or step()
    monkeypatch.setattr("quire.engine.proc.time", SimpleNamespace(sleep=rests.append, monotonic=lambda: 0.0))
    loop.start()
    loop.wait_finished("a")
    assert rests == [0.001, 0.001]


@pytest.mark.parametrize(("step_s", "expected"), [(0.01, [0.0001]), (0.001, [])])
def test_a_first_token_leaves_before_the_next_step(
    loops: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, step_s: float, expected: list[float]
) -> None:
    """Once for each request, and only where a step takes so long that the rest is little beside it."""
    rests: list[float] = []
    moments = count(0.0, step_s)
    loop = loops()
    loop.add("a", max_tokens=4)
    monkeypatch.setattr("quire.engine.proc.time", SimpleNamespace(sleep=rests.append, monotonic=lambda: next(moments)))
    loop.start()
    loop.wait_finished("a")
    assert rests == expected


# -- the way out -----------------------------------------------------------------------------------------------


def test_without_a_timeout_everything_is_aborted(loops: Callable[..., Loop], gate: threading.Semaphore) -> None:
    loop = loops(Gated, max_num_seqs=2).start()
    for name in ("a", "b", "waiting"):
        loop.add(name, client_index=int(name == "b"))
    gate.release()
    loop.wait_for(lambda: loop.tokens("a") and loop.tokens("b"))
    loop.core.request_shutdown()
    gate.release(1000)
    loop.wait_end()
    for name in ("a", "b", "waiting"):
        assert loop.finish_reason(name) is FinishReason.ABORT
        assert loop.outputs[name][-1].error_message == "the engine is shutting down"
    assert loop.clients == {"a": {0}, "b": {1}, "waiting": {0}}
    assert loop.error is None
    assert loop.core.shutdown_state is EngineShutdownState.SHUTTING_DOWN
    assert not loop.executor.worker.tokens, "the worker was told"


def test_with_a_timeout_what_runs_may_finish(loops: Callable[..., Loop], gate: threading.Semaphore) -> None:
    loop = loops(Gated, shutdown_timeout=1000.0).start()
    loop.add("a", max_tokens=4)
    gate.release()
    loop.wait_for(lambda: loop.tokens("a"))
    loop.core.request_shutdown()
    loop.add("late")
    loop.call(1, "is_sleeping")
    gate.release(1000)
    loop.wait_end()
    assert loop.tokens("a") == [4, 5, 6, 7]
    assert loop.finish_reason("a") is FinishReason.LENGTH
    assert loop.finish_reason("late") is FinishReason.ABORT
    assert loop.answers[1].failure_message == "Server shutting down"


@pytest.mark.parametrize("how", ["twice", "now"])
def test_asked_twice_it_does_not_wait(loops: Callable[..., Loop], gate: threading.Semaphore, how: str) -> None:
    loop = loops(Gated, shutdown_timeout=1000.0).start()
    loop.add("a", max_tokens=100)
    gate.release()
    loop.wait_for(lambda: loop.tokens("a"))
    loop.core.request_shutdown(now=how == "now")
    if how == "twice":
        gate.release()
        loop.wait_for(lambda: len(loop.tokens("a")) > 1)
        loop.core.request_shutdown()
    gate.release(2)
    loop.wait_end()
    assert loop.finish_reason("a") is FinishReason.ABORT
    assert len(loop.tokens("a")) <= 4


def test_when_the_time_is_up_the_rest_is_aborted(
    loops: Callable[..., Loop], gate: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    loop = loops(Gated, shutdown_timeout=30.0)
    loop.add("a", max_tokens=1000)
    loop.start()
    gate.release()
    loop.wait_for(lambda: loop.tokens("a"))
    monkeypatch.setattr("quire.engine.proc.time", SimpleNamespace(monotonic=lambda: now[0]))
    loop.core.request_shutdown()
    gate.release(5)
    loop.wait_for(lambda: len(loop.tokens("a")) == 6)
    assert loop.finish_reason("a") is None
    now[0] = 131.0
    gate.release(1000)
    loop.wait_end()
    assert loop.finish_reason("a") is FinishReason.ABORT


def test_a_paused_core_ends_too(loops: Callable[..., Loop]) -> None:
    loop = loops(shutdown_timeout=1000.0).start()
    loop.call(1, "pause_scheduler", "keep")
    loop.wait_for(lambda: 1 in loop.answers)
    loop.add("a")
    loop.core.request_shutdown()
    loop.wait_end()
    assert loop.finish_reason("a") is FinishReason.ABORT


def test_signals_ask_the_core_once_there_is_one() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    signals = StopSignals()
    try:
        signals.install()
        with pytest.raises(SystemExit, match="stopped by SIGTERM while it was starting"):
            signal.raise_signal(signal.SIGTERM)
        asked: list[int] = []

        class Core:
            is_running = True

            def request_shutdown(self) -> None:
                asked.append(1)

        signals.core = Core()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert asked == [1, 1]
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_a_signal_handler_may_interrupt_the_queue(loops: Callable[..., Loop]) -> None:
    """`request_shutdown` runs inside whatever the main thread does: also inside a `get` or `put` of that queue."""
    loop = loops()
    handler = signal.signal(signal.SIGUSR1, lambda *_: loop.core.request_shutdown())
    try:
        main = threading.main_thread().ident or 0
        timer = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGUSR1))
        timer.start()
        loop.core.run_busy_loop()  # on this thread: it waits in its queue
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert loop.core.shutdown_state is EngineShutdownState.SHUTTING_DOWN


def test_every_output_is_of_one_step(loops: Callable[..., Loop]) -> None:
    loop = loops().start()
    loop.add("a", max_tokens=2)
    item = loop.core.output_queue.get(timeout=DEADLINE_S)
    assert isinstance(item, tuple)
    assert isinstance(item[1], EngineCoreOutputs)
    assert item[1].timestamp > 0

"""An engine core in this process: calls instead of messages.

`InprocClient` runs a step whenever output is asked for. `AsyncInprocClient` has one thread own the core, so that an
event loop never waits for a step. For notebooks, debuggers and tests: no second process, no sockets, and a breakpoint
in the scheduler works.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from quire.config.engine import EngineConfig
from quire.errors import EngineDeadError, error_name
from quire.frontend.client.base import AsyncEngineCoreClient, EngineCoreClient
from quire.frontend.client.mailbox import LoopMailbox
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
)

logger = init_logger(__name__)

ENGINE_CORE = "quire.engine.core:EngineCore"
RUN_UTILITY = "quire.engine.lifecycle:run_utility"


NEWS_INTERVAL_S = 0.5
"""Longest wait for another thread at once: pinned adapters are loaded some time after they were registered."""


class InprocClient(EngineCoreClient):
    """Builds the core and drives it. Its composition is by dotted name: the frontend does not import the engine."""

    def __init__(self, config: EngineConfig, *, log_stats: bool, wake: Callable[[], None] | None = None) -> None:
        """`wake` is called on any thread when a core that `has_work` found idle may have work; None: `get_output` waits
        for that itself."""
        executor_class = resolve(config.parallel_config.executor_class)
        self._news = threading.Event()
        self._can_wait = wake is None
        wake = wake or self._news.set
        self.engine_core = resolve(ENGINE_CORE)(config, executor_class, log_stats, wake=wake)
        self.ready_response = self.engine_core.ready_response
        self._run_utility = resolve(RUN_UTILITY)

    def get_output(self) -> EngineCoreOutputs:
        self._await_news(self.engine_core.is_blocked)
        outputs, model_executed = self.engine_core.step_fn()
        self.engine_core.post_step(model_executed)
        return (outputs or {}).get(0) or EngineCoreOutputs()

    def has_work(self) -> bool:
        """Returns True if `get_output` would run a step, or has outputs to give."""
        return bool(self.engine_core.has_work()) and not self.engine_core.is_blocked()

    def take_news(self) -> None:
        """Takes in what `wake` has announced."""
        self.engine_core.take_news()

    def _await_news(self, is_waiting: Callable[[], bool]) -> None:
        """Waits as long as `is_waiting`: another thread compiles a grammar or loads an adapter meanwhile."""
        while self._can_wait and is_waiting():
            self._news.wait(NEWS_INTERVAL_S)
            self._news.clear()
            self.engine_core.take_news()

    def add_request(self, request: EngineCoreRequest) -> None:
        core_request, wave = self.engine_core.preprocess_add_request(request)
        self.engine_core.add_request(core_request, wave)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.engine_core.abort_requests(request_ids)

    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a verb of the core. `collective_rpc` takes functions, too: they cross no process."""
        if method == "collective_rpc" and callable(args[0]):
            return list(self.engine_core.executor.collective_rpc(*args))
        result = self._run_utility(self.engine_core, method, args)
        if self._can_wait and isinstance(result, Future):
            self._await_news(lambda: not result.done())
            return result.result()
        return result

    def shutdown(self) -> None:
        self.engine_core.shutdown()


MAX_UNTAKEN_STEPS = 8
"""The core waits when the loop is this many steps behind."""
SHUTDOWN_TIMEOUT_S = 30.0
"""Longest wait of a shutdown for the step in progress."""

_Command = Callable[[InprocClient | None], None]
"""Called on the core's thread with the core; None: the core is gone."""


class AsyncInprocClient(AsyncEngineCoreClient):
    """Builds the core on a thread of its own and drives it there. Raises what the core's start-up raises.

    A step that fails ends the core: there is no other process to start again.
    """

    def __init__(self, config: EngineConfig, *, log_stats: bool) -> None:
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        """Commands for the core's thread; None ends it."""
        self._outputs = LoopMailbox(MAX_UNTAKEN_STEPS, lambda: self._commands.put(_wake_up))
        self._dead_error: EngineDeadError | None = None
        self._end = threading.Lock()
        """Held while a command is put in and while the thread ends, so that no command is lost."""
        self._abort_early: Callable[[list[str]], None] = lambda request_ids: None
        started: Future[EngineCoreReadyResponse] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(config, log_stats, started), name="quire-engine-core", daemon=True
        )
        self._thread.start()
        self.ready_response = started.result()

    @property
    def engine_dead(self) -> bool:
        return self._dead_error is not None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._post(lambda core: self._add(core, request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.engine_dead:
            self._abort_early(request_ids)  # while a step is running, before its outputs are made
            self._post(lambda core: core.abort_requests(request_ids) if core is not None else None)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.take()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return await self._call(lambda core: core.call_utility(method, *args))

    def shutdown(self) -> None:
        with self._end:
            self._dead_error = self._dead_error or EngineDeadError("the engine was shut down")
            self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(SHUTDOWN_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("a step has been running for %s s; its thread is left alone", SHUTDOWN_TIMEOUT_S)

    # -- to the core's thread -----------------------------------------------------------------------------------------

    def _post(self, command: _Command) -> None:
        with self._end:
            if self._dead_error is not None:
                raise self._dead_error
            self._commands.put(command)

    async def _call(self, function: Callable[[InprocClient], Any]) -> Any:
        answer: Future[Any] = Future()
        self._post(lambda core: _answer(answer, lambda: function(self._require(core))))
        return await asyncio.wrap_future(answer)

    def _require(self, core: InprocClient | None) -> InprocClient:
        if core is None:
            assert self._dead_error is not None
            raise self._dead_error
        return core

    # -- on the core's thread -----------------------------------------------------------------------------------------

    def _run(self, config: EngineConfig, log_stats: bool, started: Future[EngineCoreReadyResponse]) -> None:
        try:
            core = InprocClient(config, log_stats=log_stats, wake=lambda: self._commands.put(_wake_up))
        except BaseException as e:
            started.set_exception(e)
            return
        self._abort_early = core.engine_core.aborts_queue.put
        core.engine_core.lifecycle.can_wait = True
        started.set_result(core.ready_response)
        try:
            while self._run_commands(core):
                outputs = core.get_output()
                if outputs.outputs or outputs.scheduler_stats is not None:
                    self._outputs.put_outputs(outputs)
        except Exception as e:
            logger.exception("a step of the engine core failed; the engine is dead")
            error = EngineDeadError(f"a step of the engine core failed: {type(e).__name__}: {e}")
            error.__cause__ = e
            with self._end:
                self._dead_error = error
        finally:
            core.shutdown()
            assert self._dead_error is not None
            self._outputs.put_end(self._dead_error)
            self._refuse_commands()

    def _run_commands(self, core: InprocClient) -> bool:
        """Runs the commands that have come; waits while there is no step to run or the mailbox is full. Returns False
        at the end."""
        while True:
            try:
                if not core.has_work():
                    core.engine_core.lifecycle.notify_idle()
                may_wait = self._outputs.is_full or not core.has_work()
                command = self._commands.get(block=may_wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(core)

    def _refuse_commands(self) -> None:
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if command is not None:
                command(None)

    def _add(self, core: InprocClient | None, request: EngineCoreRequest) -> None:
        if core is None:
            return
        try:
            core.add_request(request)
        except Exception as e:  # whatever is wrong with one request costs no other
            refusal = EngineCoreOutput(
                request.request_id, [], finish_reason=FinishReason.ERROR, error_message=str(e), error_type=error_name(e)
            )
            self._outputs.put_outputs(EngineCoreOutputs(outputs=[refusal]))


def _wake_up(core: InprocClient | None) -> None:
    """A command that wakes the thread."""
    if core is not None:
        core.take_news()


def _answer(answer: Future[Any], call: Callable[[], Any]) -> None:
    """Sets the result of `call`; if that is a Future, when it ends."""
    if not answer.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except Exception as e:
        answer.set_exception(e)
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda later: _pass_on(later, answer))
    else:
        answer.set_result(result)


def _pass_on(later: Future[Any], answer: Future[Any]) -> None:
    error = later.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(later.result())

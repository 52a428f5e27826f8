"""The engine core as a process: `python -m quire.engine.proc`, started by a frontend and serving one or several.

Three queues keep sockets out of the loop: the input thread fills `input_queue` and `aborts_queue`, the loop fills
`output_queue`, and the output thread empties it. Only the loop's thread uses the scheduler.

A core is crash-only: an error in its loop ends the process, quickly, with exit code 1 and ENGINE_CORE_DEAD as its last
message. Asked to stop, it ends every request with an output and exits with 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.config.server import decode_config
from quire.engine.core import EngineCore
from quire.engine.executor.abstract import Executor
from quire.engine.heartbeat import UTILITY_S, HeartbeatWriter
from quire.engine.intake import ClientLink, DropCounter, InputItem, MessageIntake, RefusedRequest, UtilityCall
from quire.engine.io_threads import InputThread, IOThread, OutputItem, OutputThread
from quire.engine.lifecycle import answer_utility
from quire.engine.request import Request, RequestStatus
from quire.engine.startup import (
    CoreHandshake,
    LaunchOptions,
    Preload,
    choose_core_class,
    parse_command_line,
    read_curve_keys,
)
from quire.engine.tracing import of_incarnation
from quire.errors import QuireError, ServerError, ValidationError, error_name
from quire.failpoints import arm_failpoints, failpoint
from quire.logger import init_logger
from quire.resolve import resolve
from quire.timeline import get_stamps, stamp
from quire.wire.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from quire.wire.handshake import ENGINE_CORE_DEAD, EngineHandshakeMetadata, EngineZmqAddresses
from quire.wire.heartbeat import IDLE_STAMP_INTERVAL_S, HeartbeatPage
from quire.wire.process import die_with_parent, leave_terminal, peak_memory_bytes, set_process_title
from quire.wire.sockets import CurveKeys

logger = init_logger("quire.engine.proc")  # as a process this module is __main__

LAUNCHER_PIPE = 0
"""Standard input: a pipe that carries nothing (except keys, for TCP). Its end means that the launcher has ended."""
THREAD_END_S = 5.0
"""Seconds to wait for a thread at the end."""
END_S = 15.0
"""Seconds until the process is ended wherever it is."""
YIELD_S = 0.001
"""Seconds to rest after a step in which no model ran, so that other threads can proceed."""
FIRST_TOKEN_REST_S = 0.0001
"""Seconds to rest after a step that made a first token: the kernels of the next step would take every processor for a
millisecond from the threads that deliver the token."""
LONG_STEP_S = 0.002
"""Steps shorter than this are followed by no such rest: it would take too large a share of the time."""
SHUTTING_DOWN = "the engine is shutting down"


def _have_first(batches: Iterable[EngineCoreOutputs]) -> bool:
    """Returns whether there is a first token among the outputs."""
    return any(output.prefill_stats is not None for batch in batches for output in batch.outputs)


class EngineShutdownState(IntEnum):
    """Stages of a core's shutdown."""

    RUNNING = 0
    REQUESTED = 1
    SHUTTING_DOWN = 2
    """Nothing new is accepted; running requests may finish within the timeout."""


class EngineCoreProc(EngineCore):
    """An EngineCore with queues as inputs and outputs, and a loop that serves them.

    All methods belong to the loop's thread, except `request_shutdown` (a signal handler, any thread) and those that
    `EngineCore` lists. `open` starts the threads, `run_busy_loop` returns when a shutdown is complete, and `close` ends
    the threads after everything is sent.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor],
        log_stats: bool,
        *,
        include_finished_set: bool = False,
        heartbeat: HeartbeatWriter | None = None,
    ) -> None:
        self.input_queue: queue.SimpleQueue[InputItem] = queue.SimpleQueue()
        self.output_queue: queue.SimpleQueue[OutputItem] = queue.SimpleQueue()
        self.dropped = DropCounter()
        self.shutdown_state = EngineShutdownState.RUNNING
        self._drain_s = config.lifecycle_config.shutdown_timeout
        self._drain_end = 0.0
        """Time at which running requests are aborted; CLOCK_MONOTONIC."""
        self._hang_s = config.lifecycle_config.core_hang_timeout_s
        self._threads: tuple[IOThread, ...] = ()
        self._ends_now = False
        super().__init__(
            config,
            executor_class,
            log_stats,
            executor_fail_callback=partial(self.report_failure, "Executor failed."),
            include_finished_set=include_finished_set,
            heartbeat=heartbeat,
            wake=self.wake,
        )
        self.lifecycle.can_wait = True
        self.heartbeat.calibrate(self.executor.execute_dummy_batch)

    # -- the loop ----------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True until a shutdown is requested."""
        return self.shutdown_state is EngineShutdownState.RUNNING

    def run_busy_loop(self) -> None:
        """Serves until a shutdown is complete. Raises what a step raises: the core cannot continue then."""
        while self._handle_shutdown():
            self._check_threads()
            self._process_input_queue()
            self._process_engine_step()

    def _process_input_queue(self) -> None:
        """Waits for work, then takes in everything that is queued."""
        while self.is_running and (not self.has_work() or self.is_blocked()):
            if not self.has_work():
                self.lifecycle.notify_idle()
            self._check_threads()
            self.heartbeat.idle()
            try:
                item = self.input_queue.get(timeout=IDLE_STAMP_INTERVAL_S)
            except queue.Empty:
                self.take_news()
                continue
            self._handle_client_request(*item)
        while True:
            try:
                item = self.input_queue.get_nowait()
            except queue.Empty:
                return
            self._handle_client_request(*item)

    def _check_threads(self) -> None:
        """Raises ServerError if a thread makes no progress. The supervisor watches this loop, and this loop its
        threads."""
        for thread in self._threads:
            thread.check_progress(self._hang_s)

    def _process_engine_step(self) -> bool:
        """Runs a step. Returns whether a model ran."""
        start = time.monotonic()
        outputs, model_executed = self.step_fn()
        for item in (outputs or {}).items():
            self.output_queue.put(item)
        failpoint("core.output.queued")
        if outputs and time.monotonic() - start > LONG_STEP_S and _have_first(outputs.values()):
            time.sleep(FIRST_TOKEN_REST_S)
        self.post_step(model_executed)
        if not model_executed and self.scheduler.has_requests():
            time.sleep(YIELD_S)
        return model_executed

    # -- input -------------------------------------------------------------------------------------------------

    def _handle_client_request(self, request_type: EngineCoreRequestType, data: Any) -> None:
        failpoint("core.loop.input")
        match request_type:
            case EngineCoreRequestType.WAKEUP:
                if data is not None:
                    self._follow_link(data)
                else:
                    self.take_news()
            case EngineCoreRequestType.ADD:
                self.heartbeat.input()
                self._handle_add(data)
            case EngineCoreRequestType.ABORT:
                self._process_aborts_queue()  # a later request of that id would be aborted by ids left there
                self.abort_requests(data)
            case EngineCoreRequestType.UTILITY:
                self.heartbeat.input(UTILITY_S)
                self._handle_utility(data)
            case EngineCoreRequestType.EXECUTOR_FAILED:
                raise ServerError(data)
            case _:
                self.dropped.drop("unknown type", request_type)

    def _handle_add(self, data: tuple[Request, int] | RefusedRequest) -> None:
        if isinstance(data, RefusedRequest):
            self._refuse(*data)
            return
        request, wave = data
        if not self.is_running:
            self.adapters.unbind(request.adapter)
            self._send_end(request.origin.client_index, [request.request_id], FinishReason.ABORT, SHUTTING_DOWN)
            return
        try:
            self.add_request(request, wave)
        except ValidationError as e:
            self._refuse(request.origin.client_index, request.request_id, str(e), error_name(e))
        except Exception as e:  # a fault of the request or of the core, but of no other request
            logger.exception("request %s could not be added", request.request_id)
            self.abort_requests([request.request_id])
            self._refuse(request.origin.client_index, request.request_id, f"{type(e).__name__}: {e}")

    def _refuse(self, client_index: int, request_id: str, message: str, error_type: str = "") -> None:
        """Answers an ADD with an error. One whose id is live is a replay: an answer would end the live request."""
        if self.scheduler.has_request(request_id):
            self.dropped.drop("replayed", f"request {request_id} of client {client_index} is being served")
        else:
            self._send_end(client_index, [request_id], FinishReason.ERROR, message, error_type)

    def _follow_link(self, link: ClientLink) -> None:
        if not link.is_up:
            self.abort_requests(self.scheduler.get_request_ids(link.client_index))
        self.output_queue.put(link)

    def _handle_utility(self, call: UtilityCall) -> None:
        send = partial(self._send_utility_output, call.client_index)
        if not self.is_running:
            send(UtilityOutput(call.call_id, failure_message="Server shutting down", error_type="EngineDeadError"))
            return
        answer_utility(self, call.call_id, call.method, call.args, send)

    def wake(self) -> None:
        """Ends the wait of the loop. Callable from any thread."""
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    def report_failure(self, why: str) -> None:
        """Reports that the executor or a thread of the core is lost: the loop raises ServerError. Callable from any
        thread."""
        self.input_queue.put((EngineCoreRequestType.EXECUTOR_FAILED, why))

    # -- output ------------------------------------------------------------------------------------------------

    def _send_utility_output(self, client_index: int, output: UtilityOutput) -> None:
        self.output_queue.put((client_index, EngineCoreOutputs(utility_output=output)))

    def _send_end(
        self,
        client_index: int,
        request_ids: Iterable[str],
        reason: FinishReason,
        message: str,
        error_type: str = "",
    ) -> None:
        """Sends the last output of requests that are in no step."""
        outputs = [
            EngineCoreOutput(i, [], finish_reason=reason, error_message=message, error_type=error_type)
            for i in request_ids
        ]
        batch = EngineCoreOutputs(outputs=outputs, finished_requests={output.request_id for output in outputs})
        self.output_queue.put((client_index, batch))

    def get_dropped_messages(self) -> dict[str, int]:
        return dict(self.dropped.counts)

    def admit_clients(self) -> None:
        self._input_thread.admit_clients()

    # -- the way out -------------------------------------------------------------------------------------------

    def request_shutdown(self, now: bool = False) -> None:
        """Finishes or aborts running requests, as configured, and ends. `now`, or a second call, aborts.

        Callable from any thread, and from a signal handler (SimpleQueue.put is reentrant).
        """
        if now or not self.is_running:
            self._ends_now = True
        if self.is_running:
            self.shutdown_state = EngineShutdownState.REQUESTED
        self.wake()

    def _handle_shutdown(self) -> bool:
        """Returns whether the loop continues."""
        if self.shutdown_state is EngineShutdownState.RUNNING:
            return True
        if self.shutdown_state is EngineShutdownState.REQUESTED:
            failpoint("core.shutdown")
            self.shutdown_state = EngineShutdownState.SHUTTING_DOWN
            drain_s = 0.0 if self._ends_now else self._drain_s
            self._drain_end = time.monotonic() + drain_s
            count = self.scheduler.get_num_unfinished_requests()
            if count:
                logger.info("shutting down: %d requests have %g s to finish", count, drain_s)
            else:
                logger.info("shutting down")
        if self._ends_now or time.monotonic() >= self._drain_end or not self.has_work():
            self._abort_all()
        return self.has_work()

    def _abort_all(self) -> None:
        ended = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        by_client: defaultdict[int, list[str]] = defaultdict(list)
        for request_id, client_index in ended:
            by_client[client_index].append(request_id)
        for client_index, request_ids in by_client.items():
            self._send_end(client_index, request_ids, FinishReason.ABORT, SHUTTING_DOWN)

    # -- threads -----------------------------------------------------------------------------------------------

    def open(
        self,
        context: zmq.Context[Any],
        addresses: EngineZmqAddresses,
        *,
        engine_index: int = 0,
        incarnation: int = 0,
        curve: CurveKeys | None = None,
        launcher_pipe: int | None = None,
        on_launcher_gone: Callable[[], None] | None = None,
    ) -> None:
        """Starts the threads: clients learn that the core is ready. Raises RuntimeError if a socket cannot be made."""
        self._output_thread = OutputThread(
            context,
            addresses.outputs,
            self.output_queue,
            engine_index=engine_index,
            incarnation=incarnation,
            on_failure=self.report_failure,
            on_linked=lambda client_index, sequence: self._input_thread.greet(client_index, sequence),
            curve=curve,
            coordinator=addresses.coordinator_output,
        )
        stamp("ready")
        ready = dataclasses.replace(
            self.ready_response,
            engine_index=engine_index,
            incarnation=incarnation,
            peak_memory_bytes=peak_memory_bytes(),
            dp_stats_address=addresses.frontend_stats_publish_address,
            stamps=get_stamps(),
        )
        self._input_thread = InputThread(
            context,
            addresses.inputs,
            engine_index,
            lambda sequence: msgspec.msgpack.encode(dataclasses.replace(ready, next_sequence=sequence)),
            MessageIntake(
                self.preprocess_add_request, self.input_queue, self.aborts_queue, self.dropped, self.heartbeat
            ),
            on_link=lambda link: self.input_queue.put((EngineCoreRequestType.WAKEUP, link)),
            on_failure=self.report_failure,
            curve=curve,
            owner_first=incarnation > 0,
            coordinator=addresses.coordinator_input,
        )
        if launcher_pipe is not None and on_launcher_gone is not None:
            self._input_thread.watch_launcher(launcher_pipe, on_launcher_gone)
        self._threads = self._output_thread, self._input_thread
        for thread in self._threads:
            thread.start()
            thread.wait_open()

    def close(self) -> None:
        """Answers late messages, sends everything, and ends the threads. Called after `run_busy_loop`."""
        self._input_thread.stop(THREAD_END_S)
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())
        self.output_queue.put(None)
        self._output_thread.join(THREAD_END_S)

    def send_engine_dead(self) -> None:
        """Sends the last message of a core that cannot continue. Bounded in time."""
        self.output_queue.put(ENGINE_CORE_DEAD)
        self._output_thread.join(THREAD_END_S)
        if self._output_thread.is_alive():
            logger.critical("clients could not be told within %g s that this core is dead", THREAD_END_S)


RAISE_AGAIN_S = 1.0
"""Seconds after which the exception that ends the start is raised again: Python ignores one raised in a finalizer."""


class StopSignals:
    """Handles SIGTERM and SIGINT from the start of the process: during start-up they end it, later they request a
    shutdown."""

    def __init__(self) -> None:
        self.core: EngineCoreProc | None = None
        self._asked_by = ""

    def install(self) -> None:
        """Installs the handlers. Called on the main thread."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.core is None:
            self._asked_by = self._asked_by or signal.Signals(signum).name
            signal.signal(signal.SIGALRM, self._handle)
            signal.setitimer(signal.ITIMER_REAL, RAISE_AGAIN_S)
            raise SystemExit(f"stopped by {self._asked_by} while it was starting")
        if not self.core.is_running:
            watch_the_end()  # asked twice: now, without waiting for a step that never ends
        self.core.request_shutdown()

    def end(self) -> None:
        """Cancels the exception that would be raised again: the start has failed."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def run_engine_core(options: LaunchOptions, context: zmq.Context[Any]) -> int:
    """Starts a core, serves, and ends it. Returns the exit code. Called on the main thread, because it handles
    signals."""
    signals = StopSignals()
    signals.install()
    address, index = options.handshake_address, options.engine_index
    curve = read_curve_keys(LAUNCHER_PIPE) if address.startswith("tcp://") else None
    handshake = CoreHandshake(context, address, index, curve)
    preload = Preload(options.preload)
    try:
        arm_failpoints()
        preload.start()
        failpoint("core.start")
        metadata = handshake.hello(LAUNCHER_PIPE)
        stamp("configuration")
        preload.join()
        gc.freeze()  # modules live as long as the process: collections need not visit them
        signals.core = core = _make_core(metadata, index)
        failpoint("core.ready")
        core.open(
            context,
            metadata.addresses,
            engine_index=index,
            incarnation=metadata.incarnation,
            curve=curve if metadata.curve is None else metadata.curve,
            launcher_pipe=LAUNCHER_PIPE,
            on_launcher_gone=partial(_end_without_launcher, core),
        )
        handshake.ready()
    except (Exception, SystemExit) as e:
        signals.end()
        if not isinstance(e, QuireError | SystemExit):  # the launching process reports those in full
            logger.exception("the engine core cannot start")
        handshake.failed(e)
        return 1
    finally:
        handshake.close()
    return _serve(core)


def _make_core(metadata: EngineHandshakeMetadata, engine_index: int) -> EngineCoreProc:
    page = None if metadata.heartbeat_path is None else HeartbeatPage.open(Path(metadata.heartbeat_path))
    if page is not None:
        page.incarnation = metadata.incarnation
    heartbeat = HeartbeatWriter(page)
    heartbeat.starting()
    config = decode_config(metadata.engine_config)
    parallel = dataclasses.replace(
        config.parallel_config,
        engine_index=engine_index,
        experts_file=metadata.experts_file,
        experts_generation=metadata.experts_generation,
        is_scale_up_launch=metadata.is_scale_up_launch,
    )
    config = of_incarnation(dataclasses.replace(config, parallel_config=parallel), metadata.incarnation)
    if config.parallel_config.data_parallel_size > 1:
        set_process_title(f"EngineCore_DP{engine_index}")
    if metadata.without_drafts:
        config = dataclasses.replace(config, speculative_config=config.speculative_config.without_drafts())
    executor_class = resolve(config.parallel_config.executor_class)
    make = choose_core_class(metadata, EngineCoreProc)
    core = make(config, executor_class, metadata.log_stats, heartbeat=heartbeat)
    heartbeat.started()
    gc.enable()
    return core


def _serve(core: EngineCoreProc) -> int:
    try:
        core.run_busy_loop()
        watch_the_end()
        core.close()
        core.heartbeat.stopped()
    except Exception:
        watch_the_end()
        logger.exception("the engine core has failed")
        core.heartbeat.note_worker_end(core.executor.worker_end)
        core.send_engine_dead()
        return 1
    finally:
        core.shutdown()
    return 0


def _end_without_launcher(core: EngineCoreProc) -> None:
    logger.error("the process that started this engine core is gone: it ends")
    watch_the_end()
    core.request_shutdown(now=True)


def watch_the_end() -> None:
    """Limits the rest of the process to END_S seconds, whatever hangs: a C thread ends it, with a traceback."""
    if sys.stderr is not None:
        with contextlib.suppress(RuntimeError):  # out of memory, no thread can be started: the way out goes on
            faulthandler.dump_traceback_later(END_S, exit=True)


def main() -> NoReturn:
    """Runs the process. Skips Python's clean-up, which a thread could block.

    The garbage collector is off (`quire.timeline`) until the core is made, which freezes what start-up leaves behind.
    """
    stamp("imports")
    options = parse_command_line(sys.argv[1:])
    leave_terminal()
    die_with_parent(options.parent_pid)
    set_process_title("EngineCore" if options.engine_index == 0 else f"EngineCore_DP{options.engine_index}")
    context: zmq.Context[Any] = zmq.Context()
    try:
        exit_code = run_engine_core(options, context)
    except BaseException:
        logger.exception("the engine core has failed")
        exit_code = 1
    watch_the_end()
    term = threading.Thread(target=context.term, daemon=True)
    term.start()
    term.join(THREAD_END_S)  # messages that linger in sockets are sent
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # the reading process may have ended
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()

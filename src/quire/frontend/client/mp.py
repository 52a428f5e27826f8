"""Engine cores in processes of their own, as one client sees them: sockets, threads, and their end.

`MPClient` is the part that `SyncMPClient` and `AsyncMPClient` share. The client that starts the cores has a supervisor
for each, which keeps it alive; with --data-parallel-size there are several (`EngineSet`). Any number of others
(`client_count`) may attach to the same core, each with its own sockets and its own journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq

from quire import envs
from quire.config.engine import EngineConfig
from quire.errors import ConfigError, EngineDeadError, ServerError, ValidationError
from quire.frontend.client.base import AsyncEngineCoreClient, EngineCoreClient
from quire.frontend.client.control_calls import REMEMBERED_VERBS
from quire.frontend.client.engine_set import EngineSet, merge_ready
from quire.frontend.client.launcher import ActorManager, EngineLauncher, make_client_addresses
from quire.frontend.client.link import EngineLink, LinkState
from quire.frontend.client.link_thread import AttachedLinkThread, LinkThread, OutputSink
from quire.frontend.client.mailbox import LoopMailbox, QueueSink
from quire.frontend.client.shared_links import MemberLink
from quire.frontend.routing.load_board import LoadBoard
from quire.frontend.routing.policy import ROUTING_POLICIES
from quire.frontend.routing.router import Router
from quire.frontend.supervision.nodes import NodeListener, RemoteEngine
from quire.frontend.supervision.supervisor import CoreSupervisor
from quire.timeline import stamp
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from quire.wire.handshake import ClientAddresses
from quire.wire.serial import Frame, MsgpackEncoder
from quire.wire.sockets import SocketDirectory, make_zmq_socket
from quire.wire.utility import convert_result

T = TypeVar("T")
ControlRelay = Callable[[str, tuple[Any, ...]], Awaitable[Any]]
"""Calls a control verb in another process; its result."""

IO_THREADS = 2
"""I/O threads of the zmq context."""
THREAD_END_S = 5.0
ACTORS_END_S = 30.0
LOOK_INTERVAL_S = 1.0
"""Interval at which a client that waits for a start checks that the supervising thread is alive."""


class BackgroundResources:
    """Threads, sockets and processes that must end with a client. Holds no reference to the client."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_closed = False
        self.directory: SocketDirectory | None = None
        self.context: zmq.Context[Any] = zmq.Context(io_threads=IO_THREADS)
        self.link_thread: LinkThread | None = None
        self.launcher: EngineLauncher | None = None
        """None for a client that attached to a core."""
        self.supervisors: dict[int, CoreSupervisor] = {}
        """Supervisor of each engine that this client has started."""
        self.nodes: NodeListener | None = None
        """The thread that speaks with other machines; None where no engine is on one."""
        self.actors: ActorManager | None = None
        """The thread that keeps engines as actors of Ray; None where there are none."""
        self.former_restarts: Counter[str] = Counter()
        """Restarts of engines that were removed."""

    @property
    def supervisor(self) -> CoreSupervisor | None:
        """The supervisor of the only engine, or of the first one."""
        return next(iter(self.supervisors.values()), None)

    def supervisor_of(self, engine: int) -> CoreSupervisor | RemoteEngine | None:
        """Returns what starts the cores of an engine, here or on another machine; None if another process does."""
        if self.nodes is not None and engine in self.nodes.engines:
            return self.nodes.engines[engine]
        return self.supervisors.get(engine)

    def stop_supervisors(self) -> None:
        """Asks all cores to end. From any thread."""
        for supervisor in list(self.supervisors.values()):
            supervisor.stop()
        for thread in filter(None, (self.nodes, self.actors)):
            thread.stop()

    @property
    def is_foreign(self) -> bool:
        """True in a fork of the process that has made them: threads and core are not ours."""
        return os.getpid() != self._pid

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self._is_closed

    def close(self) -> None:
        """Ends the core, the threads and the sockets. Idempotent, bounded in time."""
        if self._is_closed or self.is_foreign:
            return
        self._is_closed = True
        # A finalizer runs wherever it likes: threads of this engine would wait for themselves, those of another for us.
        if isinstance(threading.current_thread(), (LinkThread, CoreSupervisor)):
            threading.Thread(target=self._close, name="EngineCoreCloser", daemon=True).start()
        else:
            self._close()

    def _close(self) -> None:
        if self.link_thread is not None:
            self.link_thread.begin_closing()
        all_ended = True
        self.stop_supervisors()
        for supervisor in list(self.supervisors.values()):
            all_ended &= _join(supervisor, supervisor.end_timeout_s)
        if self.launcher is not None and self.launcher.coordinator is not None:
            self.launcher.coordinator.stop()
            all_ended &= _join(self.launcher.coordinator, THREAD_END_S)
        if self.launcher is not None:
            self.launcher.close()
        if self.nodes is not None:
            all_ended &= _join(self.nodes, THREAD_END_S)
        if self.actors is not None:
            _join(self.actors, ACTORS_END_S)
        if self.link_thread is not None:
            self.link_thread.stop()
            all_ended &= _join(self.link_thread, THREAD_END_S)
        if all_ended:  # else it would wait for their sockets
            self.context.term()
        if self.directory is not None:
            self.directory.remove()


def _join(thread: threading.Thread | ActorManager, timeout_s: float) -> bool:
    with contextlib.suppress(RuntimeError):  # it was never started
        thread.join(timeout_s)
    return not thread.is_alive()


class MPClient(ABC):
    """One client of one core. Thread-safe. Starts a core process, or attaches to one with `client_addresses`; ends it
    with `shutdown`, when it is garbage, or when the interpreter ends. Raises, when made, what the core's start-up
    raises."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_stats: bool,
        client_addresses: ClientAddresses | None = None,
        client_count: int = 1,
        directory: SocketDirectory | None = None,
        meanwhile: Callable[[], object] | None = None,
        engines: EngineSet | None = None,
    ) -> None:
        """`meanwhile` is called once while the core starts; what it raises ends the start. `directory` is where the
        sockets of a new core are to be, this client's from now on; None for one of its own. `engines` is our side of
        the protocol with new cores; None for that of a client with requests."""
        self.resources = BackgroundResources()
        self.resources.directory = directory
        self._model_dir, self._weights = config.model_config.model_dir, ""
        """Directory of the first weights, and of those that engines which share experts have now; empty: the same."""
        self._encoder = MsgpackEncoder()
        self._encoder_lock = threading.Lock()
        self._finalizer = weakref.finalize(self, self.resources.close)
        sink = self._make_sink()
        try:
            if client_addresses is None:
                self._link_thread = self._launch(config, sink, log_stats, client_count, engines)
            else:
                self._link_thread = self._attach(config, client_addresses, sink)
            self.resources.link_thread = self._link_thread
            self._link_thread.start()
            if self.resources.nodes is not None:
                self.resources.nodes.start()
                self._start_actors(self._link_thread)
            for supervisor in self.resources.supervisors.values():
                supervisor.start()
            for supervisor in self.resources.supervisors.values():
                supervisor.wait_spawned()
            if self.resources.supervisors:
                stamp("core spawned")
            if meanwhile is not None:
                meanwhile()
            self._wait_started()
            self._pin_cores()
        except BaseException:
            self.resources.close()
            raise

    @abstractmethod
    def _make_sink(self) -> OutputSink:
        """Returns where the outputs go."""

    def shutdown(self) -> None:
        """Ends the core, the threads and the sockets. Idempotent."""
        self._finalizer()

    # -- start ----------------------------------------------------------------------------------------------------

    def _launch(
        self, config: EngineConfig, sink: OutputSink, log_stats: bool, client_count: int, engines: EngineSet | None
    ) -> LinkThread:
        """Binds all sockets, and makes the supervisors that will start the cores."""
        resources = self.resources
        directory = resources.directory = resources.directory or SocketDirectory()
        resources.launcher = launcher = EngineLauncher(
            config, resources.context, directory, log_stats=log_stats, client_count=client_count
        )
        if engines is None:
            engines = make_engine_set(config, lambda: EngineLink(is_shared=client_count > 1, is_owner=True))
        thread = LinkThread(engines, launcher.input_socket, launcher.output_socket, sink)
        if config.parallel_config.has_waves:
            thread.coordinator = launcher.start_coordinator(lambda error: thread.post(lambda: thread.fail(error)))
        remote = config.parallel_config.remote_engines
        thread.awaited = [engine for engine in engines.links if engine not in remote]
        for engine in thread.awaited:
            resources.supervisors[engine] = launcher.make_supervisor(engine, thread)
        resources.nodes = launcher.make_node_listener(thread)
        thread.on_gone = resources.stop_supervisors
        return thread

    def _start_actors(self, thread: LinkThread) -> None:
        """Starts the engines that Ray places, if there are any."""
        assert self.resources.launcher is not None  # it has made the threads
        self.resources.actors = self.resources.launcher.make_actor_manager(thread)
        if self.resources.actors is not None:
            self.resources.actors.start()

    def _attach(self, config: EngineConfig, addresses: ClientAddresses, sink: OutputSink) -> LinkThread:
        """Binds the sockets that the cores have orders to connect to."""
        context = self.resources.context
        input_socket = make_zmq_socket(context, addresses.input_address, zmq.ROUTER, bind=True)
        output_socket = make_zmq_socket(context, addresses.output_address, zmq.PULL, bind=True)
        index = addresses.client_index
        if addresses.is_judged:  # its owner reports the end of the core; until then others' suspects may be tried
            engines = make_engine_set(config, lambda: MemberLink(index), attach_board(config, addresses))
            return AttachedLinkThread(engines, input_socket, output_socket, sink, math.inf)
        engines = make_engine_set(config, lambda: EngineLink(index, is_shared=True))
        return AttachedLinkThread(engines, input_socket, output_socket, sink, envs.ENGINE_READY_TIMEOUT_S.number())

    def _wait_started(self) -> None:
        """Waits until the cores are ready. Raises what keeps one from that.

        The supervisors enforce the start-up timeout; a second timer here could fire first when the machine is
        suspended.
        """
        started = self._link_thread.started
        nodes = self.resources.nodes
        watchers: list[threading.Thread] = [*self.resources.supervisors.values()]
        watchers = watchers or [self._link_thread if nodes is None else nodes]
        while all(watcher.is_alive() for watcher in watchers) and not started.done():
            wait([started], LOOK_INTERVAL_S)
        if not started.done() and not wait([started], THREAD_END_S).done:
            names = ", ".join(watcher.name for watcher in watchers if not watcher.is_alive())
            raise EngineDeadError(f"the thread {names} has ended, and no engine core is ready")
        started.result()

    def _pin_cores(self) -> None:
        """Makes the later cores of each engine serve what its first one does."""
        launcher, nodes = self.resources.launcher, self.resources.nodes
        if nodes is not None:
            nodes.promise(self.ready_response.max_model_len)
            self._link_thread.links.least_model_len = self.ready_response.max_model_len
        for engine, supervisor in self.resources.supervisors.items():
            if launcher is not None:
                launcher.pin(supervisor, self.ready_response.max_model_len, self.engine_responses[engine])

    def get_client_addresses(self, client_index: int) -> ClientAddresses:
        """Returns the addresses with which client `client_index` (from 1) attaches to this core, made for
        `client_count` clients."""
        directory = self.resources.directory
        if directory is None:
            raise ConfigError("only the client that starts the core knows the addresses of the others")
        return make_client_addresses(directory, client_index)

    # -- the core -------------------------------------------------------------------------------------------------

    @property
    def ready_response(self) -> EngineCoreReadyResponse:
        """Values that the cores which were connected last discovered at their start-up, joined."""
        return merge_ready(self.engine_responses.values())

    @property
    def engine_responses(self) -> dict[int, EngineCoreReadyResponse]:
        """The same of each engine that has been ready."""
        links = self._link_thread.links.links
        return {i: link.ready_response for i, link in links.items() if link.ready_response is not None}

    @property
    def is_ready(self) -> bool:
        """True if a core of any engine is connected."""
        return self._link_thread.links.state is LinkState.UP and not self.resources.is_closed

    @property
    def num_engines_up(self) -> int:
        """Number of engines with a connected core."""
        return sum(link.state is LinkState.UP for link in self._link_thread.links.links.values())

    @property
    def engine_dead(self) -> bool:
        """True if no core is there any more, and none will be."""
        return self._link_thread.links.is_gone or self.resources.is_closed

    @property
    def core_pid(self) -> int | None:
        """Process id of the core that lives now; None between two, and where another process supervises it."""
        supervisor = self.resources.supervisor
        return None if supervisor is None else supervisor.core_pid

    @property
    def num_live_requests(self) -> int:
        """Requests in the journal: not ended, not aborted."""
        return self._link_thread.links.num_live_requests

    @property
    def counts(self) -> Counter[str]:
        """Events so far, as `EngineLink.counts` has them: deaths, resumed requests, dropped messages."""
        return self._link_thread.links.counts

    @property
    def restarts(self) -> Mapping[str, int]:
        """Restarts of the core by cause of the death before; empty for a client that attached to one."""
        restarts: Counter[str] = self.resources.former_restarts.copy()
        nodes = self.resources.nodes
        remote = () if nodes is None else nodes.engines.values()
        for supervisor in (*list(self.resources.supervisors.values()), *remote):
            restarts.update(supervisor.restarts)
        return restarts

    def expect_shutdown(self) -> None:
        """Announces that `shutdown` follows once the live requests have ended."""
        for supervisor in list(self.resources.supervisors.values()):
            supervisor.expect_stop()
        if self.resources.nodes is not None:
            self.resources.nodes.expect_stop()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends a request. Raises EngineDeadError; ValidationError for a value that cannot be sent."""
        self._check_usable()
        thread = self._link_thread
        if thread.coordinator is not None:
            request.current_wave = thread.coordinator.wave
        frames = self._encode(request)
        thread.post(lambda: thread.add_request(request, frames))

    @property
    def engines(self) -> EngineSet:
        """Our side of the protocol. It belongs to a thread: `ask_link`."""
        return self._link_thread.links

    def ask_link(self, command: Callable[[], T]) -> Future[T]:
        """Makes the thread that owns the links call `command`, which must not raise. Returns a future of its result."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(command())

        self._link_thread.post(run)
        return future

    def note_gone(self, reason: str, engine: int | None = None) -> None:
        """Handles the supervising process's report that there will be no core of an engine, or of any, any more. From
        any thread."""
        thread = self._link_thread
        thread.post(lambda: thread.fail(EngineDeadError(reason), engine))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Aborts requests. Does nothing if there is no engine any more."""
        if request_ids and not self.engine_dead and not self.resources.is_foreign:
            links = self._link_thread.links
            self._link_thread.post(lambda: links.abort_requests(request_ids))

    def update_together(self, path: str, version: str | None = None) -> str:
        """Replaces the weights of engines that share experts while all are paused, at the same step. Afterwards all
        have the new ones or, if one could not read them, the former ones. Returns the version. Waits: not for the
        thread of an event loop. Raises what an engine raises."""
        was_paused = self.begin_call("is_scheduler_paused", ()).result()
        former = (self._weights or str(self._model_dir), self.begin_call("get_weight_version", ()).result())
        if not was_paused:
            self.begin_call("pause_scheduler", ("keep", False)).result()
        try:
            answers = self._update_each(list(self.engines.links), path, version)
            failures = [answer for answer in answers.values() if isinstance(answer, Exception)]
            if not failures:
                self._weights = path
                return str(next(iter(answers.values())))
            changed = [engine for engine, answer in answers.items() if not isinstance(answer, Exception)]
            self._update_each(changed, *former)
            raise failures[0]
        finally:
            if not was_paused:
                self.begin_call("resume_scheduler", ()).result()

    def _update_each(self, engines: Iterable[int], path: str, version: str | None) -> dict[int, Any]:
        """Has each engine read weights. Returns the versions, or errors."""
        thread = self._link_thread
        answers: dict[int, Future[Any]] = {engine: Future() for engine in engines}
        for engine, answer in answers.items():
            self.ask_link(partial(thread.call, "update_weights", (path, version), answer, engine)).result()
        return {engine: answer.exception() or answer.result() for engine, answer in answers.items()}

    @property
    def shares_experts(self) -> bool:
        """True if no engine of this client steps without the others."""
        launcher = self.resources.launcher
        return launcher is not None and launcher.shares_experts

    def begin_call(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Calls a control verb. Returns its result, as it comes off the wire. Raises EngineDeadError; ValidationError
        for arguments that cannot be sent."""
        self._check_usable()
        if method == "collective_rpc" and callable(args[0]):
            raise ValidationError(
                f"collective_rpc({getattr(args[0], '__name__', args[0])}): a function cannot be sent to a worker in "
                "another process; name a method of the worker class (--worker-cls takes your own), or use the "
                "in-process engine",
                param="method",
            )
        self._encode(args)
        return self._link_thread.post_call(method, args)

    def _encode(self, value: Any) -> list[Frame]:
        """Encodes on the thread of the caller, so that the caller gets the error, not the thread that sends."""
        try:
            with self._encoder_lock:
                return self._encoder.encode(value)
        except (TypeError, ValueError, OverflowError) as e:
            raise ValidationError(f"this cannot be sent to the engine core: {e}") from e

    def _check_usable(self) -> None:
        if self.resources.is_foreign:
            raise ServerError("this engine belongs to the process that made it, not to a fork of it; make one here")
        if self.engine_dead:
            raise EngineDeadError(self._link_thread.links.gone_reason or "the engine has been shut down")


def attach_board(config: EngineConfig, addresses: ClientAddresses) -> LoadBoard | None:
    """Opens the page of the loads of all clients; None if there is none."""
    parallel = config.parallel_config
    if not addresses.board_path:
        return None
    path, index = Path(addresses.board_path), addresses.client_index
    return LoadBoard.attach(path, index, parallel.first_engine, parallel.num_engines)


def make_engine_set(
    config: EngineConfig, make_link: Callable[[], EngineLink], board: LoadBoard | None = None
) -> EngineSet:
    """Returns the set of the engines that a configuration asks for."""
    parallel = config.parallel_config
    router = Router(ROUTING_POLICIES[parallel.routing_policy](), board)
    return EngineSet(
        [make_link() for _ in range(parallel.num_engines)],
        router=router,
        reroute=parallel.reroute,
        clock=time.monotonic,
        first_engine=parallel.first_engine,
        remote_engines=parallel.remote_engines,
        reroutes_any=parallel.reroute_any_numerics,
    )


class SyncMPClient(MPClient, EngineCoreClient):  # type: ignore[override]  # ready_response is read-only
    """For a caller that waits for outputs: `LLM` and `LLMEngine`.

    Ctrl-C never reaches the core: waiting for outputs can be interrupted at any time and taken up again.
    """

    def _make_sink(self) -> OutputSink:
        sink = QueueSink()
        self._outputs = sink.queue
        return sink

    def get_output(self) -> EngineCoreOutputs:
        outputs = self._outputs.get()
        if isinstance(outputs, EngineDeadError):
            self._outputs.put(outputs)
            raise outputs
        return outputs

    def call_utility(self, method: str, *args: Any) -> Any:
        if method == "update_weights" and self.shares_experts:
            return self.update_together(*args)
        return convert_result(method, self.begin_call(method, args).result())


class AsyncMPClient(MPClient, AsyncEngineCoreClient):  # type: ignore[override]  # ready_response is read-only
    """For coroutines of one event loop: `AsyncLLM`. Made on any thread, with or without a loop."""

    control_relay: ControlRelay | None = None
    """Makes the calls that change the core, so that the process which restarts it knows of them; None: this client
    does."""

    def _make_sink(self) -> OutputSink:
        self._mailbox = LoopMailbox()
        return self._mailbox

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._mailbox.take()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.add_request(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.abort_requests(request_ids)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if self.control_relay is not None and method in REMEMBERED_VERBS:
            return convert_result(method, await self.control_relay(method, args))
        if method == "update_weights" and self.shares_experts:
            return await asyncio.to_thread(self.update_together, *args)
        return convert_result(method, await asyncio.wrap_future(self.begin_call(method, args)))

"""An engine core in a process of its own, as one client sees it: sockets, two threads, and their end.

`MPClient` is the part that `SyncMPClient` and `AsyncMPClient` share. The client that starts the core has a supervisor,
which keeps it alive; any number of others (`client_count`) may attach to the same core, each with its own sockets and
its own journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import zmq

from quire import envs
from quire.config.engine import EngineConfig
from quire.config.server import encode_config
from quire.errors import ConfigError, EngineDeadError, ServerError, ValidationError
from quire.frontend.client.base import AsyncEngineCoreClient, EngineCoreClient
from quire.frontend.client.control_calls import REMEMBERED_VERBS
from quire.frontend.client.link import EngineLink, LinkState
from quire.frontend.client.link_thread import AttachedLinkThread, LinkThread, OutputSink
from quire.frontend.client.mailbox import LoopMailbox, QueueSink
from quire.frontend.client.shared_links import MemberLink
from quire.frontend.supervision.launch import CoreLaunch
from quire.frontend.supervision.supervisor import CoreSupervisor
from quire.timeline import stamp
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from quire.wire.handshake import ClientAddresses, EngineZmqAddresses
from quire.wire.serial import Frame, MsgpackEncoder
from quire.wire.sockets import CurveDoor, CurveKeys, SocketDirectory, bound_address, make_zmq_socket
from quire.wire.utility import convert_result

T = TypeVar("T")
ControlRelay = Callable[[str, tuple[Any, ...]], Awaitable[Any]]
"""Calls a control verb in another process; its result."""

IO_THREADS = 2
"""I/O threads of the zmq context."""
THREAD_END_S = 5.0
LOOK_INTERVAL_S = 1.0
"""Interval at which a client that waits for a start checks that the supervising thread is alive."""


class BackgroundResources:
    """Threads, sockets and processes that must end with a client. Holds no reference to the client."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_closed = False
        self.directory: SocketDirectory | None = None
        self.context: zmq.Context[Any] = zmq.Context(io_threads=IO_THREADS)
        self.door: CurveDoor | None = None
        self.link_thread: LinkThread | None = None
        self.supervisor: CoreSupervisor | None = None

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
        if self.supervisor is not None:
            self.supervisor.stop()
            all_ended &= _join(self.supervisor, self.supervisor.end_timeout_s)
        if self.link_thread is not None:
            self.link_thread.stop()
            all_ended &= _join(self.link_thread, THREAD_END_S)
        if all_ended:  # else it would wait for their sockets
            self.context.term()
        if self.directory is not None:
            self.directory.remove()


def _join(thread: threading.Thread, timeout_s: float) -> bool:
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
        link: EngineLink | None = None,
    ) -> None:
        """`meanwhile` is called once while the core starts; what it raises ends the start. `directory` is where the
        sockets of a new core are to be, this client's from now on; None for one of its own. `link` is our side of the
        protocol with a new core; None for that of a client with requests."""
        self.resources = BackgroundResources()
        self.resources.directory = directory
        self._encoder = MsgpackEncoder()
        self._encoder_lock = threading.Lock()
        self._finalizer = weakref.finalize(self, self.resources.close)
        sink = self._make_sink()
        try:
            if client_addresses is None:
                self._link_thread = self._launch(config, sink, log_stats, client_count, link)
            else:
                self._link_thread = self._attach(client_addresses, sink)
            self.resources.link_thread = self._link_thread
            self._link_thread.start()
            if self.resources.supervisor is not None:
                self.resources.supervisor.start()
                self.resources.supervisor.wait_spawned()
                stamp("core spawned")
            if meanwhile is not None:
                meanwhile()
            self._wait_started()
            self._pin_model_len(config)
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
        self, config: EngineConfig, sink: OutputSink, log_stats: bool, client_count: int, link: EngineLink | None
    ) -> LinkThread:
        """Binds all sockets, and makes the supervisor that will start the core."""
        host, context = config.parallel_config.engine_host, self.resources.context
        if host is not None and client_count > 1:
            raise ConfigError(f"--engine-host {host}: an engine core that is reached over TCP has one client")
        directory = self.resources.directory = self.resources.directory or SocketDirectory()
        ours, the_cores = CurveKeys.make_pair() if host is not None else (None, None)
        if ours is not None:
            self.resources.door = CurveDoor(context, [ours.peer_public])

        def bind(name: str, socket_type: int) -> zmq.Socket[Any]:
            address = f"tcp://{host}:0" if host is not None else directory.endpoint(name)
            return make_zmq_socket(context, address, socket_type, bind=True, curve=ours)

        input_socket, output_socket = bind("input-0", zmq.ROUTER), bind("output-0", zmq.PULL)
        others = [make_client_addresses(directory, index) for index in range(1, client_count)]
        addresses = EngineZmqAddresses(
            [bound_address(input_socket), *(other.input_address for other in others)],
            [bound_address(output_socket), *(other.output_address for other in others)],
        )
        if link is None:
            link = EngineLink(is_shared=client_count > 1, is_owner=True)
        thread = LinkThread(link, input_socket, output_socket, sink)
        launch = CoreLaunch(
            addresses,
            encode_config(config),
            log_stats,
            envs.ENGINE_READY_TIMEOUT_S.number(),
            the_cores,
            preload=config.parallel_config.core_names(config.model_config.implementation.name),
        )
        self.resources.supervisor = supervisor = CoreSupervisor(
            launch,
            config.lifecycle_config,
            bind("handshake", zmq.ROUTER),
            directory.path,
            on_death=lambda death: thread.post(lambda: thread.report_death(death)),
            on_gone=lambda error: thread.post(lambda: thread.fail(error)),
            was_connected=thread.was_connected,
            has_live_requests=lambda: thread.link.is_needed,
        )
        thread.on_gone = supervisor.stop
        return thread

    def _attach(self, addresses: ClientAddresses, sink: OutputSink) -> LinkThread:
        """Binds the sockets that the core has orders to connect to."""
        context = self.resources.context
        input_socket = make_zmq_socket(context, addresses.input_address, zmq.ROUTER, bind=True)
        output_socket = make_zmq_socket(context, addresses.output_address, zmq.PULL, bind=True)
        index = addresses.client_index
        if addresses.is_judged:  # its owner reports the end of the core; until then others' suspects may be tried
            return AttachedLinkThread(MemberLink(index), input_socket, output_socket, sink, math.inf)
        link = EngineLink(index, is_shared=True)
        return AttachedLinkThread(link, input_socket, output_socket, sink, envs.ENGINE_READY_TIMEOUT_S.number())

    def _wait_started(self) -> None:
        """Waits until the core is ready. Raises what keeps it from that.

        The supervisor enforces the start-up timeout; a second timer here could fire first when the machine is
        suspended.
        """
        started, watcher = self._link_thread.started, self.resources.supervisor or self._link_thread
        while watcher.is_alive() and not started.done():
            wait([started], LOOK_INTERVAL_S)
        if not started.done() and not wait([started], THREAD_END_S).done:
            raise EngineDeadError(f"the thread {watcher.name} has ended, and no engine core is ready")
        started.result()

    def _pin_model_len(self, config: EngineConfig) -> None:
        """Makes a restarted core fit the context to no less than this one has: live requests were promised it."""
        model, model_len = config.model_config, self.ready_response.max_model_len
        if self.resources.supervisor is not None and model_len != model.model_len:
            pinned = dataclasses.replace(config, model_config=dataclasses.replace(model, max_model_len=model_len))
            self.resources.supervisor.set_engine_config(encode_config(pinned))

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
        """Values that the core which was connected last discovered at its start-up."""
        ready = self._link_thread.link.ready_response
        assert ready is not None  # the constructor has waited for it
        return ready

    @property
    def is_ready(self) -> bool:
        """True if a core is connected."""
        return self._link_thread.link.state is LinkState.UP and not self.resources.is_closed

    @property
    def engine_dead(self) -> bool:
        """True if no core is there any more, and none will be."""
        return self._link_thread.link.state is LinkState.GONE or self.resources.is_closed

    @property
    def core_pid(self) -> int | None:
        """Process id of the core that lives now; None between two, and where another process supervises it."""
        supervisor = self.resources.supervisor
        return None if supervisor is None else supervisor.core_pid

    @property
    def num_live_requests(self) -> int:
        """Requests in the journal: not ended, not aborted."""
        return self._link_thread.link.num_live_requests

    @property
    def counts(self) -> Counter[str]:
        """Events so far, as `EngineLink.counts` has them: deaths, resumed requests, dropped messages."""
        return self._link_thread.link.counts.copy()

    @property
    def restarts(self) -> Mapping[str, int]:
        """Restarts of the core by cause of the death before; empty for a client that attached to one."""
        return {} if self.resources.supervisor is None else self.resources.supervisor.restarts

    def expect_shutdown(self) -> None:
        """Announces that `shutdown` follows once the live requests have ended."""
        if self.resources.supervisor is not None:
            self.resources.supervisor.expect_stop()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends a request. Raises EngineDeadError; ValidationError for a value that cannot be sent."""
        self._check_usable()
        frames = self._encode(request)
        thread = self._link_thread
        thread.post(lambda: thread.add_request(request, frames))

    @property
    def link(self) -> EngineLink:
        """Our side of the protocol. It belongs to a thread: `ask_link`."""
        return self._link_thread.link

    def ask_link(self, command: Callable[[], T]) -> Future[T]:
        """Makes the thread that owns the link call `command`, which must not raise. Returns a future of its result."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(command())

        self._link_thread.post(run)
        return future

    def note_gone(self, reason: str) -> None:
        """Handles the supervising process's report that there will be no core any more. From any thread."""
        thread = self._link_thread
        thread.post(lambda: thread.fail(EngineDeadError(reason)))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Aborts requests. Does nothing if there is no engine any more."""
        if request_ids and not self.engine_dead and not self.resources.is_foreign:
            link = self._link_thread.link
            self._link_thread.post(lambda: link.abort_requests(request_ids))

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
            raise EngineDeadError(self._link_thread.link.gone_reason or "the engine has been shut down")


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
        return convert_result(method, await asyncio.wrap_future(self.begin_call(method, args)))


def make_client_addresses(directory: SocketDirectory, client_index: int, *, is_judged: bool = False) -> ClientAddresses:
    """Returns the addresses of client `client_index` of the core in this directory. Raises ConfigError for too long a
    path."""
    return ClientAddresses(
        client_index,
        directory.endpoint(f"input-{client_index}"),
        directory.endpoint(f"output-{client_index}"),
        is_judged,
    )

"""The thread that owns a client's sockets and the links of its engines.

No other thread touches either: other threads post commands. After every turn the thread sends, delivers and answers
what the links have produced. One pair of sockets serves all engines: what is sent is addressed by an engine's identity,
what comes carries its index.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, Protocol

import zmq

from quire.errors import EngineDeadError, QuireError, ServerError, make_error
from quire.failpoints import failpoint
from quire.frontend.client.control_calls import Answer
from quire.frontend.client.coordinator_link import CoordinatorLink
from quire.frontend.client.engine_set import EngineSet, merge_ready
from quire.frontend.client.link import EngineLink, LinkState
from quire.frontend.supervision.quarantine import CoreDeath
from quire.interrupts import Wakeup
from quire.logger import init_logger
from quire.wire.engine_core import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
)
from quire.wire.handshake import ENGINE_CORE_DEAD, engine_identity
from quire.wire.serial import Frame, MsgpackDecoder, MsgpackEncoder, WireError
from quire.wire.sockets import receive_event

logger = init_logger(__name__)

MESSAGES_PER_TURN = 64
"""Messages of the core taken in before commands are looked at again."""
MAX_WAIT_S = 10.0
"""Longest wait of an attached client for further engines, once one is ready."""
_LOOK_INTERVAL_MS = 250
"""Interval at which an attached client checks that its core is still connected."""


class OutputSink(Protocol):
    """Destination of outputs. Called on the link's thread; must not block."""

    def put_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Adds the outputs of a step."""

    def put_end(self, error: EngineDeadError) -> None:
        """Ends the outputs, because of `error`."""


class LinkThread(threading.Thread):
    """Runs the links. `post` and the futures are for any thread; everything else belongs to the thread itself.

    `started` ends with the joint ready response of the first core of each engine, or with the error that keeps one from
    coming.
    """

    def __init__(
        self,
        link: EngineLink | EngineSet,
        input_socket: zmq.Socket[Any],
        output_socket: zmq.Socket[Any],
        sink: OutputSink,
    ) -> None:
        super().__init__(name="EngineCoreOutputQueueThread", daemon=True)
        self.links = link if isinstance(link, EngineSet) else EngineSet([link])
        self.started: Future[EngineCoreReadyResponse] = Future()
        self._input = input_socket
        self._output = output_socket
        self._sink = sink
        self.awaited: Collection[int] = tuple(self.links.links)
        """Engines that must be ready before `started` ends; none: any one of all."""
        self.on_gone: Callable[[], None] = lambda: None
        """Called when there is no use for a core any more."""
        self.coordinator: CoordinatorLink | None = None
        """Set before the thread starts, for engines that step together."""
        self._commands: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup()
        self._is_stopping = False
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._futures: dict[int, Future[Any]] = {}
        self._encoded: tuple[EngineCoreRequest, list[Frame]] | None = None
        """The request being added, as its caller has encoded it."""
        self._has_ended = False
        """The sink has been given the end of the engine."""

    @property
    def link(self) -> EngineLink:
        """The link of the only engine."""
        return self.links.link

    # -- any thread -----------------------------------------------------------------------------------------------

    def post(self, command: Callable[[], None]) -> None:
        """Makes the thread call `command`, after those posted before."""
        self._commands.append(command)
        self._wakeup.set()

    def post_call(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Makes a control call on the thread. Returns a future of its result, as it comes off the wire."""
        future: Future[Any] = Future()
        self.post(lambda: self.call(method, args, future))
        return future

    def call(self, method: str, args: tuple[Any, ...], future: Future[Any], engine: int | None = None) -> None:
        """Makes a control call, of all engines or of one, whose result, as it comes off the wire, `future` gets. A
        command."""
        self._futures[self.links.call_utility(method, args, engine)] = future

    def was_connected(self, incarnation: int, engine: int | None = None) -> bool:
        """Returns True if the core of this number, of an engine or the only one, has sent its ready frame."""
        link = self.link if engine is None else self.links.links.get(engine)
        ready = None if link is None else link.ready_response
        return ready is not None and ready.incarnation == incarnation

    def begin_closing(self) -> None:
        """Announces that the cores are about to be asked to end: the ends of their requests are final."""
        self.post(lambda: setattr(self.links, "is_closing", True))

    def stop(self) -> None:
        """Ends the thread, once it has taken in what the core has sent. From any thread, and from a finalizer."""
        self._is_stopping = True
        self._wakeup.set()

    # -- commands -------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest, frames: list[Frame]) -> None:
        """Adds a request. A command. `frames` are the request encoded, for the case that it goes out as it is."""
        self._encoded = request, frames
        self.links.add_request(request)

    def fail(self, error: QuireError, engine: int | None = None) -> None:
        """Ends the link of an engine, or of all: there will be no core of it any more. A command."""
        if not self.started.done():
            self.started.set_exception(error)
        if engine is None:
            self.links.close_all(str(error))
        else:
            self.links.on_gone(engine, str(error))

    # -- the thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's body. An error in it is a bug: it ends the engine, with a message."""
        try:
            self._work()
        except Exception as e:
            logger.exception("the thread that speaks with the engine core has failed")
            self._sink.put_end(EngineDeadError(f"the thread that speaks with the engine core has failed: {e}"))
            self.on_gone()
        finally:
            for future in (*self._futures.values(), self.started):
                if not future.done():
                    future.set_exception(EngineDeadError("the engine has been shut down"))
            self._close()

    def _close(self) -> None:
        self._input.close(linger=0)
        self._output.close(linger=0)
        if self.coordinator is not None:
            self.coordinator.close()
        self._wakeup.close()

    def _work(self) -> None:
        poller = zmq.Poller()
        for source in self._sources():
            poller.register(source, zmq.POLLIN)
        while True:
            ready = {source for source, _ in poller.poll(self._take_turn())}
            if self._wakeup.fd in ready:
                self._wakeup.clear()
                is_stopping = self._is_stopping
                self._run_commands()
                if is_stopping:
                    self._receive_outputs()
                    self.fail(EngineDeadError("the engine has been shut down"))
                    self._flush()
                    return
            if self._input in ready:
                self._receive_ready()
            if self._output in ready:
                self._receive_outputs()
            if self.coordinator is not None and self.coordinator.socket in ready:
                self.coordinator.receive()
            self._flush()

    def _sources(self) -> list[Any]:
        """Returns the descriptors and sockets that end a wait."""
        further = [] if self.coordinator is None else [self.coordinator.socket]
        return [self._wakeup.fd, self._output, self._input, *further]

    def _take_turn(self) -> int | None:
        """Does what is due before a wait. Returns how long that may take, in milliseconds."""
        return None

    def _run_commands(self) -> None:
        commands = self._commands
        while commands:
            commands.popleft()()
            self._flush()

    def _receive_ready(self) -> None:
        frames = self._input.recv_multipart()
        try:
            if len(frames) != 2:
                raise WireError(f"a message of {len(frames)} frames where the core's ready frame was expected")
            ready = MsgpackDecoder(EngineCoreReadyResponse).decode(frames[1:])
            if frames[0] != engine_identity(ready.engine_index):
                raise WireError(f"a ready frame of engine {ready.engine_index} from the identity {frames[0]!r}")
        except (WireError, OverflowError) as e:  # OverflowError: an index that no identity can have
            self._drop(e)
            return
        failpoint("client.resume")
        self.links.on_ready(ready.engine_index, ready)
        if not self.started.done():
            is_ready = {engine: link.ready_response is not None for engine, link in self.links.links.items()}
            if any(is_ready.values()) and all(is_ready[engine] for engine in self.awaited):
                responses = [link.ready_response for link in self.links.links.values()]
                self.started.set_result(merge_ready(filter(None, responses)))

    def _receive_outputs(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames: list[Frame] = [self._output.recv(zmq.NOBLOCK)]
            except zmq.Again:
                return
            while self._output.getsockopt(zmq.RCVMORE):
                frames.append(self._output.recv(copy=False).buffer)
            failpoint("client.output.received")
            if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
                self._note_farewell()
                continue
            try:
                outputs = self._decoder.decode(frames)
            except WireError as e:
                self._drop(e)
            else:
                self.links.on_outputs(outputs)
            self._flush()

    def _drop(self, error: Exception) -> None:
        """Drops an invalid message; it is logged if it is the first, second, fourth, eighth …"""
        self.links.on_corrupt_message()
        count = self.links.counts["corrupt"]
        if count & (count - 1) == 0:
            logger.error("a message was dropped, number %d: %s", count, error)

    def _note_farewell(self) -> None:
        """Ignores ENGINE_CORE_DEAD: the supervisor knows more of it, and sooner."""

    def _flush(self) -> None:
        """Sends, delivers and answers what the links have produced."""
        links = self.links
        links.settle()
        if links.deliveries:
            for outputs in links.deliveries:
                self._sink.put_outputs(outputs)
            links.deliveries.clear()
        if links.messages:
            self._send_messages()
        if links.answers:
            answers, links.answers = links.answers, []
            for answer in answers:
                self._resolve(answer)
        if links.is_gone and not self._has_ended:
            self._has_ended = True
            self._sink.put_end(EngineDeadError(links.gone_reason))
            self.on_gone()

    def _send_messages(self) -> None:
        messages, self.links.messages = self.links.messages, []
        for engine, message in messages:
            if self._encoded is not None and message.payload is self._encoded[0]:
                failpoint("client.add.journaled")
                frames = self._encoded[1]
            else:
                frames = self._encoder.encode(message.payload)
            self._input.send_multipart([engine_identity(engine), message.type.value, *frames], copy=False)
            if self.coordinator is not None and message.type is EngineCoreRequestType.ADD:
                self.coordinator.note_request(engine)
        self._encoded = None

    def _resolve(self, answer: Answer) -> None:
        future = self._futures.pop(answer.call_id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(answer.output, EngineDeadError):
            future.set_exception(answer.output)
        elif answer.output.failure_message is not None:
            output = answer.output
            future.set_exception(make_error(output.error_type, output.failure_message or "", ServerError))
        else:
            future.set_result(answer.output.result)

    def report_death(self, death: CoreDeath, engine: int | None = None) -> None:
        """Reports the death of a core, of an engine or the only one, to its link. A command."""
        engine = next(iter(self.links.links)) if engine is None else engine
        if len(self.links.links) > 1:
            self._receive_outputs()  # tokens it has sent are not computed again elsewhere
        self.links.on_death(engine, death)

    def lose(self, engine: int, why: str) -> None:
        """Reports that the machine of an engine is out of reach. A command."""
        self._receive_outputs()
        self.links.lose(engine, why)


class AttachedLinkThread(LinkThread):
    """The thread of a client whose core another process supervises: it learns of a death from the connection only.

    If no core is there for `patience_s`, none is expected any more. With several engines a lost connection may be that
    of any: then only the process that supervises them reports a death.
    """

    def __init__(
        self,
        link: EngineLink | EngineSet,
        input_socket: zmq.Socket[Any],
        output_socket: zmq.Socket[Any],
        sink: OutputSink,
        patience_s: float,
    ) -> None:
        super().__init__(link, input_socket, output_socket, sink)
        self.patience_s = patience_s
        self._ready_since: float | None = None
        """Time since which one of several engines has been ready."""
        self._monitor = input_socket.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        self._connections: set[int] = set()
        self._down_since: float | None = None

    def _sources(self) -> list[Any]:
        return [*super()._sources(), self._monitor]

    def _follow_connections(self) -> None:
        """Counts connections: a core is lost with its last one; that of the next core may be there by then."""
        any_lost = False
        while self._monitor.poll(0):
            event, connection = receive_event(self._monitor)
            if event == zmq.Event.ACCEPTED:
                self._connections.add(connection)
            else:
                self._connections.discard(connection)
                any_lost = True
        if any_lost and not self._connections and len(self.links.links) == 1:
            self._lose_core("has disconnected")

    def _take_turn(self) -> int | None:
        self._follow_connections()
        self._begin_with_some()
        if self.links.state is not LinkState.DOWN:
            self._down_since = None
            return _LOOK_INTERVAL_MS
        now = time.monotonic()
        self._down_since = self._down_since or now
        if now - self._down_since > self.patience_s:
            self.fail(EngineDeadError(f"no engine core was there for {self.patience_s:g} s; restart the engine"))
            self._flush()
        return _LOOK_INTERVAL_MS

    def _begin_with_some(self) -> None:
        """Begins although an engine is not ready: this process may have been started while that one was restarted."""
        if self.started.done() or self.links.state is LinkState.DOWN:
            return
        now = time.monotonic()
        self._ready_since = self._ready_since or now
        if now - self._ready_since > MAX_WAIT_S:
            responses = [link.ready_response for link in self.links.links.values()]
            self.started.set_result(merge_ready(filter(None, responses)))

    def _close(self) -> None:
        self._input.disable_monitor()
        self._monitor.close(linger=0)
        super()._close()

    def _note_farewell(self) -> None:
        self._lose_core("said that it is dead")

    def _lose_core(self, how: str) -> None:
        if len(self.links.links) == 1 and self.link.state is not LinkState.DOWN:
            self.report_death(CoreDeath("lost", how, None))

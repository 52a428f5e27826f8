"""The two threads of a core that use sockets, so that its loop never waits for one.

The input thread reads one DEALER per frontend, the state of their connections, and the launcher's end of a pipe. The
output thread has one PUSH per frontend. zmq works outside the interpreter's lock, so both overlap the model's forward
pass.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any

import zmq

from quire.engine.intake import ClientLink, MessageIntake
from quire.errors import ServerError
from quire.failpoints import failpoint
from quire.logger import init_logger
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequestType, UtilityOutput
from quire.wire.handshake import (
    COORDINATOR,
    ENGINE_CORE_DEAD,
    OUTPUT_LINGER_MS,
    SUBSCRIPTION,
    engine_identity,
)
from quire.wire.serial import MsgpackEncoder
from quire.wire.sockets import CurveKeys, make_zmq_socket

logger = init_logger(__name__)

OutputItem = tuple[int, EngineCoreOutputs] | ClientLink | bytes | None
"""Outputs for a client; a client that has disconnected or reconnected; ENGINE_CORE_DEAD; or None: the end."""
GREETING = [EngineCoreRequestType.GREET.value, b"\xc0"]
"""Frames of a GREET: it has no payload."""
MESSAGES_PER_ROUND = 256
"""Messages taken from one client before the others have their turn."""
_EVENT = struct.Struct("=Hi")
"""Layout of the first frame of a connection event: event and value (zmq_socket_monitor(3))."""
_CONNECTION_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class IOThread(threading.Thread):
    """A daemon thread that signals when its sockets are open, and reports to `on_failure` why it failed."""

    def __init__(self, name: str, on_failure: Callable[[str], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._on_failure = on_failure
        self.is_open = threading.Event()
        self.busy_since: float | None = None
        """Start of the work on the current message (CLOCK_MONOTONIC); None while the thread waits for one."""

    def check_progress(self, limit_s: float) -> None:
        """Raises ServerError if one message has taken longer than `limit_s`. Called from another thread."""
        since = self.busy_since
        if since is not None and time.monotonic() - since > limit_s:
            raise ServerError(f"{self.name} has been at one message for more than {limit_s:g} s")

    def run(self) -> None:
        """Runs the thread. Sockets are made and closed here: they belong to this thread."""
        try:
            self._work()
        except zmq.ContextTerminated:  # the process ends, after an error in its loop
            logger.debug("%s ends with the process", self.name)
        except Exception as e:
            logger.exception("%s failed", self.name)
            self._on_failure(f"{self.name} failed: {e}")

    def _work(self) -> None:
        raise NotImplementedError

    def wait_open(self) -> None:
        """Waits until the sockets are open. Raises RuntimeError if the thread ends before that."""
        while not self.is_open.wait(0.05):
            if not self.is_alive():
                raise RuntimeError(f"{self.name} died during startup")


class InputThread(IOThread):
    """Receives from all clients.

    The first frame on each connection is a ready frame: the client may begin, and its ROUTER learns the route to the
    core. `make_ready_frame` builds it from the number of the next message to the client. With `owner_first` only client
    0 gets one before `admit_clients`, so that it can restore the core's state before others use it.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        addresses: Sequence[str],
        engine_index: int,
        make_ready_frame: Callable[[int], bytes],
        intake: MessageIntake,
        *,
        on_link: Callable[[ClientLink], None],
        on_failure: Callable[[str], None],
        curve: CurveKeys | None = None,
        owner_first: bool = False,
        coordinator: str | None = None,
    ) -> None:
        """`coordinator` is the address of its orders; the thread is open once it has answered the subscription."""
        super().__init__("EngineCoreInput", on_failure)
        self._coordinator = coordinator
        self._connect_socket = partial(make_zmq_socket, context, bind=False, curve=curve)
        self._addresses = addresses
        self._identity = engine_identity(engine_index)
        self._make_ready_frame = make_ready_frame
        self._intake = intake
        self._on_link = on_link
        self._lost: set[int] = set()
        """Clients that are disconnected."""
        self._num_returns: Counter[int] = Counter()
        """Number of reconnections of each client that are not greeted yet."""
        self._are_admitted = not owner_first
        self._launcher: tuple[int, Callable[[], None]] | None = None
        self._orders: deque[Callable[[list[zmq.Socket[Any]]], None]] = deque()
        """Calls on the sockets that other threads have requested."""
        self._is_stopping = False
        self._order_reader, self._order_writer = os.pipe()

    def watch_launcher(self, pipe: int, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` when the other end of `pipe` is closed. Call it before `start`."""
        self._launcher = pipe, on_gone

    def stop(self, timeout_s: float) -> None:
        """Ends the thread and waits for it. Messages that have arrived by then are still taken in. To be called
        once."""
        self._is_stopping = True
        os.write(self._order_writer, b".")
        self.join(timeout_s)
        if not self.is_alive():
            os.close(self._order_reader)
            os.close(self._order_writer)

    def admit_clients(self) -> None:
        """Lets the other clients begin. Callable from any thread; idempotent."""
        self._order(self._admit)

    def greet(self, client_index: int, next_sequence: int) -> None:
        """Lets a reconnected client begin; `next_sequence` numbers its next message. Callable from any thread."""
        self._order(lambda sockets: self._greet(sockets, client_index, next_sequence))

    def _order(self, order: Callable[[list[zmq.Socket[Any]]], None]) -> None:
        self._orders.append(order)
        os.write(self._order_writer, b".")

    def _admit(self, sockets: list[zmq.Socket[Any]]) -> None:
        if self._are_admitted:
            return
        self._are_admitted = True
        for client_index, socket in enumerate(sockets[1:], start=1):
            if not self._is_away(client_index):  # otherwise it is greeted after its reconnection
                socket.send(self._make_ready_frame(1))

    def _greet(self, sockets: list[zmq.Socket[Any]], client_index: int, next_sequence: int) -> None:
        self._num_returns[client_index] -= 1
        if not self._is_away(client_index) and (self._are_admitted or client_index == 0):
            sockets[client_index].send(self._make_ready_frame(next_sequence))

    def _is_away(self, client_index: int) -> bool:
        """Returns whether a message may come from a frontend that has ended, or from before its reconnection."""
        return client_index in self._lost or self._num_returns[client_index] > 0

    def _work(self) -> None:
        with ExitStack() as stack:
            sockets = [self._connect(address, stack) for address in self._addresses]
            monitors = [_watch(socket, stack) for socket in sockets]
            orders = self._subscribe(stack)
            for socket in sockets if self._are_admitted else sockets[:1]:
                socket.send(self._make_ready_frame(1))
            self.is_open.set()
            self._receive_until_stopped(sockets, monitors, orders)

    def _subscribe(self, stack: ExitStack) -> list[zmq.Socket[Any]]:
        """Returns the socket of the coordinator's orders, if there is one. Its first message says that none is lost
        from now on."""
        if self._coordinator is None:
            return []
        socket = self._connect_socket(self._coordinator, zmq.XSUB)
        stack.callback(socket.close, linger=0)
        socket.send(SUBSCRIPTION)
        self._intake.take_order(socket.recv_multipart())
        return [socket]

    def _connect(self, address: str, stack: ExitStack) -> zmq.Socket[Any]:
        socket = self._connect_socket(address, zmq.DEALER, identity=self._identity)
        stack.callback(socket.close, linger=0)
        return socket

    def _receive_until_stopped(
        self, sockets: list[zmq.Socket[Any]], monitors: list[zmq.Socket[Any]], coordinator: list[zmq.Socket[Any]]
    ) -> None:
        poller = zmq.Poller()
        for socket in (*sockets, *monitors, *coordinator, self._order_reader):
            poller.register(socket, zmq.POLLIN)
        if self._launcher is not None:
            poller.register(self._launcher[0], zmq.POLLIN)
        while True:
            ready = {source for source, _ in poller.poll()}
            for client_index, (socket, monitor) in enumerate(zip(sockets, monitors, strict=True)):
                if monitor in ready:
                    self._follow_connection(client_index, monitor)
                if socket in ready:
                    self._receive(client_index, socket)
            for socket in coordinator:
                if socket in ready:
                    self._intake.take_order(socket.recv_multipart())
            if self._launcher is not None and self._launcher[0] in ready:
                self._read_launcher(poller)
            if self._order_reader in ready:
                os.read(self._order_reader, 4096)
                while self._orders:
                    self._orders.popleft()(sockets)
                if self._is_stopping:
                    for client_index, socket in enumerate(sockets):
                        self._receive(client_index, socket)
                    return

    def _receive(self, client_index: int, socket: zmq.Socket[Any]) -> None:
        for _ in range(MESSAGES_PER_ROUND):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if [frame.bytes for frame in frames] == GREETING:
                self._begin_again(client_index)
            elif not self._is_away(client_index):
                self.busy_since = time.monotonic()
                self._intake.take_message(client_index, [frame.buffer for frame in frames])
                self.busy_since = None

    def _begin_again(self, client_index: int) -> None:
        """Handles a client that has given this core up: its connection was lost, as it sees it, and is back."""
        if not self._is_away(client_index):
            self._num_returns[client_index] += 1
            self._on_link(ClientLink(client_index, is_up=False))
            self._on_link(ClientLink(client_index, is_up=True))

    def _follow_connection(self, client_index: int, monitor: zmq.Socket[Any]) -> None:
        event, _ = _EVENT.unpack(monitor.recv_multipart()[0])
        if event == zmq.Event.DISCONNECTED and client_index not in self._lost:
            logger.warning("client %d has disconnected: its requests are aborted", client_index)
            self._lost.add(client_index)
            self._on_link(ClientLink(client_index, is_up=False))
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED and client_index in self._lost:
            logger.info("client %d is back", client_index)
            self._lost.discard(client_index)
            self._num_returns[client_index] += 1
            self._on_link(ClientLink(client_index, is_up=True))

    def _read_launcher(self, poller: zmq.Poller) -> None:
        assert self._launcher is not None  # it has just been polled
        pipe, on_gone = self._launcher
        if not os.read(pipe, 4096):
            poller.unregister(pipe)
            on_gone()


def _watch(socket: zmq.Socket[Any], stack: ExitStack) -> zmq.Socket[Any]:
    """Returns a socket that reports the connection events of `socket`."""
    monitor = socket.get_monitor_socket(_CONNECTION_EVENTS)
    stack.callback(monitor.close, linger=0)
    stack.callback(socket.disable_monitor)
    return monitor


class OutputThread(IOThread):
    """Encodes and sends what the loop queues, until it gets the end or ENGINE_CORE_DEAD.

    msgpack is written into buffers that are used again. Large messages and arrays are sent without a copy, so a buffer
    is used again only after zmq has released it.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        addresses: Sequence[str],
        queue: SimpleQueue[OutputItem],
        *,
        engine_index: int,
        incarnation: int,
        on_failure: Callable[[str], None],
        on_linked: Callable[[int, int], None] = lambda client_index, next_sequence: None,
        curve: CurveKeys | None = None,
        coordinator: str | None = None,
    ) -> None:
        """`on_linked` is called when a disconnected client can be reached again, with the number of its next
        message. `coordinator` is the address of the client `COORDINATOR`."""
        super().__init__("EngineCoreOutput", on_failure)
        self._context, self._curve = context, curve
        self._addresses = dict(enumerate(addresses))
        if coordinator is not None:
            self._addresses[COORDINATOR] = coordinator
        self._queue = queue
        self._engine_index, self._incarnation = engine_index, incarnation
        self._num_sent = dict.fromkeys(self._addresses, 0)
        """Number of messages sent to each client while it was connected."""
        self._on_linked = on_linked
        self._encoder = MsgpackEncoder()
        self._sending: deque[tuple[zmq.MessageTracker, bytearray]] = deque()
        self._free: list[bytearray] = []

    def _work(self) -> None:
        sockets: dict[int, zmq.Socket[Any]] = {}
        try:
            for client_index in self._addresses:
                sockets[client_index] = self._connect(client_index)
            self.is_open.set()
            while (item := self._queue.get()) is not None:
                if isinstance(item, ClientLink):
                    self._follow_link(sockets, item)
                elif isinstance(item, tuple):
                    self.busy_since = time.monotonic()
                    self._send(sockets, *item)
                    self.busy_since = None
                else:
                    for client_index, socket in sockets.items():
                        if client_index != COORDINATOR:
                            socket.send(ENGINE_CORE_DEAD)
                    return
        finally:
            for socket in sockets.values():
                socket.close(linger=OUTPUT_LINGER_MS)

    def _connect(self, client_index: int) -> zmq.Socket[Any]:
        address = self._addresses[client_index]
        return make_zmq_socket(self._context, address, zmq.PUSH, linger_ms=OUTPUT_LINGER_MS, curve=self._curve)

    def _follow_link(self, sockets: dict[int, zmq.Socket[Any]], link: ClientLink) -> None:
        """Discards the messages for a client that has disconnected, so that they do not accumulate."""
        if link.is_up:
            sockets[link.client_index] = self._connect(link.client_index)
            self._on_linked(link.client_index, self._num_sent[link.client_index] + 1)
        else:
            sockets.pop(link.client_index).close(linger=0)

    def _send(self, sockets: dict[int, zmq.Socket[Any]], client_index: int, outputs: EngineCoreOutputs) -> None:
        socket = sockets.get(client_index)
        if socket is None:
            return
        self._num_sent[client_index] += 1
        outputs.sequence = self._num_sent[client_index]
        outputs.engine_index, outputs.incarnation = self._engine_index, self._incarnation
        self._encode_and_send(socket, outputs)

    def _encode_and_send(self, socket: zmq.Socket[Any], outputs: EngineCoreOutputs) -> None:
        buffer = self._take_buffer()
        try:
            frames = self._encoder.encode_into(outputs, buffer)
        except TypeError as e:
            if outputs.utility_output is None:
                raise
            outputs.utility_output = _not_sendable(outputs.utility_output, e)
            frames = self._encoder.encode_into(outputs, buffer)
        failpoint("core.output.send")
        last = len(frames) - 1
        tracker = socket.send(frames[0], zmq.SNDMORE if last else 0, copy=False, track=True)
        for number, frame in enumerate(frames[1:], start=1):
            socket.send(frame, 0 if number == last else zmq.SNDMORE, copy=False)
        assert tracker is not None  # its monitor was requested
        self._sending.append((tracker, buffer))

    def _take_buffer(self) -> bytearray:
        while self._sending and self._sending[0][0].done:
            _, buffer = self._sending.popleft()
            if len(self._free) <= len(self._addresses):
                self._free.append(buffer)
        return self._free.pop() if self._free else bytearray()


def _not_sendable(answer: UtilityOutput, error: TypeError) -> UtilityOutput:
    return UtilityOutput(answer.call_id, failure_message=f"the call has been made; its result cannot be sent: {error}")

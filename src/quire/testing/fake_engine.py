"""An engine core that a test controls: it speaks the real wire protocol, rightly or wrongly.

For tests of frontends, without an engine, a model or a second process. It plays the core's part on the frontend's own
sockets::

    with FakeEngine.start(handshake_address) as engine:       # HELLO, READY, then the ready frame
        add = engine.receive().payload                        # an EngineCoreRequest
        engine.send_tokens(add.request_id, [5, 6], finish_reason=FinishReason.LENGTH)

or `FakeEngine(addresses)` for a frontend that makes no handshake. `serve` answers by itself. Each fault is one
call: another protocol version (`start`), meaningless frames (`send_frames`), a repeated message (`repeat`), a missing
one or one of another incarnation (`sequence`, `incarnation`), silence, an end without a message (`close`).

Waits end after `timeout_s` with TimeoutError. Not thread-safe: one thread, which may be the test's own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import zmq

from quire.wire.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from quire.wire.handshake import (
    ENGINE_CORE_DEAD,
    HANDSHAKE_LINGER_MS,
    PROTOCOL_VERSION,
    EngineHandshakeMetadata,
    EngineStatus,
    EngineZmqAddresses,
    engine_identity,
)
from quire.wire.serial import Frame, MsgpackDecoder, MsgpackEncoder
from quire.wire.sockets import CurveKeys, make_zmq_socket

TIMEOUT_S = 60.0
READY = EngineCoreReadyResponse(
    max_model_len=4096,
    num_gpu_blocks=1001,
    block_size=16,
    kv_cache_size_tokens=16000,
    kv_cache_max_concurrency=3.9,
    supported_tasks=("generate",),
)
"""Answers of its start-up to a frontend."""
PAYLOADS: dict[EngineCoreRequestType, Any] = {
    EngineCoreRequestType.ADD: EngineCoreRequest,
    EngineCoreRequestType.ABORT: list[str],
    EngineCoreRequestType.UTILITY: tuple[int, int, str, tuple[Any, ...]],
}
"""Body of a message, by type. A control call has client index, call id, method and arguments."""


class FromFrontend(NamedTuple):
    """A received message: an `EngineCoreRequest`, a list of ids to abort, or a control call."""

    client_index: int
    type: EngineCoreRequestType
    payload: Any


class FakeHandshake:
    """The core's side of the handshake socket, one message at a time."""

    def __init__(
        self,
        address: str,
        *,
        engine_index: int = 0,
        timeout_s: float = TIMEOUT_S,
        curve: CurveKeys | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = make_zmq_socket(
            self._context,
            address,
            zmq.DEALER,
            bind=False,
            identity=engine_identity(engine_index),
            linger_ms=HANDSHAKE_LINGER_MS,
            curve=curve,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, status: EngineStatus) -> None:
        """Sends HELLO, READY or FAILED, in any order."""
        self.say_frames([msgspec.msgpack.encode(status)])

    def say_frames(self, frames: Sequence[Frame]) -> None:
        """Sends any bytes."""
        self._socket.send_multipart(frames)

    def hear(self) -> EngineHandshakeMetadata:
        """Returns the frontend's answer to HELLO."""
        _wait(self._socket, self._timeout_s, "the frontend has not answered HELLO")
        return MsgpackDecoder(EngineHandshakeMetadata).decode(self._socket.recv_multipart())

    def close(self) -> None:
        """Closes the socket. Messages sent before are still delivered. Idempotent."""
        self._socket.close()
        self._context.term()


class FakeEngine:
    """An engine core controlled by a test; see the module. Each message is stamped with `incarnation` and the next
    number of `sequence` for its client. A test may change both."""

    def __init__(
        self,
        addresses: EngineZmqAddresses,
        *,
        engine_index: int = 0,
        incarnation: int = 0,
        ready: EngineCoreReadyResponse = READY,
        timeout_s: float = TIMEOUT_S,
        curve: CurveKeys | None = None,
    ) -> None:
        self.engine_index, self.incarnation, self.timeout_s = engine_index, incarnation, timeout_s
        self.metadata: EngineHandshakeMetadata | None = None
        """The frontend's answer to HELLO; None without a handshake."""
        self.sequence = [0] * len(addresses.outputs)
        """Number of the last message, by client."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._inputs = [
            make_zmq_socket(
                self._context, address, zmq.DEALER, bind=False, identity=engine_identity(engine_index), curve=curve
            )
            for address in addresses.inputs
        ]
        self._outputs = [make_zmq_socket(self._context, a, zmq.PUSH, curve=curve) for a in addresses.outputs]
        self._last: list[list[bytes]] = [[] for _ in addresses.outputs]
        """The last message, by client."""
        self.send_ready(ready)

    @classmethod
    def start(
        cls,
        handshake_address: str,
        *,
        engine_index: int = 0,
        protocol_version: int = PROTOCOL_VERSION,
        ready: EngineCoreReadyResponse = READY,
        timeout_s: float = TIMEOUT_S,
        curve: CurveKeys | None = None,
    ) -> Self:
        """Makes the handshake and returns the core. Raises TimeoutError if the frontend does not answer."""
        with FakeHandshake(handshake_address, engine_index=engine_index, timeout_s=timeout_s, curve=curve) as handshake:
            handshake.say(EngineStatus("HELLO", protocol_version=protocol_version, pid=os.getpid()))
            metadata = handshake.hear()
            handshake.say(EngineStatus("READY", protocol_version=protocol_version, pid=os.getpid()))
        engine = cls(
            metadata.addresses,
            engine_index=engine_index,
            incarnation=metadata.incarnation,
            ready=ready,
            timeout_s=timeout_s,
            curve=curve,
        )
        engine.metadata = metadata
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnects without an end message: undelivered messages are lost. Idempotent."""
        for socket in (*self._inputs, *self._outputs):
            socket.close(linger=0)
        self._context.term()

    # -- in -------------------------------------------------------------------------------------------------------

    def receive(self) -> FromFrontend:
        """Returns the next message of any client. Raises TimeoutError, and WireError for an invalid one."""
        index, frames = self.receive_frames()
        kind = EngineCoreRequestType(frames[0])
        return FromFrontend(index, kind, MsgpackDecoder(PAYLOADS[kind]).decode(frames[1:]))

    def receive_frames(self) -> tuple[int, list[bytes]]:
        """Returns the same undecoded: client index, frames. Raises TimeoutError."""
        poller = zmq.Poller()
        for socket in self._inputs:
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(int(self.timeout_s * 1000)))
        for index, socket in enumerate(self._inputs):
            if socket in ready:
                return index, socket.recv_multipart()
        raise TimeoutError(f"no message from a frontend within {self.timeout_s:g} s")

    def serve(self, answer: Callable[[FromFrontend], list[EngineCoreOutputs]], until: Callable[[], bool]) -> None:
        """Sends what `answer` returns for each message, until `until` is true (asked after each) or TimeoutError."""
        while not until():
            message = self.receive()
            for outputs in answer(message):
                self.send(outputs, message.client_index)

    # -- out ------------------------------------------------------------------------------------------------------

    def send_ready(self, ready: EngineCoreReadyResponse = READY) -> None:
        """Sends the ready frame to every client, with the number of the next message of that client."""
        stamped = dataclasses.replace(ready, engine_index=self.engine_index, incarnation=self.incarnation)
        for socket, sequence in zip(self._inputs, self.sequence, strict=True):
            socket.send(msgspec.msgpack.encode(dataclasses.replace(stamped, next_sequence=sequence + 1)))

    def send(self, outputs: EngineCoreOutputs, client_index: int = 0) -> None:
        """Sends outputs, stamped and numbered."""
        self.sequence[client_index] += 1
        outputs.engine_index, outputs.incarnation = self.engine_index, self.incarnation
        outputs.sequence = self.sequence[client_index]
        self.send_frames([bytes(frame) for frame in MsgpackEncoder().encode(outputs)], client_index)

    def send_tokens(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        finish_reason: FinishReason | None = None,
        client_index: int = 0,
    ) -> None:
        """Sends new tokens of one request."""
        output = EngineCoreOutput(request_id, list(token_ids), finish_reason=finish_reason)
        self.send(EngineCoreOutputs(outputs=[output]), client_index)

    def answer_utility(self, call: FromFrontend, result: Any = None, failure_message: str | None = None) -> None:
        """Answers a control call that `receive` has returned."""
        client_index, call_id, _, _ = call.payload
        self.send(EngineCoreOutputs(utility_output=UtilityOutput(call_id, failure_message, result)), client_index)

    def send_frames(self, frames: Sequence[bytes], client_index: int = 0) -> None:
        """Sends any frames as a message to one client."""
        self._last[client_index] = list(frames)
        self._outputs[client_index].send_multipart(frames)

    def repeat(self, client_index: int = 0) -> None:
        """Sends the last message again, with its number."""
        self._outputs[client_index].send_multipart(self._last[client_index])

    def send_to_input(self, frames: Sequence[bytes], client_index: int = 0) -> None:
        """Sends any frames on the socket on which a frontend expects ready frames only."""
        self._inputs[client_index].send_multipart(frames)

    def send_dead(self) -> None:
        """Sends ENGINE_CORE_DEAD to every client."""
        for index in range(len(self._outputs)):
            self.send_frames([ENGINE_CORE_DEAD], index)


def _wait(socket: zmq.Socket[Any], timeout_s: float, what: str) -> None:
    if not socket.poll(int(timeout_s * 1000)):
        raise TimeoutError(f"{what} within {timeout_s:g} s")

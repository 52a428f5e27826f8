"""FakeEngine sends what a core sends: received here with sockets made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq

from quire.sampling_params import SamplingParams
from quire.testing.fake_engine import READY, FakeEngine, FakeHandshake, FromFrontend
from quire.wire.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from quire.wire.handshake import (
    ENGINE_CORE_DEAD,
    PROTOCOL_VERSION,
    EngineHandshakeMetadata,
    EngineStatus,
    EngineZmqAddresses,
    engine_identity,
)
from quire.wire.serial import MsgpackDecoder, MsgpackEncoder, WireError
from quire.wire.sockets import SocketDirectory, make_zmq_socket

ARRIVES_MS = 120_000


class Frontend:
    """The frontend's sockets: one handshake, two clients."""

    def __init__(self, directory: SocketDirectory) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.addresses = EngineZmqAddresses(
            [directory.endpoint("in0"), directory.endpoint("in1")],
            [directory.endpoint("out0"), directory.endpoint("out1")],
        )
        self.handshake_address = directory.endpoint("handshake")
        self.handshake = make_zmq_socket(self.context, self.handshake_address, zmq.ROUTER)
        self.inputs = [make_zmq_socket(self.context, a, zmq.ROUTER) for a in self.addresses.inputs]
        self.outputs = [make_zmq_socket(self.context, a, zmq.PULL) for a in self.addresses.outputs]

    def hear(self, socket: zmq.Socket[Any]) -> list[bytes]:
        assert socket.poll(ARRIVES_MS)
        return socket.recv_multipart()

    def hear_outputs(self, client_index: int = 0) -> EngineCoreOutputs:
        return MsgpackDecoder(EngineCoreOutputs).decode(self.hear(self.outputs[client_index]))

    def send(self, kind: EngineCoreRequestType, payload: Any, client_index: int = 0) -> None:
        identity = engine_identity(0)
        self.inputs[client_index].send_multipart([identity, kind.value, *MsgpackEncoder().encode(payload)])

    def close(self) -> None:
        for socket in (self.handshake, *self.inputs, *self.outputs):
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    directory = SocketDirectory()
    frontend = Frontend(directory)
    yield frontend
    frontend.close()
    directory.remove()


@pytest.fixture
def engine(frontend: Frontend) -> Iterator[FakeEngine]:
    with FakeEngine(frontend.addresses, incarnation=2) as engine:
        for index in (0, 1):
            identity, frame = frontend.hear(frontend.inputs[index])
            ready = msgspec.msgpack.decode(frame, type=EngineCoreReadyResponse)
            assert (identity, ready.engine_index, ready.incarnation) == (engine_identity(0), 0, 2)
            assert ready.num_gpu_blocks == READY.num_gpu_blocks
        yield engine


def test_the_handshake_is_that_of_a_core(frontend: Frontend) -> None:
    with FakeHandshake(frontend.handshake_address, engine_index=3) as handshake:
        handshake.say(EngineStatus("HELLO"))
        identity, frame = frontend.hear(frontend.handshake)
        assert identity == engine_identity(3)
        assert msgspec.msgpack.decode(frame, type=EngineStatus) == EngineStatus("HELLO")
        metadata = EngineHandshakeMetadata(frontend.addresses, b"config", incarnation=4)
        frontend.handshake.send_multipart([identity, msgspec.msgpack.encode(metadata)])
        assert handshake.hear() == metadata
        handshake.say(EngineStatus("FAILED", error_type="ModelLoadError", message="no weights"))
        assert b"no weights" in frontend.hear(frontend.handshake)[1]


def test_start_takes_incarnation_and_addresses_from_the_frontend(frontend: Frontend) -> None:
    metadata = EngineHandshakeMetadata(frontend.addresses, b"config", incarnation=4)
    with ThreadPoolExecutor(1) as thread:
        started = thread.submit(FakeEngine.start, frontend.handshake_address)
        identity, _ = frontend.hear(frontend.handshake)
        frontend.handshake.send_multipart([identity, msgspec.msgpack.encode(metadata)])
        with started.result(timeout=10) as engine:
            assert msgspec.msgpack.decode(frontend.hear(frontend.handshake)[1], type=EngineStatus).status == "READY"
            ready = msgspec.msgpack.decode(frontend.hear(frontend.inputs[0])[1], type=EngineCoreReadyResponse)
            assert (ready.incarnation, engine.incarnation, engine.metadata) == (4, 4, metadata)


def test_a_frontend_that_does_not_answer_is_given_up(frontend: Frontend) -> None:
    with pytest.raises(TimeoutError, match="HELLO within"):
        FakeEngine.start(frontend.handshake_address, protocol_version=99, timeout_s=0.05)
    status = msgspec.msgpack.decode(frontend.hear(frontend.handshake)[1], type=EngineStatus)
    assert (status.status, status.protocol_version) == ("HELLO", 99)
    assert PROTOCOL_VERSION != 99


def test_messages_arrive_decoded(frontend: Frontend, engine: FakeEngine) -> None:
    request = EngineCoreRequest("r", [1, 2], SamplingParams(max_tokens=3), None, 0.5)
    frontend.send(EngineCoreRequestType.ADD, request)
    assert engine.receive() == FromFrontend(0, EngineCoreRequestType.ADD, request)
    frontend.send(EngineCoreRequestType.ABORT, ["r"], client_index=1)
    assert engine.receive() == FromFrontend(1, EngineCoreRequestType.ABORT, ["r"])
    frontend.send(EngineCoreRequestType.ADD, {"not": "a request"})
    with pytest.raises(WireError):
        engine.receive()


def test_outputs_are_stamped_and_numbered_per_client(frontend: Frontend, engine: FakeEngine) -> None:
    engine.send_tokens("r", [5])
    engine.send_tokens("s", [6], client_index=1)
    engine.send_tokens("r", [7], finish_reason=FinishReason.LENGTH)
    first, last, other = frontend.hear_outputs(), frontend.hear_outputs(), frontend.hear_outputs(1)
    assert [o.sequence for o in (first, last, other)] == [1, 2, 1]
    assert first.incarnation == 2
    assert last.outputs == [EngineCoreOutput("r", [7], finish_reason=FinishReason.LENGTH)]
    assert other.outputs == [EngineCoreOutput("s", [6])]


def test_control_calls_are_answered(frontend: Frontend, engine: FakeEngine) -> None:
    frontend.send(EngineCoreRequestType.UTILITY, (1, 77, "is_sleeping", ()), client_index=1)
    call = engine.receive()
    engine.answer_utility(call, result=True)
    answer = frontend.hear_outputs(1).utility_output
    assert answer is not None
    assert (answer.call_id, answer.result, answer.failure_message) == (77, True, None)


def test_a_fake_engine_can_send_what_no_core_does(frontend: Frontend, engine: FakeEngine) -> None:
    engine.send_frames([b"\xc1", b"junk"])
    assert frontend.hear(frontend.outputs[0]) == [b"\xc1", b"junk"]
    engine.send_tokens("r", [5])
    engine.repeat()
    assert frontend.hear(frontend.outputs[0]) == frontend.hear(frontend.outputs[0])
    engine.sequence[0] += 3
    engine.incarnation = 1
    engine.send_tokens("r", [5])
    outputs = frontend.hear_outputs()
    assert (outputs.sequence, outputs.incarnation) == (5, 1)
    engine.send_to_input([b"what"])
    assert frontend.hear(frontend.inputs[0]) == [engine_identity(0), b"what"]
    engine.send_dead()
    assert frontend.hear(frontend.outputs[1]) == [ENGINE_CORE_DEAD]


def test_a_fake_engine_serves_what_a_function_answers(frontend: Frontend, engine: FakeEngine) -> None:
    seen: list[FromFrontend] = []

    def answer(message: FromFrontend) -> list[EngineCoreOutputs]:
        seen.append(message)
        request = message.payload
        return [
            EngineCoreOutputs(outputs=[EngineCoreOutput(request.request_id, [token])])
            for token in request.prompt_token_ids
        ]

    for request_id, prompt in (("a", [1, 2]), ("b", [3])):
        frontend.send(EngineCoreRequestType.ADD, EngineCoreRequest(request_id, prompt, None, None, 0.0))
    engine.serve(answer, until=lambda: len(seen) == 2)
    tokens = [frontend.hear_outputs().outputs[0] for _ in range(3)]
    assert [(o.request_id, o.new_token_ids) for o in tokens] == [("a", [1]), ("a", [2]), ("b", [3])]


def test_silence_is_a_timeout(engine: FakeEngine) -> None:
    engine.timeout_s = 0.01
    with pytest.raises(TimeoutError, match="no message"):
        engine.receive()

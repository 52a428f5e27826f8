"""The thread between sockets and link, against an engine by hand."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq

from quire.errors import EngineDeadError, ModelLoadError, ServerError, ValidationError
from quire.frontend.client.coordinator_link import CoordinatorLink
from quire.frontend.client.link import EngineLink, LinkState
from quire.frontend.client.link_thread import AttachedLinkThread, LinkThread
from quire.frontend.supervision.quarantine import CoreDeath
from quire.testing.fake_engine import READY, FakeEngine
from quire.wire.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from quire.wire.execution import LogprobsTensors
from quire.wire.handshake import SUBSCRIPTION, EngineZmqAddresses
from quire.wire.serial import MsgpackEncoder
from quire.wire.sockets import SocketDirectory, make_zmq_socket

from .model_core import make_request

DEADLINE_S = 120.0


class Sink:
    """Everything that was handed on."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[EngineCoreOutputs | EngineDeadError] = queue.SimpleQueue()

    def put_outputs(self, outputs: EngineCoreOutputs) -> None:
        self.queue.put(outputs)

    def put_end(self, error: EngineDeadError) -> None:
        self.queue.put(error)

    def take(self) -> EngineCoreOutputs:
        item = self.queue.get(timeout=DEADLINE_S)
        assert isinstance(item, EngineCoreOutputs)
        return item

    def take_end(self) -> EngineDeadError:
        while True:
            item = self.queue.get(timeout=DEADLINE_S)
            if isinstance(item, EngineDeadError):
                return item


class Stage:
    """A thread on sockets of its own."""

    def __init__(self, *, attached_patience_s: float | None = None, coordinator: str | None = None) -> None:
        self.directory = SocketDirectory()
        self.addresses = EngineZmqAddresses([self.directory.endpoint("i")], [self.directory.endpoint("o")])
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sink = Sink()
        self.link = EngineLink()
        router = make_zmq_socket(self.context, self.addresses.inputs[0], zmq.ROUTER)
        pull = make_zmq_socket(self.context, self.addresses.outputs[0], zmq.PULL)
        if attached_patience_s is None:
            self.thread = LinkThread(self.link, router, pull, self.sink)
        else:
            self.thread = AttachedLinkThread(self.link, router, pull, self.sink, attached_patience_s)
        if coordinator is not None:
            self.thread.coordinator = CoordinatorLink(self.context, coordinator)
        self.thread.start()

    def start_engine(self, incarnation: int = 0) -> FakeEngine:
        engine = FakeEngine(self.addresses, incarnation=incarnation)
        self.wait_until(lambda: self.thread.was_connected(incarnation))
        return engine

    def add(self, request: EngineCoreRequest) -> None:
        frames = MsgpackEncoder().encode(request)
        self.thread.post(lambda: self.thread.add_request(request, frames))

    def wait_until(self, condition: object) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < end, "it does not happen"
            time.sleep(0.002)

    def close(self) -> None:
        self.thread.stop()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        self.context.term()
        self.directory.remove()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def engine(stage: Stage) -> Iterator[FakeEngine]:
    with stage.start_engine() as engine:
        yield engine


def test_a_request_and_its_outputs(stage: Stage, engine: FakeEngine) -> None:
    stage.add(request := make_request("a"))
    _, frames = engine.receive_frames()
    assert frames == [EngineCoreRequestType.ADD.value, *MsgpackEncoder().encode(request)]
    engine.send_tokens("a", [7])
    engine.send_tokens("a", [8], finish_reason=FinishReason.LENGTH)
    assert [stage.sink.take().outputs[0].new_token_ids for _ in range(2)] == [[7], [8]]
    assert stage.thread.started.result() == READY
    assert stage.thread.name == "EngineCoreOutputQueueThread"
    assert stage.thread.daemon


def test_the_coordinator_is_followed_and_learns_of_a_first_request() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    directory = SocketDirectory()
    front = make_zmq_socket(context, directory.endpoint("front"), zmq.XPUB)
    stage = Stage(coordinator=directory.endpoint("front"))
    follower = stage.thread.coordinator
    assert follower is not None
    with stage.start_engine() as engine:
        assert front.recv() == SUBSCRIPTION
        for message in (b"garbage", msgspec.msgpack.encode((4, False))):
            front.send(message)
        stage.wait_until(lambda: follower.wave == 4)
        stage.add(make_request("a"))
        assert engine.receive().type is EngineCoreRequestType.ADD
        assert msgspec.msgpack.decode(front.recv()) == [0, 4]
        stage.thread.post(lambda: stage.link.abort_requests(["a"]))
        assert engine.receive().payload == ["a"]
    stage.close()
    assert not front.poll(0) or front.recv() == b"\0"  # aborts are not reported
    front.close()
    context.term()
    directory.remove()


def test_an_abort_and_a_control_call(stage: Stage, engine: FakeEngine) -> None:
    stage.add(make_request("a"))
    engine.receive()
    stage.thread.post(lambda: stage.link.abort_requests(["a"]))
    assert engine.receive().payload == ["a"]
    future = stage.thread.post_call("is_sleeping", (1, "x"))
    call = engine.receive()
    assert (call.type, call.payload) == (EngineCoreRequestType.UTILITY, (0, 1, "is_sleeping", (1, "x")))
    engine.answer_utility(call, result=[1, 2])
    assert future.result(DEADLINE_S) == [1, 2]


@pytest.mark.parametrize(
    ("error_type", "expected"),
    [("ModelLoadError", ModelLoadError), ("ValidationError", ValidationError), ("", ServerError)],
)
def test_a_failed_control_call_raises_what_the_core_raised(
    stage: Stage, engine: FakeEngine, error_type: str, expected: type[Exception]
) -> None:
    future = stage.thread.post_call("update_weights", ("/w",))
    _, call_id, _, _ = engine.receive().payload
    engine.send(EngineCoreOutputs(utility_output=UtilityOutput(call_id, "no such file", None, error_type)))
    with pytest.raises(expected, match="no such file") as raised:
        future.result(DEADLINE_S)
    assert type(raised.value) is expected


def test_large_arrays_arrive_in_frames_of_their_own_uncopied_and_read_only(stage: Stage, engine: FakeEngine) -> None:
    stage.add(make_request("a"))
    engine.receive()
    ids = np.arange(4000, dtype=np.int32).reshape(1000, 4)
    tensors = LogprobsTensors(ids, ids.astype(np.float32), np.arange(1000, dtype=np.int32))
    engine.send(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1], new_prompt_logprobs_tensors=tensors)]))
    (output,) = stage.sink.take().outputs
    assert output.new_prompt_logprobs_tensors is not None
    got = output.new_prompt_logprobs_tensors.logprob_token_ids
    assert np.array_equal(got, ids)
    assert not got.flags.owndata
    assert not got.flags.writeable


def test_a_large_array_of_a_request_goes_in_a_frame_of_its_own(stage: Stage, engine: FakeEngine) -> None:
    embeds = np.arange(1 << 16, dtype=np.float32)
    stage.add(make_request("a", prompt_embeds=embeds))
    message = engine.receive()
    assert np.array_equal(message.payload.prompt_embeds, embeds)


def test_wrong_messages_are_dropped_and_counted(stage: Stage, engine: FakeEngine) -> None:
    stage.add(make_request("a"))
    engine.receive()
    for frames in ([b""], [b"\xc1garbage"], [b"\x90", b"more"], [b"\x93\x01"]):
        engine.send_frames(frames)
        engine.send_to_input(frames)
    engine.send_tokens("a", [7])
    assert stage.sink.take().outputs[0].new_token_ids == [7]
    stage.wait_until(lambda: stage.link.counts["corrupt"] >= 7)  # an outputs message may be empty: [] is one
    assert stage.thread.is_alive()


def test_a_restarted_engine_is_sent_what_lives(stage: Stage) -> None:
    stage.add(request := make_request("a"))
    with stage.start_engine() as engine:
        engine.receive()
        engine.send_tokens("a", [7, 8])
        stage.sink.take()
    stage.thread.post(lambda: stage.thread.report_death(CoreDeath("killed", "died")))
    with stage.start_engine(1) as engine:
        again = engine.receive().payload
        assert (again.request_id, again.output_token_ids) == ("a", [7, 8])
        assert again.prompt_token_ids == request.prompt_token_ids
        engine.send_tokens("a", [9])
        assert stage.sink.take().outputs[0].new_token_ids == [9]


def test_an_error_of_the_thread_ends_the_engine_in_words(stage: Stage) -> None:
    gone = []
    stage.thread.on_gone = lambda: gone.append(True)
    future = stage.thread.post_call("is_sleeping", ())

    def fail() -> None:
        raise RuntimeError("a bug")

    stage.thread.post(fail)
    assert "a bug" in str(stage.sink.take_end())
    with pytest.raises(EngineDeadError):
        future.result(DEADLINE_S)
    stage.thread.join(DEADLINE_S)
    assert gone == [True]


def test_the_end_gives_everything_live_an_end(stage: Stage, engine: FakeEngine) -> None:
    stage.add(make_request("a"))
    engine.receive()
    future = stage.thread.post_call("is_sleeping", ())
    stage.thread.stop()
    assert stage.sink.take().outputs[0].finish_reason is FinishReason.ERROR
    assert "shut down" in str(stage.sink.take_end())
    with pytest.raises(EngineDeadError):
        future.result(DEADLINE_S)


def test_before_the_first_core_the_end_is_its_error() -> None:
    stage = Stage()
    error = ModelLoadError("no such file")
    stage.thread.post(lambda: stage.thread.fail(error))
    assert stage.thread.started.exception(DEADLINE_S) is error
    stage.close()


# -- a core that another process looks after --------------------------------------------------------------------------


def test_an_attached_client_hears_of_a_death_from_the_connection() -> None:
    stage = Stage(attached_patience_s=60.0)
    with stage.start_engine() as engine:
        stage.add(make_request("a"))
        engine.receive()
    stage.wait_until(lambda: stage.link.state is LinkState.DOWN)
    for incarnation in (1, 2):
        with stage.start_engine(incarnation) as engine:
            assert engine.receive().payload.request_id == "a"
            stage.wait_until(lambda: stage.link.state is LinkState.UP)
    assert stage.link.counts["deaths"] in (2, 3), "of the third it may not have heard yet"
    stage.close()


def test_an_attached_client_believes_the_last_words() -> None:
    """The message is ignored; the client that started the core knows better, from the process itself."""
    stage = Stage(attached_patience_s=60.0)
    with stage.start_engine() as engine:
        engine.send_dead()
        stage.wait_until(lambda: stage.link.counts["deaths"] == 1)
    stage.close()


def test_the_owner_does_not(stage: Stage, engine: FakeEngine) -> None:
    engine.send_dead()
    stage.add(make_request("a"))
    assert engine.receive().payload.request_id == "a"
    assert stage.link.counts["deaths"] == 0


def test_an_attached_client_has_patience_and_an_end_of_it() -> None:
    stage = Stage(attached_patience_s=0.3)
    stage.add(make_request("a"))
    assert "no engine core was there for 0.3 s" in str(stage.sink.take_end())
    assert stage.link.state is LinkState.GONE
    stage.close()

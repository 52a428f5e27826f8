"""The threads that touch sockets, against sockets of the test's own."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from quire.engine.intake import ClientLink, DropCounter, InputItem, MessageIntake
from quire.engine.io_threads import InputThread, IOThread, OutputItem, OutputThread
from quire.engine.request import Request
from quire.errors import ConfigError
from quire.testing.failpoints import InjectedError, injected
from quire.wire.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType, UtilityOutput
from quire.wire.handshake import ENGINE_CORE_DEAD
from quire.wire.serial import MsgpackDecoder
from quire.wire.sockets import make_zmq_socket

from .harness import make_core_request

DEADLINE_S = 120.0
DEADLINE_MS = 120_000
READY = b"ready, the next is 1"


class Frontend:
    """The sockets a core connects to, one pair per client."""

    def __init__(self, context: zmq.Context[Any], directory: Path, num_clients: int) -> None:
        self.context = context
        self.inputs = [f"ipc://{directory}/in{i}" for i in range(num_clients)]
        self.outputs = [f"ipc://{directory}/out{i}" for i in range(num_clients)]
        self.routers = [self.bind(zmq.ROUTER, address) for address in self.inputs]
        self.pulls = [self.bind(zmq.PULL, address) for address in self.outputs]

    def bind(self, kind: int, address: str) -> zmq.Socket[Any]:
        socket = make_zmq_socket(self.context, address, kind, bind=True)
        socket.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return socket

    def rebind(self, client_index: int) -> None:
        """The client's process dies and another one takes its place."""
        self.lose(client_index)
        self.routers[client_index] = self.bind(zmq.ROUTER, self.inputs[client_index])
        self.pulls[client_index] = self.bind(zmq.PULL, self.outputs[client_index])

    def lose(self, client_index: int) -> None:
        self.routers[client_index].close()
        self.pulls[client_index].close()

    def outputs_of(self, client_index: int = 0) -> EngineCoreOutputs:
        """The next message to a client."""
        return MsgpackDecoder(EngineCoreOutputs).decode(self.pulls[client_index].recv_multipart())


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    with tempfile.TemporaryDirectory(prefix="quire-test-") as directory:
        context: zmq.Context[Any] = zmq.Context()
        made = Frontend(context, Path(directory), 2)
        yield made
        context.destroy(linger=0)


# -- input -----------------------------------------------------------------------------------------------------


class Input:
    """An InputThread and what it fills. A client that is back is greeted by the test."""

    def __init__(self, frontend: Frontend, *, owner_first: bool = False) -> None:
        self.queue: queue.SimpleQueue[InputItem] = queue.SimpleQueue()
        self.links: queue.SimpleQueue[ClientLink] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.dropped = DropCounter()
        self.thread = InputThread(
            frontend.context,
            frontend.inputs,
            0,
            lambda sequence: b"ready, the next is %d" % sequence,
            MessageIntake(lambda r: (Request(r), 0), self.queue, queue.Queue(), self.dropped),
            on_link=self.links.put,
            on_failure=self.failures.put,
            owner_first=owner_first,
        )

    def next(self) -> InputItem:
        return self.queue.get(timeout=DEADLINE_S)


@pytest.fixture
def input_of(frontend: Frontend) -> Iterator[Callable[..., Input]]:
    made: list[Input] = []

    def make(**settings: bool) -> Input:
        made.append(Input(frontend, **settings))
        made[-1].thread.start()
        made[-1].thread.wait_open()
        return made[-1]

    yield make
    for one in made:
        one.thread.stop(DEADLINE_S)
        assert not one.thread.is_alive()


def send_request(router: zmq.Socket[Any], request_id: str) -> None:
    router.send_multipart([b"\0\0", b"\0", msgspec.msgpack.encode(make_core_request(request_id))])


def test_every_client_is_told_to_begin(frontend: Frontend, input_of: Callable[..., Input]) -> None:
    received = input_of()
    for index, router in enumerate(frontend.routers):
        assert router.recv_multipart() == [b"\0\0", READY]
        send_request(router, f"r{index}")
        request_type, (request, _) = received.next()
        assert (request_type, request.origin.client_index) == (EngineCoreRequestType.ADD, index)


def test_garbage_is_counted_and_the_thread_goes_on(frontend: Frontend, input_of: Callable[..., Input]) -> None:
    received = input_of()
    router = frontend.routers[0]
    router.recv_multipart()
    for frames in ([b""], [b"", b"", b""], [b"\0", b"\xc1"], [b"\1", b"abc"], [b"\x07", b"\x90"], [b"x" * 100]):
        router.send_multipart([b"\0\0", *frames])
    send_request(router, "a")
    assert received.next()[1][0].request_id == "a"
    assert sum(received.dropped.counts.values()) == 6


def test_a_client_that_is_gone_is_noticed_and_greeted_when_it_is_back(
    frontend: Frontend, input_of: Callable[..., Input]
) -> None:
    received = input_of()
    for router in frontend.routers:
        router.recv_multipart()
    frontend.lose(1)
    assert received.links.get(timeout=DEADLINE_S) == ClientLink(1, is_up=False)
    send_request(frontend.routers[0], "other")
    assert received.next()[1][0].request_id == "other"
    frontend.rebind(1)
    assert received.links.get(timeout=DEADLINE_S) == ClientLink(1, is_up=True)
    received.thread.greet(1, 58)
    assert frontend.routers[1].recv_multipart() == [b"\0\0", b"ready, the next is 58"]
    send_request(frontend.routers[1], "new")
    assert received.next()[1][0].origin.client_index == 1
    assert received.links.empty()


def test_only_the_last_of_several_returns_is_greeted(frontend: Frontend, input_of: Callable[..., Input]) -> None:
    """A client that reconnected and disconnected again must not get the numbers of its former connection."""
    received = input_of()
    for router in frontend.routers:
        router.recv_multipart()
    for _ in range(2):
        frontend.lose(1)
        assert received.links.get(timeout=DEADLINE_S) == ClientLink(1, is_up=False)
        frontend.rebind(1)
        assert received.links.get(timeout=DEADLINE_S) == ClientLink(1, is_up=True)
    received.thread.greet(1, 5)
    received.thread.greet(1, 7)
    assert frontend.routers[1].recv_multipart() == [b"\0\0", b"ready, the next is 7"]
    received.thread.admit_clients()
    send_request(frontend.routers[1], "a")
    assert received.next()[1][0].request_id == "a"
    with pytest.raises(zmq.Again):
        frontend.routers[1].recv_multipart(zmq.NOBLOCK)


def test_a_client_that_has_given_the_core_up_is_greeted_again(
    frontend: Frontend, input_of: Callable[..., Input]
) -> None:
    received = input_of()
    router = frontend.routers[0]
    router.recv_multipart()
    greet = [b"\0\0", EngineCoreRequestType.GREET.value, b"\xc0"]
    for frames in (greet, greet):
        router.send_multipart(frames)
    send_request(router, "of before the greeting")
    links = [received.links.get(timeout=DEADLINE_S) for _ in range(2)]
    assert links == [ClientLink(0, is_up=False), ClientLink(0, is_up=True)]
    send_request(frontend.routers[1], "other")
    assert received.next()[1][0].request_id == "other"
    received.thread.greet(0, 9)
    assert router.recv_multipart() == [b"\0\0", b"ready, the next is 9"]
    send_request(router, "new")
    assert received.next()[1][0].request_id == "new"
    assert received.links.empty()


def test_others_are_told_to_begin_when_the_owner_has_restored_the_core(
    frontend: Frontend, input_of: Callable[..., Input]
) -> None:
    received = input_of(owner_first=True)
    owner, other = frontend.routers
    assert owner.recv_multipart() == [b"\0\0", READY]
    send_request(owner, "a")
    received.next()
    with pytest.raises(zmq.Again):
        other.recv_multipart(zmq.NOBLOCK)
    for _ in range(2):
        received.thread.admit_clients()
    assert other.recv_multipart() == [b"\0\0", READY]
    send_request(other, "b")
    assert received.next()[1][0].origin.client_index == 1
    with pytest.raises(zmq.Again):
        other.recv_multipart(zmq.NOBLOCK)


def test_one_that_was_away_when_others_were_admitted_is_greeted_when_it_is_back(
    frontend: Frontend, input_of: Callable[..., Input]
) -> None:
    received = input_of(owner_first=True)
    frontend.routers[0].recv_multipart()
    frontend.lose(1)
    assert received.links.get(timeout=DEADLINE_S) == ClientLink(1, is_up=False)
    received.thread.admit_clients()
    frontend.rebind(1)
    assert received.links.get(timeout=DEADLINE_S) == ClientLink(1, is_up=True)
    received.thread.greet(1, 1)
    assert frontend.routers[1].recv_multipart() == [b"\0\0", READY]
    with pytest.raises(zmq.Again):
        frontend.routers[1].recv_multipart(zmq.NOBLOCK)


def test_what_has_arrived_is_taken_in_before_the_end(frontend: Frontend) -> None:
    received = Input(frontend)
    received.thread.start()
    router = frontend.routers[0]
    router.recv_multipart()
    entered, go_on = threading.Event(), threading.Event()

    def pause(name: str, key: str) -> None:
        entered.set()
        assert go_on.wait(DEADLINE_S)

    with injected("core.input.decode", pause):
        for name in ("a", "b", "c"):
            send_request(router, name)
        assert entered.wait(DEADLINE_S)
        stop = threading.Thread(target=received.thread.stop, args=(DEADLINE_S,))
        stop.start()
        go_on.set()
        stop.join(DEADLINE_S)
    assert [received.next()[1][0].request_id for _ in range(3)] == ["a", "b", "c"]


def test_the_end_of_the_launcher_is_noticed(frontend: Frontend) -> None:
    reader, writer = os.pipe()
    gone = threading.Event()
    received = Input(frontend)
    received.thread.watch_launcher(reader, gone.set)
    received.thread.start()
    received.thread.wait_open()
    os.write(writer, b"it talks")
    os.close(writer)
    assert gone.wait(DEADLINE_S)
    send_request_when_ready(frontend)
    assert received.next()[1][0].request_id == "a", "whoever is there is served until the loop ends"
    received.thread.stop(DEADLINE_S)
    os.close(reader)


def send_request_when_ready(frontend: Frontend) -> None:
    frontend.routers[0].recv_multipart()
    send_request(frontend.routers[0], "a")


def test_a_fault_ends_the_thread_and_is_reported(frontend: Frontend) -> None:
    def fail(name: str, key: str) -> None:
        raise InjectedError("surprise")

    received = Input(frontend)
    received.thread.start()
    with injected("core.input.decode", fail):
        send_request_when_ready(frontend)
        assert received.failures.get(timeout=DEADLINE_S) == "EngineCoreInput failed: surprise"
        received.thread.join(DEADLINE_S)
    received.thread.stop(DEADLINE_S)


def test_a_thread_that_gets_no_socket_says_so(frontend: Frontend) -> None:
    frontend.inputs[1] = "tcp://127.0.0.1:1"  # without keys
    received = Input(frontend)
    received.thread.start()
    with pytest.raises(RuntimeError, match="EngineCoreInput died during startup"):
        received.thread.wait_open()
    assert "needs CURVE keys" in received.failures.get(timeout=DEADLINE_S)
    received.thread.stop(DEADLINE_S)


def test_a_thread_does_something() -> None:
    with pytest.raises(NotImplementedError):
        IOThread("idle", print)._work()
    assert issubclass(ConfigError, Exception)


# -- output ----------------------------------------------------------------------------------------------------


class Output:
    """An OutputThread and its queue."""

    def __init__(self, frontend: Frontend) -> None:
        self.queue: queue.SimpleQueue[OutputItem] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.linked: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        """Clients that are back, and the number of the next message to each."""
        self.thread = OutputThread(
            frontend.context,
            frontend.outputs,
            self.queue,
            engine_index=3,
            incarnation=7,
            on_failure=self.failures.put,
            on_linked=lambda client_index, sequence: self.linked.put((client_index, sequence)),
        )
        self.thread.start()
        self.thread.wait_open()


@pytest.fixture
def output(frontend: Frontend) -> Iterator[Output]:
    made = Output(frontend)
    yield made
    made.queue.put(None)
    made.thread.join(DEADLINE_S)
    assert not made.thread.is_alive()


def tokens(request_id: str, *token_ids: int, **fields: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, list(token_ids), **fields)])


def test_outputs_reach_their_client_numbered_and_stamped(frontend: Frontend, output: Output) -> None:
    for number in (1, 2):
        output.queue.put((0, tokens("a", number)))
    output.queue.put((1, tokens("b", 9)))
    for number in (1, 2):
        batch = frontend.outputs_of(0)
        assert (batch.engine_index, batch.incarnation, batch.sequence) == (3, 7, number)
        assert batch.outputs[0].new_token_ids == [number]
    other = frontend.outputs_of(1)
    assert (other.sequence, other.outputs[0].request_id) == (1, "b")


def test_buffers_are_used_again_only_when_they_are_sent(frontend: Frontend, output: Output) -> None:
    """Large messages leave without a copy: were one written over, its receiver would see it."""
    size = 50_000  # well above what zmq copies
    for number in range(8):
        output.queue.put((0, tokens("a", *([number] * size), routed_experts=np.full(size, number))))
    for number in range(8):
        batch = frontend.outputs_of(0)
        assert batch.outputs[0].new_token_ids == [number] * size
        assert np.array_equal(batch.outputs[0].routed_experts, np.full(size, number))  # type: ignore[arg-type]
    for _ in range(20):
        output.queue.put((0, tokens("a", 1)))
        frontend.outputs_of(0)
    assert len(output.thread._free) + len(output.thread._sending) <= len(frontend.outputs) + 2


def test_a_result_that_cannot_be_sent_is_an_answer_too(frontend: Frontend, output: Output) -> None:
    output.queue.put((0, EngineCoreOutputs(utility_output=UtilityOutput(5, result=[object()]))))
    answer = frontend.outputs_of(0).utility_output
    assert answer is not None
    assert (answer.call_id, answer.result) == (5, None)
    assert "its result cannot be sent: a object cannot cross" in (answer.failure_message or "")


def test_an_output_that_cannot_be_sent_is_a_failure(frontend: Frontend) -> None:
    output = Output(frontend)
    output.queue.put((0, tokens("a", pooling_output=object())))
    assert "EngineCoreOutput failed: a object cannot cross" in output.failures.get(timeout=DEADLINE_S)
    output.thread.join(DEADLINE_S)


def test_nothing_piles_up_for_a_client_that_is_gone(frontend: Frontend, output: Output) -> None:
    frontend.lose(1)
    output.queue.put((1, tokens("old", 1)))
    output.queue.put(ClientLink(1, is_up=False))
    for _ in range(100):
        output.queue.put((1, tokens("old", 2)))
    output.queue.put((0, tokens("another", 1)))
    assert frontend.outputs_of(0).outputs[0].request_id == "another"  # so all before it has been dealt with
    frontend.rebind(1)
    output.queue.put(ClientLink(1, is_up=True))
    output.queue.put((1, tokens("new", 3)))
    assert output.linked.get(timeout=DEADLINE_S) == (1, 2)
    batch = frontend.outputs_of(1)
    assert batch.outputs[0].request_id == "new"
    assert batch.sequence == 2, "what was not sent has no number; what may be on its way still has"


def test_the_last_words_go_to_all(frontend: Frontend) -> None:
    output = Output(frontend)
    output.queue.put((0, tokens("a", 1)))
    output.queue.put(ENGINE_CORE_DEAD)
    output.thread.join(DEADLINE_S)
    assert not output.thread.is_alive()
    assert frontend.outputs_of(0).outputs[0].request_id == "a"
    assert [pull.recv_multipart() for pull in frontend.pulls] == [[ENGINE_CORE_DEAD]] * 2

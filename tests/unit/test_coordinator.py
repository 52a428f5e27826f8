"""The coordinator between an engine's threads and a client, all over their sockets."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.coordinator import Coordinator
from quire.engine.intake import DropCounter, InputItem, MessageIntake
from quire.engine.io_threads import InputThread, OutputItem, OutputThread
from quire.frontend.client.coordinator_link import CoordinatorLink
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequestType
from quire.wire.handshake import COORDINATOR, CoordinatorAddresses, CoordinatorLaunch
from quire.wire.sockets import CurveKeys, make_zmq_socket

START = EngineCoreRequestType.START_DP_WAVE
DEADLINE_S = 120.0


class Setting:
    """A coordinator, the threads of an engine, and a client."""

    def __init__(self, directory: Path, curve: bool) -> None:
        ours, theirs = CurveKeys.make_pair() if curve else (None, None)
        self.context: zmq.Context[Any] = zmq.Context()
        names = [f"ipc://{directory}/{name}" for name in ("front", "back", "intake")]
        addresses = CoordinatorAddresses(*(["tcp://127.0.0.1:0"] * 3 if curve else names))
        coordinator = Coordinator(CoordinatorLaunch(addresses, 1, os.getpid(), ours), self.context)
        self.addresses = coordinator.addresses
        reader, self.writer = os.pipe()
        self.thread = threading.Thread(target=coordinator.run, args=(reader,))
        self.thread.start()
        self.orders: queue.SimpleQueue[InputItem] = queue.SimpleQueue()
        self.notices: queue.SimpleQueue[OutputItem] = queue.SimpleQueue()
        self.dropped = DropCounter()
        self.client_context: zmq.Context[Any] = zmq.Context()
        self.failures: list[str] = []
        self.output = OutputThread(
            self.client_context,
            [],
            self.notices,
            engine_index=3,
            incarnation=0,
            on_failure=self.failures.append,
            curve=theirs,
            coordinator=self.addresses.intake,
        )
        self.input = InputThread(
            self.client_context,
            [],
            3,
            lambda sequence: b"",
            MessageIntake(lambda request: None, self.orders, queue.Queue(), self.dropped),
            on_link=lambda link: None,
            on_failure=self.failures.append,
            curve=theirs,
            coordinator=self.addresses.back,
        )
        for thread in (self.output, self.input):
            thread.start()
            thread.wait_open()
        self.client = CoordinatorLink(self.client_context, self.addresses.front, theirs)

    def next_order(self) -> InputItem:
        return self.orders.get(timeout=DEADLINE_S)

    def notify(self, **fields: int) -> None:
        self.notices.put((COORDINATOR, EngineCoreOutputs(**fields)))

    def close(self) -> None:
        self.input.stop(DEADLINE_S)
        self.notices.put(None)
        self.output.join(DEADLINE_S)
        self.client.close()
        os.close(self.writer)
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        self.client_context.term()
        self.context.term()
        assert not self.failures


@pytest.fixture(params=[False, True], ids=["ipc", "curve"])
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    with tempfile.TemporaryDirectory(prefix="quire-test-") as directory:
        setting = Setting(Path(directory), request.param)
        yield setting
        setting.close()


def test_a_wave_from_the_first_request_to_its_end(setting: Setting) -> None:
    assert setting.next_order() == (START, None)  # the answer to the subscription
    setting.client.receive()  # what is published when a client subscribes
    setting.client.note_request(3)
    assert setting.next_order() == (START, 0)
    setting.notify(start_wave=0)
    assert setting.next_order() == (START, 0)
    setting.client.receive()
    setting.client.note_request(3)  # not sent: a wave runs
    setting.notify(wave_complete=0)
    setting.client.receive()
    assert setting.client.wave == 1
    setting.client.note_request(3)
    assert setting.next_order() == (START, 1)
    assert not setting.dropped.counts


def test_garbage_ends_nothing(setting: Setting) -> None:
    assert setting.next_order() == (START, None)
    setting.client.receive()
    setting.client.socket.send(b"\x93garbage")
    if setting.addresses.intake.startswith("ipc"):
        push = make_zmq_socket(setting.client_context, setting.addresses.intake, zmq.PUSH, bind=False, linger_ms=1000)
        push.send(b"garbage")
        push.close()
    setting.client.note_request(3)
    assert setting.next_order() == (START, 0)
    intake = setting.input._intake
    for frames in ([b"HELLO"], [b"\x02", b"garbage"], []):
        intake.take_order(frames)
    assert setting.dropped.counts == {"unknown type": 2, "corrupt": 1}

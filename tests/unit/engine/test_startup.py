"""The core's half of the handshake, and its launch options."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.engine.startup import CoreHandshake, Preload, describe_failure, parse_command_line, read_curve_keys
from quire.errors import ConfigError, ModelLoadError, ServerError
from quire.wire.handshake import PROTOCOL_VERSION, EngineHandshakeMetadata, EngineStatus, EngineZmqAddresses
from quire.wire.serial import WireError
from quire.wire.sockets import CurveKeys


class Frontend:
    """The other end of the handshake socket."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="quire-test-")
        self.address = f"ipc://{self.directory.name}/handshake"
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self.socket.bind(self.address)

    def hear(self) -> EngineStatus:
        self.identity, frame = self.socket.recv_multipart()
        return msgspec.msgpack.decode(frame, type=EngineStatus)

    def answer(self, value: object) -> None:
        self.socket.send_multipart([b"\x02\x00", msgspec.msgpack.encode(value)])


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    made = Frontend()
    yield made
    made.context.destroy(linger=0)
    made.directory.cleanup()


@pytest.fixture
def handshake(frontend: Frontend) -> Iterator[CoreHandshake]:
    made = CoreHandshake(frontend.context, frontend.address, 2)
    yield made
    made.close()


METADATA = EngineHandshakeMetadata(EngineZmqAddresses(["a"], ["b"]), b"config", incarnation=4, heartbeat_path="/p")


def test_hello_is_answered_with_everything(frontend: Frontend, handshake: CoreHandshake) -> None:
    heard: list[EngineStatus] = []

    def answer() -> None:
        heard.append(frontend.hear())
        frontend.answer(METADATA)

    thread = threading.Thread(target=answer)
    thread.start()
    assert handshake.hello(None, 30.0) == METADATA
    thread.join()
    assert frontend.identity == b"\x02\x00"
    assert (heard[0].status, heard[0].pid, heard[0].protocol_version) == ("HELLO", os.getpid(), PROTOCOL_VERSION)
    handshake.ready()
    assert frontend.hear().status == "READY"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"protocol_version": 99, "future": 1}, "the frontend speaks protocol version 99.*same version of Quire"),
        ({"addresses": {}}, "cannot be read.*protocol_version"),
        ({"protocol_version": PROTOCOL_VERSION, "addresses": 1}, "cannot be read"),
        ([1, 2], "cannot be read"),
    ],
)
def test_an_answer_of_another_make_is_refused_in_words(
    frontend: Frontend, handshake: CoreHandshake, answer: object, words: str
) -> None:
    handshake.ready()  # so that the ROUTER knows the way back
    frontend.hear()
    frontend.answer(answer)
    with pytest.raises(ConfigError, match=words):
        handshake.hello(None, 30.0)


def test_a_missing_frontend_is_an_error(handshake: CoreHandshake) -> None:
    with pytest.raises(ServerError, match=r"no frontend answered within 0\.01 s"):
        handshake.hello(None, 0.01)


def test_the_launcher_is_gone_before_it_answers(handshake: CoreHandshake) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(ServerError, match="its launcher is gone"):
        handshake.hello(reader, 30.0)
    os.close(reader)


def test_failures_travel_by_name() -> None:
    status = describe_failure(ModelLoadError("no such tensor"))
    assert (status.status, status.error_type, status.message) == ("FAILED", "ModelLoadError", "no such tensor")
    status = describe_failure(WireError("of a class the frontend cannot look up"))
    assert (status.error_type, status.message) == ("ServerError", "of a class the frontend cannot look up")
    status = describe_failure(KeyError("surprise"))
    assert (status.error_type, status.message) == ("", "KeyError: 'surprise'")


def test_a_failure_is_delivered(frontend: Frontend, handshake: CoreHandshake) -> None:
    handshake.failed(ConfigError("it cannot work"))
    assert frontend.hear().message == "it cannot work"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_command_line(["--handshake-address", "ipc://x", "--engine-index", "3", "--parent-pid", "9"])
    assert options == ("ipc://x", 3, 9, ())
    assert parse_command_line(["--handshake-address", "x", "--parent-pid", "9", "--preload", "a.b,c"])[3] == (
        "a.b",
        "c",
    )
    assert parse_command_line(["--handshake-address", "x", "--parent-pid", "9", "--preload", ""])[3] == ()
    with pytest.raises(SystemExit):
        parse_command_line(["--parent-pid", "9"])
    assert "--handshake-address" in capsys.readouterr().err


def test_preloading_goes_on_past_what_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quire_test_breaks.py").write_text("raise RuntimeError('broken')")
    (tmp_path / "quire_test_works.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    preload = Preload(["quire_test_missing:a", "quire_test_breaks:a", "quire_test_works:a"])
    preload.start()
    preload.join(120)
    assert sys.modules.pop("quire_test_works", None) is not None


def test_keys_come_through_the_pipe(tmp_path: Path) -> None:
    keys, _ = CurveKeys.make_pair()
    data = msgspec.msgpack.encode(keys)
    reader, writer = os.pipe()
    os.write(writer, data)
    assert read_curve_keys(reader) == keys
    os.write(writer, data[:10])
    thread = threading.Thread(target=os.write, args=(writer, data[10:]))
    thread.start()
    assert read_curve_keys(reader) == keys
    thread.join()
    with pytest.raises(ConfigError, match=r"no keys .* within 0\.01 s \(0 bytes did\)"):
        read_curve_keys(reader, 0.01)
    os.write(writer, b"nonsense")
    os.close(writer)
    with pytest.raises(ConfigError, match="8 bytes did"):
        read_curve_keys(reader, 30.0)
    os.close(reader)

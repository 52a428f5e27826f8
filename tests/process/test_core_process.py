"""The engine core as a process, seen by a frontend that speaks the wire by hand."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.config.server import encode_config
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from quire.wire.handshake import EngineHandshakeMetadata, EngineZmqAddresses
from quire.wire.heartbeat import Phase
from quire.wire.sockets import CurveDoor, CurveKeys, bound_address, make_zmq_socket
from tests.wire.mutate import mutate

from .pace import Pace, processor_seconds_until
from .peer import (
    ABORT,
    ABORTED,
    ADD,
    DEADLINE_S,
    ERROR,
    LENGTH,
    UTILITY,
    Frontend,
    Peer,
    core_command,
    core_environment,
    make_config,
)


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    """Directories are short: a socket's path has a limit."""
    with contextlib.ExitStack() as stack:

        def make(num_clients: int = 1) -> Peer:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-test-"))
            return stack.enter_context(Peer(Path(directory), num_clients))

        yield make


@pytest.fixture(scope="module")
def served() -> Iterator[Peer]:
    """A core of two frontends that serves. A test leaves it without requests, and uses names of its own."""
    with tempfile.TemporaryDirectory(prefix="quire-test-") as directory, Peer(Path(directory), 2) as made:
        made.start()
        yield made


@pytest.fixture
def peer(make_peer: Callable[..., Peer]) -> Peer:
    return make_peer()


def expected_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return list(expected_output(FakeModel((None,), 256), prompt, params, 4096).token_ids)


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for a condition that no message announces."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.002)


def begin(client: Frontend, *request_ids: str, max_tokens: int = 4000) -> None:
    """Have long requests running."""
    for request_id in request_ids:
        client.add(request_id, max_tokens=max_tokens)
    client.wait_for(lambda: all(len(client.tokens(i)) > 3 for i in request_ids))


# -- start -----------------------------------------------------------------------------------------------------


def test_a_core_starts_and_says_what_it_found(peer: Peer) -> None:
    peer.launch()
    hello = peer.receive_status()
    assert peer.process is not None
    assert (hello["status"], hello["pid"]) == ("HELLO", peer.process.pid)
    peer.answer_hello(make_config(), incarnation=3)
    assert peer.receive_status()["status"] == "READY"
    ready = peer.client.receive_ready()
    assert ready["max_model_len"] == 4096
    assert (ready["block_size"], ready["num_gpu_blocks"]) == (4, 20001)
    assert (ready["engine_index"], ready["incarnation"]) == (0, 3)
    wait_until(lambda: peer.page.get_heartbeat().phase is Phase.IDLE)  # its loop begins after the ready frame
    assert peer.page.get_heartbeat().incarnation == 3
    assert Path(f"/proc/{peer.process.pid}/comm").read_text() == "EngineCore\n"
    assert os.getsid(peer.process.pid) == peer.process.pid, "Ctrl-C in our terminal does not reach it"
    peer.client.add("a", max_tokens=2)
    peer.client.wait_finished("a")
    assert {(batch[0], batch[8]) for batch in peer.client.batches} == {(0, 3)}, "every message says whose it is"
    assert [batch[9] for batch in peer.client.batches] == list(range(1, len(peer.client.batches) + 1))


def test_a_frontend_of_another_version_is_refused_in_words(peer: Peer) -> None:
    """The other way round the HELLO says the version, and the frontend refuses it."""
    peer.launch()
    assert peer.receive_status()["protocol_version"] == 3
    peer.answer_hello(make_config(), protocol_version=99, a_field_of_tomorrow=[1])
    status = peer.receive_status()
    assert (status["status"], status["error_type"]) == ("FAILED", "ConfigError")
    assert "the frontend speaks protocol version 99, this process speaks 3" in status["message"]
    assert peer.wait_exit() == 1


@pytest.mark.parametrize(
    ("config", "error_type", "words"),
    [
        (make_config("Unloadable"), "ModelLoadError", "model.safetensors has no tensor 'lm_head.weight'"),
        (make_config("Missing"), "ConfigError", "module 'tests.process.executors' has no 'Missing'"),
        (make_config("Broken"), "", "KeyError: 'surprise'"),
        (b"\x93\x01", "ConfigError", "the engine configuration sent by the frontend cannot be read"),
    ],
)
def test_a_start_that_fails_says_why(peer: Peer, config: object, error_type: str, words: str) -> None:
    peer.launch()
    peer.receive_status()
    peer.answer_hello(config)  # type: ignore[arg-type]
    status = peer.receive_status()
    assert (status["status"], status["error_type"]) == ("FAILED", error_type)
    assert words in status["message"]
    assert peer.wait_exit() == 1
    # our own errors are reported by the process that launched it
    assert (words in peer.log) == ("Traceback" in peer.log) == (error_type == "")


def test_a_start_can_be_stopped(peer: Peer) -> None:
    process = peer.launch()
    peer.receive_status()
    peer.answer_hello(make_config("SlowToLoad"))
    wait_until(lambda: peer.page.get_heartbeat().phase_start > 0)
    process.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM while it was starting" in peer.receive_status()["message"]
    assert peer.wait_exit() == 1


# -- requests --------------------------------------------------------------------------------------------------


def test_requests_and_aborts(served: Peer) -> None:
    client = served.client
    client.add("a", [1, 2, 3], max_tokens=5)
    client.add("b", range(100), max_tokens=30)
    begin(client, "long")
    client.abort("long", "unknown")
    assert client.call("is_scheduler_paused")[2] is False
    seen = len(client.tokens("long"))
    client.wait_finished("a", "b")
    assert client.tokens("a") == expected_tokens([1, 2, 3], 5)
    assert client.tokens("b") == expected_tokens(list(range(100)), 30)
    assert client.finish_reason("a") == LENGTH
    client.add("after", max_tokens=20)
    client.wait_finished("after")
    assert len(client.tokens("long")) == seen, "nothing more of it is sent"
    assert client.finish_reason("long") is None


def test_a_request_that_cannot_be_served_fails_alone(served: Peer) -> None:
    client = served.client
    begin(client, "neighbour", max_tokens=100)
    client.add("too long", [1] * 5000)
    client.add("empty", [])
    client.send(ADD, ["odd", [1], None, None, 0.0])
    client.send(ADD, ["no tokens", "text", {}, None, 0.0])
    client.wait_finished("too long", "empty", "odd", "no tokens", "neighbour")
    assert {client.finish_reason(i) for i in ("too long", "empty", "odd", "no tokens")} == {ERROR}
    assert "has 5000 tokens" in client.error_message("too long")
    assert "no prompt tokens" in client.error_message("empty")
    assert "either sampling or pooling" in client.error_message("odd")
    assert "Expected `array | null`, got `str`" in client.error_message("no tokens")
    assert client.tokens("neighbour") == expected_tokens([1, 2, 3], 100)


def test_a_control_call_is_answered_or_refused_with_the_reason(served: Peer) -> None:
    client = served.client
    assert client.call("get_supported_tasks")[1:3] == [None, ["generate"]]
    assert client.call("collective_rpc", "echo", None, [1, "two"])[2] == [[1, "two"]]
    assert client.call("collective_rpc", "collects")[2] == [True], "the garbage collector rested for the start only"
    assert "no control verb 'launch'" in client.call("launch")[1]
    assert client.call("collective_rpc", "fail")[1] == "Call to collective_rpc method failed: asked to fail"
    assert "cannot be sent" in client.call("collective_rpc", "weird")[1]
    begin(client, "unpaused", max_tokens=60)
    assert client.call("pause_scheduler", "wait")[1:3] == [None, None]  # the answer comes later, from a Future
    assert client.finish_reason("unpaused") == LENGTH
    assert client.call("is_scheduler_paused")[2] is True
    client.call("resume_scheduler")
    assert client.call("is_scheduler_paused")[2] is False


# -- many frontends --------------------------------------------------------------------------------------------


def test_frontends_get_their_own_outputs(served: Peer) -> None:
    first, second = served.clients
    before = set(first.outputs), dict(first.answers)
    first.add("of the first", [1], max_tokens=20)
    second.add("of the second", [2], max_tokens=20)
    first.wait_finished("of the first")
    second.wait_finished("of the second")
    assert set(first.outputs) == before[0] | {"of the first"}
    assert set(second.outputs) == {"of the second"}
    assert second.call("is_sleeping")[2] is False
    assert first.answers == before[1]


def test_a_frontend_that_is_gone_takes_its_requests_with_it(make_peer: Callable[..., Peer], pace: Pace) -> None:
    """Promise P23: within 2 s, and the others do not notice."""
    peer = make_peer(2)
    peer.start(make_config("Patient"))
    first, second = peer.clients
    begin(first, "a", max_tokens=1000)
    begin(second, "b", "c")
    second.close()
    assert processor_seconds_until(lambda: peer.page.get_heartbeat().request_ids == ("a",)) < 2.0
    pace.hurry()
    first.wait_finished("a")
    assert first.tokens("a") == expected_tokens([1, 2, 3], 1000)
    # It comes back, as a new process at the same addresses would.
    again = Frontend(peer.context, peer.directory, 1)
    peer.clients[1] = again
    assert again.receive_ready()["incarnation"] == 0
    again.add("d", max_tokens=5)
    again.wait_finished("d")
    assert set(again.outputs) == {"d"}


LAUNCHER = """
import os, subprocess, sys, time
sys.path[:0] = {path!r}
from tests.process.peer import core_command, core_environment
process = subprocess.Popen(core_command({address!r}, os.getpid()), stdin=subprocess.PIPE, env=core_environment())
print(process.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Returns whether a process runs. A zombie does not, which perhaps no process is left to wait for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("phase", ["before the handshake", "while it serves"])
def test_a_core_does_not_outlive_its_launcher(peer: Peer, phase: str) -> None:
    source = LAUNCHER.format(path=sys.path, address=peer.handshake_address)
    launcher = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, env=core_environment())
    assert launcher.stdout is not None
    with launcher:
        pid = int(launcher.stdout.readline())
        try:
            assert peer.receive_status()["pid"] == pid
            if phase == "while it serves":
                peer.answer_hello(make_config())
                peer.receive_status()
                peer.client.receive_ready()
                begin(peer.client, "a")
            launcher.kill()
            wait_until(lambda: not is_alive(pid))
        finally:
            launcher.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_the_end_of_the_pipe_is_enough(peer: Peer) -> None:
    """Where the system does not kill a child with its parent, the pipe's end does."""
    process = peer.launch()
    peer.receive_status()
    peer.answer_hello(make_config(shutdown_timeout=600.0))
    peer.receive_status()
    peer.client.receive_ready()
    begin(peer.client, "a")
    assert process.stdin is not None
    process.stdin.close()
    peer.client.wait_finished("a")
    assert peer.client.finish_reason("a") == ABORTED
    assert peer.wait_exit() == 0
    assert "the process that started this engine core is gone" in peer.log


# -- the way out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_asked_to_stop_it_ends_every_request(peer: Peer, number: signal.Signals) -> None:
    peer.start(make_config("Patient"))
    client = peer.client
    names = [f"r{i}" for i in range(8)]
    begin(client, *names)
    assert peer.process is not None
    peer.process.send_signal(number)
    client.wait_finished(*names)
    assert {client.finish_reason(name) for name in names} == {ABORTED}
    assert client.error_message("r0") == "the engine is shutting down"
    assert peer.wait_exit() == 0
    assert peer.page.get_heartbeat().phase is Phase.STOPPED
    assert not client.is_core_dead


def test_it_gives_requests_time_to_finish(peer: Peer, pace: Pace) -> None:
    peer.start(make_config("Patient", shutdown_timeout=600.0))
    client = peer.client
    begin(client, "a", max_tokens=1000)
    assert peer.process is not None
    peer.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "shutting down: 1 requests have 600 s to finish" in peer.log)
    client.add("late")
    refusal = client.call("is_sleeping")
    assert refusal[1] == "Server shutting down"
    pace.hurry()
    client.wait_finished("a", "late")
    assert client.finish_reason("late") == ABORTED
    assert client.tokens("a") == expected_tokens([1, 2, 3], 1000)
    assert client.finish_reason("a") == LENGTH
    assert peer.wait_exit() == 0


def test_asked_twice_it_stops_now(peer: Peer) -> None:
    """The second signal is the other one."""
    peer.start(make_config("Patient", shutdown_timeout=600.0))
    client = peer.client
    begin(client, "a")
    assert peer.process is not None
    peer.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "shutting down" in peer.log)
    peer.process.send_signal(signal.SIGINT)
    client.wait_finished("a")
    assert client.finish_reason("a") == ABORTED
    assert peer.wait_exit() == 0


def test_a_core_that_fails_says_so_and_is_gone(peer: Peer) -> None:
    peer.start(make_config("Mortal"))
    client = peer.client
    client.add("a", max_tokens=50)
    client.wait_for(lambda: client.is_core_dead)
    assert peer.wait_exit() == 1
    assert client.tokens("a") == expected_tokens([1, 2, 3], 4)
    assert client.finish_reason("a") is None, "whoever keeps the journal knows how to go on"
    assert "the fifth step fails" in peer.log
    beat = peer.page.get_heartbeat()
    assert (beat.phase, beat.request_ids) == (Phase.EXECUTE, ("a",))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is not enforced elsewhere")
def test_a_core_without_memory_says_so_and_is_gone(peer: Peer) -> None:
    """Although no thread can be started that would limit the time of its end."""
    peer.start(QUIRE_FAILPOINTS="core.step.execute=memory(32)")
    client = peer.client
    client.add("a", max_tokens=50)
    client.wait_for(lambda: client.is_core_dead)
    assert peer.wait_exit() == 1
    assert "MemoryError" in peer.log
    assert "EngineCoreInput failed" not in peer.log


@pytest.mark.parametrize(
    "fault", ["core.input.decode=raise", "core.input.queued=raise", "core.output.send=raise,skip=2"]
)
def test_a_thread_that_fails_ends_the_core(peer: Peer, fault: str) -> None:
    peer.start(QUIRE_FAILPOINTS=fault)
    peer.client.add("a", max_tokens=1000)
    assert peer.wait_exit() == 1
    assert "failed: a failpoint was told to raise" in peer.log


@pytest.mark.slow
def test_a_core_that_cannot_end_is_ended(peer: Peer) -> None:
    """A timer ends it in any case: here its output thread never comes back, and has the sockets."""
    peer.start(QUIRE_FAILPOINTS="core.output.send=hang")
    peer.client.add("a", max_tokens=2)
    wait_until(lambda: peer.page.get_heartbeat().step > 0)
    assert peer.process is not None
    asked = time.monotonic()
    peer.process.send_signal(signal.SIGTERM)
    peer.wait_exit()
    assert time.monotonic() - asked < 20.0


# -- over the network ------------------------------------------------------------------------------------------


def test_a_core_elsewhere_is_given_keys_through_the_pipe() -> None:
    """Over TCP everything is encrypted, and a frontend needs the keys, which neither argv nor environment have."""
    ours, theirs = CurveKeys.make_pair()
    context: zmq.Context[Any] = zmq.Context()
    CurveDoor(context, [theirs.public])
    sockets = [
        make_zmq_socket(context, "tcp://127.0.0.1:*", kind, bind=True, curve=ours)
        for kind in (zmq.ROUTER, zmq.ROUTER, zmq.PULL)
    ]
    handshake, router, pull = sockets
    for socket in sockets:
        socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    command = core_command(bound_address(handshake), os.getpid())
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=core_environment())
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(theirs))
        process.stdin.flush()
        handshake.recv_multipart()
        addresses = EngineZmqAddresses([bound_address(router)], [bound_address(pull)])
        metadata = EngineHandshakeMetadata(addresses, encode_config(make_config()))
        handshake.send_multipart([b"\0\0", msgspec.msgpack.encode(metadata)])
        router.recv_multipart()
        router.send_multipart([b"\0\0", ADD, msgspec.msgpack.encode(["a", [1], {"max_tokens": 1}, None, 0.0])])
        outputs = msgspec.msgpack.decode(pull.recv_multipart()[0])[1]
        assert (outputs[0][0], outputs[0][1]) == ("a", expected_tokens([1], 1))
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdin.close()
        context.destroy(linger=0)


# -- garbage ---------------------------------------------------------------------------------------------------


def test_garbage_is_dropped_and_counted(peer: Peer, pace: Pace) -> None:
    """Promise P18. The canary's tokens are those it would have had alone."""
    peer.start(make_config("Patient"))
    client = peer.client
    client.add("canary", [7, 8, 9], max_tokens=1500)
    rng = random.Random(1)
    request = msgspec.msgpack.encode(["canary", [7, 8, 9], {"max_tokens": 300}, None, 0.0])
    call = msgspec.msgpack.encode([0, 4711, "is_sleeping", []])
    for _ in range(3000):
        kind, frame = rng.choice([(ADD, request), (UTILITY, call)])
        client.send_frames(kind, *mutate(rng, [frame], [call, request]))
    for frames in ([b""], [b"\x04", b""], [b"\x05", b""], [b"\x02"], [ABORT, b"\xc1"]):
        client.send_frames(*frames)
    dropped = client.call("get_dropped_messages")[2]
    assert client.finish_reason("canary") is None, "it ended too soon to be a canary"
    pace.hurry()
    client.wait_finished("canary")
    assert client.tokens("canary") == expected_tokens([7, 8, 9], 1500)
    assert dropped["unknown type"] == 4
    assert dropped["corrupt"] > 1000
    assert "a message was dropped (corrupt, number 512)" in peer.log

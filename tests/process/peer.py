"""A frontend by hand: binds the sockets, starts a core process and speaks the wire with nothing of quire's client.

What goes out is built from plain lists and what comes in is decoded without types, so that the tests see the bytes a
frontend of any make would see.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

from quire.config.engine import CacheConfig, EngineConfig, LifecycleConfig, SchedulerConfig
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig
from quire.config.server import encode_config
from quire.wire.handshake import PROTOCOL_VERSION
from quire.wire.heartbeat import HeartbeatPage
from quire.wire.sockets import make_zmq_socket

DEADLINE_S = 120.0
"""For anything a core does. It is a limit, not a time: nothing waits longer than it must."""
LOOK_S = 1.0
"""For one look at whether a message has come."""
IDENTITY = b"\x00\x00"
ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
STOP, LENGTH, ABORTED, ERROR = range(4)
"""Finish reasons, as numbers."""
EXECUTORS = "tests.process.executors"


def make_config(executor: str = "Steady", *, shutdown_timeout: float = 0.0, **scheduler: Any) -> EngineConfig:
    """An engine with a fake model, blocks of 4 tokens and a context of 4096."""
    return EngineConfig(
        model_config=ModelConfig(max_model_len=4096, hf_config=HFConfig({"max_position_embeddings": 4096}, Path())),
        cache_config=CacheConfig(block_size=4, num_gpu_blocks_override=20001),
        scheduler_config=SchedulerConfig(**{"max_num_batched_tokens": 4096, "max_num_seqs": 256, **scheduler}),
        parallel_config=ParallelConfig(distributed_executor_backend=f"{EXECUTORS}:{executor}"),
        lifecycle_config=LifecycleConfig(shutdown_timeout=shutdown_timeout),
    )


def core_command(handshake_address: str, parent_pid: int) -> list[str]:
    """Returns what starts a core."""
    options = ["--handshake-address", handshake_address, "--engine-index", "0", "--parent-pid", str(parent_pid)]
    return [sys.executable, "-m", "quire.engine.proc", *options]


def core_environment() -> dict[str, str]:
    """Ours, with our module search path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}


class Frontend:
    """The sockets of one client: a ROUTER for input and a PULL for output."""

    def __init__(self, context: zmq.Context[Any], directory: Path, index: int) -> None:
        self.index = index
        self.addresses = [f"ipc://{directory}/{name}{index}" for name in ("in", "out")]
        self.router = make_zmq_socket(context, self.addresses[0], zmq.ROUTER, bind=True)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.pull = make_zmq_socket(context, self.addresses[1], zmq.PULL, bind=True)
        self.batches: list[list[Any]] = []
        """Every EngineCoreOutputs received, as plain lists."""
        self.outputs: defaultdict[str, list[list[Any]]] = defaultdict(list)
        self.answers: dict[int, list[Any]] = {}
        self.is_core_dead = False
        self._calls = itertools.count(1)

    # -- out ------------------------------------------------------------------------------------------------------

    def send(self, request_type: bytes, value: Any, *frames: bytes) -> None:
        """A message, as plain values."""
        self.send_frames(request_type, msgspec.msgpack.encode(value), *frames)

    def send_frames(self, *frames: bytes) -> None:
        """A message, as bytes."""
        self.router.send_multipart([IDENTITY, *frames])

    def add(self, request_id: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, **params: Any) -> None:
        """Add a request that ends by its length only."""
        params = {"max_tokens": max_tokens, "ignore_eos": True, **params}
        self.send(ADD, [request_id, list(prompt), params, None, time.time()])

    def abort(self, *request_ids: str) -> None:
        """Abort requests."""
        self.send(ABORT, list(request_ids))

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a control verb: [call id, failure message, result], shortened from behind where they are None."""
        call_id = next(self._calls)
        self.send(UTILITY, [self.index, call_id, method, list(args)])
        self.wait_for(lambda: call_id in self.answers)
        return self.answers[call_id]

    # -- in -------------------------------------------------------------------------------------------------------

    def receive_ready(self) -> dict[str, Any]:
        """The first frame on the input socket: the core is ready."""
        assert self.router.poll(DEADLINE_S * 1000), "the core does not say that it is ready"
        identity, ready = self.router.recv_multipart()
        assert identity == IDENTITY
        response: dict[str, Any] = msgspec.msgpack.decode(ready)
        return response

    def receive(self, timeout_s: float = LOOK_S) -> bool:
        """Take in one message; False if none came."""
        if not self.pull.poll(timeout_s * 1000):
            return False
        frames = self.pull.recv_multipart()
        if frames == [b"ENGINE_CORE_DEAD"]:
            self.is_core_dead = True
            return True
        batch: list[Any] = msgspec.msgpack.decode(frames[0])
        self.batches.append(batch)
        for output in batch[1] if len(batch) > 1 else ():
            self.outputs[output[0]].append(output)
        if len(batch) > 4 and batch[4] is not None:
            self.answers[batch[4][0]] = batch[4]
        return True

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Take in messages until `condition` holds. A machine that stands still for a minute uses up one look."""
        left_s = DEADLINE_S
        while not condition():
            assert not self.is_core_dead, "the core has said that it is dead"
            assert left_s > 0, "the core does not answer"
            start = time.monotonic()
            self.receive()
            left_s -= min(time.monotonic() - start, LOOK_S)

    def tokens(self, request_id: str) -> list[int]:
        """Everything a request was given."""
        return [token for output in self.outputs[request_id] for token in output[1]]

    def finish_reason(self, request_id: str) -> int | None:
        """Returns the reason of its end; None while it lives."""
        ends = [output[5] for output in self.outputs[request_id] if len(output) > 5 and output[5] is not None]
        assert len(ends) <= 1, f"{request_id} ended {len(ends)} times"
        return ends[0] if ends else None

    def error_message(self, request_id: str) -> str:
        """Why it ended with an error, or by the core's own will."""
        return str(self.outputs[request_id][-1][13])

    def wait_finished(self, *request_ids: str) -> None:
        """Waits until all of them have ended."""
        self.wait_for(lambda: all(self.finish_reason(i) is not None for i in request_ids))

    def close(self) -> None:
        """Be gone."""
        self.router.close(linger=0)
        self.pull.close(linger=0)


class Peer:
    """A core process and its frontends. A context manager: nothing survives it."""

    def __init__(self, directory: Path, num_clients: int = 1) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.directory = directory
        self.clients = [Frontend(self.context, directory, index) for index in range(num_clients)]
        self.handshake = self.context.socket(zmq.ROUTER)
        self.handshake_address = f"ipc://{directory}/handshake"
        self.handshake.bind(self.handshake_address)
        self.page_path = directory / "heartbeat"
        self.page = HeartbeatPage.create(self.page_path)
        self.process: subprocess.Popen[bytes] | None = None
        self.log_path = directory / "log"

    @property
    def client(self) -> Frontend:
        """The first one."""
        return self.clients[0]

    @property
    def log(self) -> str:
        """Returns what the core wrote to its standard error."""
        return self.log_path.read_text(encoding="utf-8")

    def launch(self, **environment: str) -> subprocess.Popen[bytes]:
        """Starts the process; its HELLO is not answered yet."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                core_command(self.handshake_address, os.getpid()),
                stdin=subprocess.PIPE,
                stderr=log,
                env={**core_environment(), **environment},
            )
        return self.process

    def receive_status(self) -> dict[str, Any]:
        """The next thing it says on the handshake socket."""
        assert self.handshake.poll(DEADLINE_S * 1000), "the core says nothing"
        identity, frame = self.handshake.recv_multipart()
        assert identity == IDENTITY
        status: dict[str, Any] = msgspec.msgpack.decode(frame)
        return status

    def answer_hello(self, config: EngineConfig | bytes, *, incarnation: int = 0, **fields: Any) -> None:
        """The frontend's half of the handshake."""
        inputs, outputs = zip(*(client.addresses for client in self.clients), strict=True)
        metadata = {
            "addresses": {"inputs": inputs, "outputs": outputs},
            "engine_config": config if isinstance(config, bytes) else encode_config(config),
            "incarnation": incarnation,
            "heartbeat_path": str(self.page_path),
            "protocol_version": PROTOCOL_VERSION,
            **fields,
        }
        self.handshake.send_multipart([IDENTITY, msgspec.msgpack.encode(metadata)])

    def start(self, config: EngineConfig | None = None, *, incarnation: int = 0, **environment: str) -> dict[str, Any]:
        """Start a core and wait until it serves; the ready response of the first client."""
        self.launch(**environment)
        assert self.receive_status()["status"] == "HELLO"
        self.answer_hello(config if config is not None else make_config(), incarnation=incarnation)
        status = self.receive_status()
        assert status["status"] == "READY", status
        ready, *_ = [client.receive_ready() for client in self.clients]
        return ready

    def wait_exit(self) -> int:
        """Its exit code."""
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
            assert self.process.stdin is not None
            self.process.stdin.close()
            if exc is not None:
                print(self.log, self.process.returncode)
        for client in self.clients:
            client.close()
        self.handshake.close(linger=0)
        self.page.close()
        self.context.term()

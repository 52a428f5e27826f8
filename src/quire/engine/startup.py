"""The start of a core process: its options, and the handshake with its launcher.

The core sends HELLO and receives its configuration. Then it sends READY, or FAILED with the reason: an error travels by
the name of its class, so that the frontend can raise the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import zmq

from quire.errors import ConfigError, ServerError, error_name
from quire.resolve import resolve
from quire.wire.handshake import (
    HANDSHAKE_LINGER_MS,
    HANDSHAKE_TIMEOUT_S,
    EngineHandshakeMetadata,
    EngineStatus,
    check_protocol_version,
    engine_identity,
)
from quire.wire.sockets import CurveKeys, make_zmq_socket

T = TypeVar("T")
MAX_KEYS_BYTES = 4096
"""Longest message with keys; one write of that size to a pipe arrives whole."""


class LaunchOptions(NamedTuple):
    """The command line of a core process."""

    handshake_address: str
    engine_index: int
    parent_pid: int
    preload: tuple[str, ...] = ()


def parse_command_line(argv: Sequence[str]) -> LaunchOptions:
    """Parses the command line. Exits with a usage message if it is wrong: only a person can have typed that."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.engine.proc", description="An engine core; started by Quire."
    )
    parser.add_argument("--handshake-address", required=True)
    parser.add_argument("--engine-index", type=int, default=0)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--preload", type=lambda names: tuple(filter(None, names.split(","))), default=())
    return LaunchOptions(**vars(parser.parse_args(argv)))


class Preload(threading.Thread):
    """Imports the core's modules, torch above all, during the handshake.

    An import of the same module elsewhere waits for it; one that fails here fails there again, where it is reported.
    Join it before that, as two threads in the same cycle of imports could see half a module.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(name="Preload", daemon=True)
        self._names = names

    def run(self) -> None:
        """Runs the thread."""
        for name in self._names:
            with contextlib.suppress(Exception):
                resolve(name)


def read_curve_keys(pipe: int, timeout_s: float = 10.0) -> CurveKeys:
    """Returns the keys that the launcher writes into the pipe first. Raises ConfigError if none come."""
    data = b""
    deadline = time.monotonic() + timeout_s
    while len(data) < MAX_KEYS_BYTES and select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        more = os.read(pipe, MAX_KEYS_BYTES)
        data += more
        try:
            return msgspec.msgpack.decode(data, type=CurveKeys)
        except msgspec.DecodeError:
            if not more:
                break  # the other end is closed
    raise ConfigError(f"no keys for the network came from the launcher within {timeout_s:g} s ({len(data)} bytes did)")


class CoreHandshake:
    """The core's side of the handshake socket. `hello` first, then `ready` or `failed`, then `close`."""

    def __init__(
        self, context: zmq.Context[Any], address: str, engine_index: int, curve: CurveKeys | None = None
    ) -> None:
        self._socket = make_zmq_socket(
            context,
            address,
            zmq.DEALER,
            bind=False,
            identity=engine_identity(engine_index),
            linger_ms=HANDSHAKE_LINGER_MS,
            curve=curve,
        )

    def hello(self, launcher_pipe: int | None, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> EngineHandshakeMetadata:
        """Introduces this process. Returns the frontend's answer.

        Raises ConfigError for another protocol version, ServerError if no answer comes or the launcher has ended.
        """
        self._send(EngineStatus("HELLO", pid=os.getpid()))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if launcher_pipe is not None:
            poller.register(launcher_pipe, zmq.POLLIN)
        ready = {source for source, _ in poller.poll(int(timeout_s * 1000))}
        if self._socket in ready:
            return _read_metadata(self._socket.recv())
        what = "its launcher is gone" if ready else f"no frontend answered within {timeout_s:g} s"
        raise ServerError(f"the engine core cannot start: {what}")

    def ready(self) -> None:
        """Reports that the core is up."""
        self._send(EngineStatus("READY", pid=os.getpid()))

    def failed(self, error: BaseException) -> None:
        """Reports that the core cannot start."""
        self._send(describe_failure(error))

    def _send(self, status: EngineStatus) -> None:
        self._socket.send(msgspec.msgpack.encode(status))

    def close(self) -> None:
        """Closes the socket. Messages sent before are still delivered."""
        self._socket.close()


class _Version(msgspec.Struct):
    """The field that every version of `EngineHandshakeMetadata` has."""

    protocol_version: int


def _read_metadata(frame: bytes) -> EngineHandshakeMetadata:
    try:
        theirs = msgspec.msgpack.decode(frame, type=_Version).protocol_version
        check_protocol_version(theirs, "the frontend")
        return msgspec.msgpack.decode(frame, type=EngineHandshakeMetadata)
    except msgspec.MsgspecError as e:
        raise ConfigError(f"the frontend's answer to the handshake cannot be read: {e}") from e


WAVE_CORE = "quire.engine.dp:DPEngineCoreProc"


def choose_core_class(metadata: EngineHandshakeMetadata, independent: Callable[..., T]) -> Callable[..., T]:
    """Returns what makes the core: `independent`, or for an engine of a group the class that steps with the others."""
    if metadata.group_network is not None:
        return partial(resolve(WAVE_CORE), group_network=metadata.group_network)
    if metadata.group_file is None:
        return independent
    return partial(resolve(WAVE_CORE), group_file=Path(metadata.group_file))


def describe_failure(error: BaseException) -> EngineStatus:
    """Returns the FAILED message of an error. A class that is not in `quire.errors` is replaced by its nearest base
    there."""
    name = error_name(error)
    message = str(error) if name else f"{type(error).__name__}: {error}"
    return EngineStatus("FAILED", pid=os.getpid(), error_type=name, message=message)

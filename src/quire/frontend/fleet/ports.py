"""A server for each engine of this machine, on ports that follow one another, and their joint health.

A load balancer outside chooses among the ports (--data-parallel-multi-port-external-lb). This process answers no
requests for the model: it starts the servers, starts those again that die, says at a port of its own whether all are
ready, and ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from quire import envs
from quire.config.engine import EngineConfig
from quire.config.server import ServerConfig, encode_config
from quire.errors import ConfigError, ServerError
from quire.frontend.http.server import END_GRACE_S, StopRequests, StopSignals, bind_port
from quire.frontend.supervision.quarantine import SAME_SIGNAL_GRACE_S, describe_exit, was_asked_to_end
from quire.frontend.supervision.supervisor import RestartBudget
from quire.logger import child_level, init_logger
from quire.wire.process import search_path

logger = init_logger(__name__)

FLAG = "--data-parallel-multi-port-external-lb"
RESTART_LIMIT = 6
RESTART_WINDOW_S = 60.0
"""Restarts of each server within `RESTART_WINDOW_S`; after more all end."""
STARTING_LOOK_S = 0.2
LOOK_S = 1.0
"""Intervals at which a server is asked whether it is ready, before it is and after."""
PROBE_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0
MAX_REQUEST_BYTES = 16 << 10
_EVERYWHERE = (None, "", "0.0.0.0", "::")


class PortLaunch(msgspec.Struct, frozen=True):
    """Message to the process of a server, on its standard input."""

    index: int
    port: int
    parent_pid: int
    engine_config: bytes
    server_config: bytes
    key_digests: tuple[bytes, ...]


def decode_launch(data: bytes) -> PortLaunch:
    """Decodes what `start_process` sends. Raises msgspec's errors for anything else."""
    return msgspec.msgpack.decode(data, type=PortLaunch)


def make_launches(config: EngineConfig, server: ServerConfig, key_digests: tuple[bytes, ...]) -> list[PortLaunch]:
    """Returns the message for each server. Raises ConfigError for flags with which several servers cannot be."""
    parallel = config.parallel_config
    count = len(parallel.machine_engines)
    _check(server, parallel.data_parallel_supervisor_port, count)
    launches = []
    for index in range(count):
        own = dataclasses.replace(parallel, port_index=index)
        admin_port = server.admin_port + index if server.admin_port else 0
        launches.append(
            PortLaunch(
                index,
                server.port + index,
                os.getpid(),
                encode_config(dataclasses.replace(config, parallel_config=own)),
                encode_config(dataclasses.replace(server, api_key=(), port=server.port + index, admin_port=admin_port)),
                key_digests,
            )
        )
    return launches


def _check(server: ServerConfig, health_port: int, count: int) -> None:
    if server.uds is not None:
        raise ConfigError(f"{FLAG} gives each server a port, and --uds {server.uds} is one socket; leave one out")
    if server.port == 0:
        raise ConfigError(f"{FLAG}: the ports of the servers follow --port, and 0 is any free one; give a number")
    if server.api_server_count > 1:
        raise ConfigError(f"{FLAG}: each server has one process; leave --api-server-count out")
    if server.ssl_cert_reqs == 2:
        raise ConfigError(f"{FLAG} asks each server for its health, without a certificate: give --ssl-cert-reqs 1")
    taken = {health_port: "--data-parallel-supervisor-port"}
    ports = {"--port": server.port}
    if server.admin_is_apart and server.admin_port:
        ports["--admin-port"] = server.admin_port
    for flag, first in ports.items():
        if first + count - 1 > 65535:
            raise ConfigError(f"{FLAG}: {flag} {first} is the first of {count}, and the last of all is 65535")
        for port in range(first, first + count):
            if port in taken:
                raise ConfigError(
                    f"{FLAG}: the {count} servers take {flag} {first} and those that follow, and {port} is one of "
                    f"{taken[port]}; choose another"
                )
            taken[port] = flag


class ServerProcess(Protocol):
    """A process, as asyncio makes one."""

    @property
    def pid(self) -> int:
        """Its id."""

    async def wait(self) -> int:
        """Waits for its end. Returns its exit code, negative for a signal."""

    def send_signal(self, signal: int, /) -> None:
        """Sends a signal. Raises ProcessLookupError if it has ended."""


async def start_process(module: str, launch: PortLaunch) -> ServerProcess:
    """Starts a server. Raises ServerError if the system refuses."""
    keys = (envs.API_KEY.name, envs.API_KEY.vllm_name)
    environment = {name: value for name, value in os.environ.items() if name not in keys}
    environment |= {"PYTHONPATH": search_path(), envs.LOGGING_LEVEL.name: child_level()}
    try:
        process = await asyncio.create_subprocess_exec(
            # -P: a file json.py in the working directory must not stand in for a module.
            *(sys.executable, "-P", "-m", module),
            stdin=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # this process handles Ctrl-C in the user's terminal
        )
    except OSError as e:
        raise ServerError(f"no server can be started: {e}") from e
    assert process.stdin is not None  # a pipe was asked for
    with contextlib.suppress(OSError):  # it has died already, which will be noticed
        process.stdin.write(msgspec.msgpack.encode(launch))
        await process.stdin.drain()
    process.stdin.close()
    return process


class Probe:
    """Asks servers of this machine whether they are ready."""

    def __init__(self, server: ServerConfig) -> None:
        self._host = "127.0.0.1" if server.host in _EVERYWHERE else server.host
        self._tls: ssl.SSLContext | None = None
        if server.ssl_certfile is not None:
            self._tls = ssl.create_default_context()
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE  # it is no other machine

    async def __call__(self, port: int) -> bool:
        """Returns whether the server on a port is ready."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(self._host, port, ssl=self._tls)
                try:
                    writer.write(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    return (await reader.readexactly(12)).endswith(b" 200")  # HTTP/1.1 200
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False


class _Server:
    """One of the servers."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        self.port = port
        self.process: ServerProcess | None = None
        self.is_ready = self.was_ready = False
        self.num_restarts = 0

    def describe(self) -> dict[str, Any]:
        """Returns what its health says."""
        state = "up" if self.is_ready else "starting" if self.process is not None else "down"
        return {"engine": self.rank, "port": self.port, "state": state, "restarts": self.num_restarts}

    def signal(self, number: int) -> None:
        """Sends its process a signal, if there is one."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class PortServers:
    """Runs the servers on `ports`; `start` starts the process of one by its number, `probe` asks the one on a port.
    Belongs to one event loop."""

    def __init__(
        self,
        ports: Sequence[int],
        first_rank: int,
        start: Callable[[int], Awaitable[ServerProcess]],
        probe: Callable[[int], Awaitable[bool]],
    ) -> None:
        self._servers = [_Server(rank, port) for rank, port in enumerate(ports, start=first_rank)]
        self._start, self._probe = start, probe
        self._stop = StopRequests()

    @property
    def is_ready(self) -> bool:
        """True while all servers are ready and none ends."""
        return not self._stop.asked.is_set() and all(server.is_ready for server in self._servers)

    def describe(self) -> list[dict[str, Any]]:
        """Returns the state of each."""
        return [server.describe() for server in self._servers]

    async def run(self, stop: StopRequests, patience_s: float) -> None:
        """Runs the servers until they have ended on request, and kills those that take longer than `patience_s`. If one
        cannot serve, or dies too often, ends the others and raises ServerError."""
        self._stop = stop
        keepers = [asyncio.ensure_future(self._keep(index)) for index in range(len(self._servers))]
        ending = asyncio.ensure_future(self._end_when_asked(patience_s))
        try:
            _, others = await asyncio.wait(keepers, return_when=asyncio.FIRST_EXCEPTION)
            stop.ask()
            if others:
                await asyncio.wait(others)
        finally:
            ending.cancel()
            self._signal(signal.SIGKILL)
        for keeper in keepers:
            keeper.result()

    def _signal(self, number: int) -> None:
        for server in self._servers:
            server.signal(number)

    async def _end_when_asked(self, patience_s: float) -> None:
        await self._stop.asked.wait()
        logger.info("the servers end")
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.hurried.wait(), patience_s)
        self._signal(signal.SIGTERM)  # the second one ends requests at once
        await asyncio.sleep(2 * END_GRACE_S)
        logger.warning("servers that did not end when they were asked to are killed")
        self._signal(signal.SIGKILL)

    async def _keep(self, index: int) -> None:
        """Runs a server, and starts it again when it dies, until all end."""
        server, budget = self._servers[index], RestartBudget(RESTART_LIMIT, RESTART_WINDOW_S)
        while True:
            code = await self._follow(index)
            was_asked = was_asked_to_end(code)
            if await self._is_ending_within(SAME_SIGNAL_GRACE_S if was_asked else 0.0):
                return
            what = f"the server of engine {server.rank} on port {server.port} {describe_exit(code)}"
            if not server.was_ready:
                raise ServerError(f"{what} before it served; its last words are above, on standard error")
            backoff_s = budget.take(time.monotonic())
            if backoff_s is None:
                raise ServerError(f"{what}, and its budget of {budget} is used up: all end")
            logger.log(logging.WARNING if was_asked else logging.ERROR, "%s, and is started again", what)
            if await self._is_ending_within(backoff_s):
                return
            server.num_restarts += 1

    async def _follow(self, index: int) -> int:
        """Starts a server and follows it to its end. Returns its exit code."""
        server = self._servers[index]
        server.process = process = await self._start(index)
        if self._stop.asked.is_set():  # meanwhile
            server.signal(signal.SIGTERM)
        looks = asyncio.ensure_future(self._look_at(server))
        try:
            return await process.wait()
        finally:
            looks.cancel()
            server.process, server.is_ready = None, False

    async def _look_at(self, server: _Server) -> None:
        while True:
            server.is_ready = await self._probe(server.port)
            if server.is_ready and not server.was_ready:
                server.was_ready = True
                if all(each.was_ready for each in self._servers):
                    logger.info("all %d servers are ready", len(self._servers))
            await asyncio.sleep(LOOK_S if server.is_ready else STARTING_LOOK_S)

    async def _is_ending_within(self, duration_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.asked.wait(), duration_s)
        return self._stop.asked.is_set()

    # -- health -------------------------------------------------------------------------------------------------------

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one HTTP request: /health and /health/ready whether all servers are ready (200, else 503), with the
        state of each, and /health/live with 200."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_TIMEOUT_S)
            body: dict[str, Any] = {}
            words = head.split(b"\r\n", 1)[0].split(b" ")
            path = words[1].split(b"?")[0] if len(words) == 3 else b""
            if words[0] not in (b"GET", b"HEAD"):
                status, body = "405 Method Not Allowed", {"error": "use GET"}
            elif path == b"/health/live":
                status = "200 OK"
            elif path in (b"/health", b"/health/ready"):
                status = "200 OK" if self.is_ready else "503 Service Unavailable"
                body = {"servers": self.describe()}
            else:
                status, body = "404 Not Found", {"error": "there are /health, /health/ready and /health/live"}
            data = json.dumps(body).encode()
            fields = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close"
            writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + (b"" if words[0] == b"HEAD" else data))
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the connection has ended, or what it sent is no request
        finally:
            writer.close()


def serve_on_ports(config: EngineConfig, server: ServerConfig, key_digests: tuple[bytes, ...], module: str) -> None:
    """Serves until asked to end, by processes that run `module`. Raises ConfigError, and the error of a server that
    cannot serve."""
    launches = make_launches(config, server, key_digests)
    parallel = config.parallel_config
    listener = bind_port(server.host, parallel.data_parallel_supervisor_port, "--data-parallel-supervisor-port")
    first = parallel.machine_engines.start
    servers = PortServers(
        [launch.port for launch in launches], first, lambda i: start_process(module, launches[i]), Probe(server)
    )

    async def run() -> None:
        patience_s = server.drain_accept_s + config.lifecycle_config.shutdown_timeout + END_GRACE_S
        health = await asyncio.start_server(servers.answer, sock=listener, limit=MAX_REQUEST_BYTES)
        async with health:
            with StopSignals() as stop:
                await servers.run(stop, patience_s)

    logger.info(
        "%d servers on ports %d to %d; their health: port %d",
        len(launches),
        launches[0].port,
        launches[-1].port,
        parallel.data_parallel_supervisor_port,
    )
    with listener:
        asyncio.run(run())

"""Servers on ports that follow one another: their start, deaths and end, and their joint health."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from quire import EngineArgs
from quire.config.server import ServerConfig, decode_config, decode_server_config
from quire.errors import ConfigError, ServerError
from quire.frontend.fleet import ports as ports_module
from quire.frontend.fleet.ports import PortServers, decode_launch, make_launches
from quire.frontend.http.server import StopRequests


class Process:
    """A process that ends when the test, or SIGKILL, says so."""

    def __init__(self, ends_on: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)) -> None:
        self.pid = 1
        self.signals: list[int] = []
        self._ends_on = ends_on
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def send_signal(self, number: int) -> None:
        if self._code.done():
            raise ProcessLookupError
        self.signals.append(number)
        if number in self._ends_on:
            self.end(0 if number == signal.SIGTERM else -number)

    def end(self, code: int) -> None:
        self._code.set_result(code)


class Machine:
    """Two servers on it, and what the test does to them."""

    def __init__(self) -> None:
        self.started: list[tuple[int, Process]] = []
        self.ready: set[int] = set()
        """Ports that answer."""
        self.ends_on: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)
        self.stop = StopRequests()
        self.servers = PortServers((8100, 8101), 4, self._start, self._probe)

    async def _start(self, index: int) -> Process:
        process = Process(self.ends_on)
        self.started.append((index, process))
        return process

    async def _probe(self, port: int) -> bool:
        return port in self.ready

    def last(self, index: int) -> Process:
        return [process for i, process in self.started if i == index][-1]

    @property
    def states(self) -> list[str]:
        return [each["state"] for each in self.servers.describe()]


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "STARTING_LOOK_S", "SAME_SIGNAL_GRACE_S", "END_GRACE_S"):
        monkeypatch.setattr(ports_module, name, 0.0)


@asynccontextmanager
async def running(machine: Machine, patience_s: float = 60.0) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(machine.servers.run(machine.stop, patience_s))
    yield task
    assert task.done()


def test_health_is_that_of_all() -> None:
    async def story() -> None:
        machine = Machine()
        async with running(machine) as task:
            await until(lambda: len(machine.started) == 2)
            machine.ready = {8100}
            await until(lambda: machine.states == ["up", "starting"])
            assert not machine.servers.is_ready
            machine.ready = {8100, 8101}
            await until(lambda: machine.servers.is_ready)
            machine.ready = {8101}
            await until(lambda: not machine.servers.is_ready)
            machine.ready = {8100, 8101}
            await until(lambda: machine.servers.is_ready)
            machine.stop.ask()
            assert not machine.servers.is_ready, "it must get no requests any more"
            await task
        assert [process.signals for _, process in machine.started] == [[signal.SIGTERM]] * 2

    asyncio.run(story())


def test_a_server_that_dies_is_started_again() -> None:
    async def story() -> None:
        machine = Machine()
        async with running(machine) as task:
            machine.ready = {8100, 8101}
            await until(lambda: machine.servers.is_ready)
            machine.ready = {8100}
            machine.last(1).end(-9)
            await until(lambda: len(machine.started) == 3)
            await until(lambda: machine.states == ["up", "starting"])
            machine.ready = {8100, 8101}
            await until(lambda: machine.servers.is_ready)
            health = machine.servers.describe()
            assert health[1] == {"engine": 5, "port": 8101, "state": "up", "restarts": 1}
            assert health[0]["restarts"] == 0
            machine.stop.ask()
            await task
        assert [index for index, _ in machine.started] == [0, 1, 1]

    asyncio.run(story())


def test_one_that_cannot_serve_ends_all() -> None:
    async def story() -> None:
        machine = Machine()
        async with running(machine) as task:
            machine.ready = {8100}
            await until(lambda: machine.states == ["up", "starting"])
            machine.last(1).end(2)
            with pytest.raises(ServerError, match="engine 5 on port 8101 exited with code 2 before it served"):
                await task
        assert machine.last(0).signals == [signal.SIGTERM]

    asyncio.run(story())


def test_one_that_dies_too_often_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_module, "RESTART_LIMIT", 1)

    async def story() -> None:
        machine = Machine()
        async with running(machine) as task:
            machine.ready = {8100, 8101}
            await until(lambda: machine.servers.is_ready)
            machine.last(0).end(1)
            await until(lambda: len(machine.started) == 3 and machine.servers.is_ready)
            machine.last(0).end(1)
            with pytest.raises(ServerError, match="budget of 1 restarts in 60 s is used up"):
                await task

    asyncio.run(story())


def test_the_second_signal_reaches_all_and_who_does_not_end_is_killed() -> None:
    async def story() -> None:
        machine = Machine()
        machine.ends_on = (signal.SIGKILL,)
        async with running(machine) as task:
            machine.ready = {8100, 8101}
            await until(lambda: machine.servers.is_ready)
            machine.stop.ask()
            await until(lambda: machine.last(1).signals == [signal.SIGTERM])
            machine.stop.hurry()
            await task
        for _, process in machine.started:
            assert process.signals == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]

    asyncio.run(story())


def test_one_that_is_asked_to_end_with_all_others_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to the whole group reaches the servers and this process in any order."""
    monkeypatch.setattr(ports_module, "SAME_SIGNAL_GRACE_S", 60.0)

    async def story() -> None:
        machine = Machine()
        async with running(machine) as task:
            machine.ready = {8100, 8101}
            await until(lambda: machine.servers.is_ready)
            machine.last(0).send_signal(signal.SIGTERM)
            await until(lambda: machine.states == ["down", "up"])
            machine.stop.ask()
            await task
        assert len(machine.started) == 2

    asyncio.run(story())


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /health HTTP/1.1", 503),
        ("GET /health/ready?x=1 HTTP/1.1", 503),
        ("HEAD /health/ready HTTP/1.0", 503),
        ("GET /health/live HTTP/1.1", 200),
        ("POST /health HTTP/1.1", 405),
        ("GET /v1/models HTTP/1.1", 404),
        ("nonsense", 405),
        ("x" * 100, None),
    ],
)
def test_answers_of_the_health_port(request_line: str, status: int | None) -> None:
    async def ask() -> bytes:
        machine = Machine()
        health = await asyncio.start_server(machine.servers.answer, "127.0.0.1", 0, limit=64)
        async with health:
            reader, writer = await asyncio.open_connection(*health.sockets[0].getsockname())
            writer.write(f"{request_line}\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
        return answer

    try:
        answer = asyncio.run(ask())
    except ConnectionResetError:
        answer = b""
    if status is None:
        assert answer == b""
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert bool(body) == ("HEAD" not in request_line)
    if status == 503 and body:
        assert [each["state"] for each in json.loads(body)["servers"]] == ["down", "down"]


def make_config(**fields: Any) -> Any:
    args: dict[str, Any] = {"data_parallel_size": 4, "data_parallel_multi_port_external_lb": True, **fields}
    return EngineArgs(model="demo", **args).create_engine_config("serving")


def test_each_server_has_an_engine_and_ports_of_its_own() -> None:
    config = make_config(data_parallel_size_local=2, data_parallel_start_rank=2)
    server = ServerConfig(port=8100, api_key=("secret",), enable_admin=True, admin_port=9000)
    launches = [decode_launch(msgspec.msgpack.encode(it)) for it in make_launches(config, server, (b"k",))]
    assert [launch.key_digests for launch in launches] == [(b"k",), (b"k",)]
    servers = [decode_server_config(launch.server_config) for launch in launches]
    assert [(it.port, it.admin_port, it.api_key) for it in servers] == [(8100, 9000, ()), (8101, 9001, ())]
    parallel = [decode_config(launch.engine_config).parallel_config for launch in launches]
    assert [(it.first_engine, it.num_local_engines, it.is_external) for it in parallel] == [(2, 1, True), (3, 1, True)]
    assert {it.machine_engines for it in parallel} == {range(2, 4)}, "they share threads and memory"
    assert not any(it.is_hybrid or it.remote_engines for it in (config.parallel_config, *parallel))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"uds": "/tmp/x"}, "--uds /tmp/x is one socket"),
        ({"port": 0}, "give a number"),
        ({"api_server_count": 2}, "leave --api-server-count out"),
        ({"ssl_cert_reqs": 2}, "give --ssl-cert-reqs 1"),
        ({"port": 65533}, "65533 is the first of 4"),
        ({"port": 9254}, "9256 is one of --data-parallel-supervisor-port"),
        ({"enable_admin": True}, "take --admin-port 8001 .* 8001 is one of --port"),
    ],
)
def test_flags_with_which_several_servers_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_launches(make_config(), ServerConfig(**fields), ())

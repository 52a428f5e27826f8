"""A server from its sockets to its end: listeners, signals, and the drain that follows them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import uvicorn
from fastapi import FastAPI

from quire import envs
from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.frontend.http.connection import make_connection_class, make_tls_context
from quire.frontend.http.state import ServerState
from quire.frontend.metrics.publish.stat_loggers import StatLoggerManager
from quire.logger import init_logger

logger = init_logger(__name__)

BACKLOG = 2048
IDLE_CONNECTION_S = 75
"""How long a connection without a request is kept. Longer than clients keep theirs (httpx 5 s, usual balancers 60 s):
else a request may be on its way while we close, and its sender cannot know whether it was heard."""
END_GRACE_S = 1.0
"""What connections get to send their last words."""


class AppBuilder(Protocol):
    """Makes the application of the main listener, or of the admin one."""

    def __call__(self, state: ServerState, *, is_admin: bool = False) -> FastAPI: ...


@dataclass
class Listeners:
    """The sockets of a server, bound before anything is loaded: a port that is taken is told of at once."""

    main: socket.socket
    admin: socket.socket | None
    url: str
    admin_url: str | None = None
    tls: ssl.SSLContext | None = None
    is_closed: bool = field(default=False, init=False)

    @property
    def sockets(self) -> list[socket.socket]:
        """All of them."""
        return [listener for listener in (self.main, self.admin) if listener is not None]

    @staticmethod
    def bind(config: ServerConfig) -> Listeners:
        """Raises ConfigError where the system refuses, and for TLS files that cannot be used."""
        tls = make_tls_context(config)
        scheme = "http" if tls is None else "https"
        if config.uds is not None:
            main, url = _bind_unix(config.uds), f"unix:{config.uds}"
        else:
            main = _bind_port(config.host, config.port, "--port")
            url = _url(scheme, config.host, main)
        if not config.admin_is_apart:
            return Listeners(main, None, url, tls=tls)
        try:
            admin = _bind_port(config.admin_host, config.admin_port, "--admin-port")
        except ConfigError:
            main.close()
            raise
        return Listeners(main, admin, url, _url(scheme, config.admin_host, admin), tls)

    def close(self) -> None:
        """Give the addresses back; a Unix socket's file goes, too.

        Once: later, the file may be another server's. uvicorn may have closed the sockets before.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if self.url.startswith("unix:"):
            with contextlib.suppress(OSError):
                os.unlink(self.url.removeprefix("unix:"))
        for listener in self.sockets:
            listener.close()


def _bind_port(host: str | None, port: int, flag: str) -> socket.socket:
    try:
        family = socket.AF_INET6 if host is not None and ":" in host else socket.AF_INET
        return socket.create_server((host or "", port), family=family, backlog=BACKLOG)
    except OSError as e:
        raise ConfigError(
            f"{flag} {port} on {host or 'all addresses'} cannot be listened on: {e.strerror or e}; choose another one"
        ) from None


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(Path(path).stat().st_mode):  # one that a server left behind
                os.unlink(path)
        before = os.umask(0o177)  # other users' requests go through a port, with a key
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        raise ConfigError(f"--uds {path} cannot be listened on: {e.strerror or e}") from None
    return listener


def _url(scheme: str, host: str | None, listener: socket.socket) -> str:
    name = host or "0.0.0.0"
    return f"{scheme}://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"


class StopRequests:
    """Whether the server is asked to end, and whether at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def ask(self) -> None:
        """Somebody asks. Idempotent."""
        self.asked.set()

    def hurry(self) -> None:
        """At once."""
        self.asked.set()
        self.hurried.set()


class StopSignals(StopRequests):
    """SIGTERM and SIGINT, while it is entered: the second signal is a hurry, whoever else has asked meanwhile."""

    _SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        super().__init__()
        self._has_signal = False

    def __enter__(self) -> Self:
        for number in self._SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._note_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _note_signal(self) -> None:
        (self.hurry if self._has_signal else self.ask)()
        self._has_signal = True


async def serve(
    state: ServerState,
    build_app: AppBuilder,
    listeners: Listeners,
    *,
    shutdown_timeout_s: float,
    on_ready: Callable[[], None] = lambda: None,
    stop: StopSignals | None = None,
) -> None:
    """Answer requests until SIGTERM or SIGINT, drain, and return. A second signal ends what still runs at once. Others
    ask by `stop`.

    Raises ConfigError for a middleware that cannot be used. The engine is the caller's to shut down.
    """
    _route_log(state.config)
    servers = [_make_server(state, build_app(state))]
    sockets = [listeners.main]
    if listeners.admin is not None:
        servers.append(_make_server(state, build_app(state, is_admin=True)))
        sockets.append(listeners.admin)
    with stop or StopSignals() as stop, contextlib.ExitStack() as at_end:
        running = [
            asyncio.ensure_future(server.serve(sockets=[listener]))
            for server, listener in zip(servers, sockets, strict=True)
        ]
        starting = asyncio.ensure_future(_wait_started(servers))
        await asyncio.wait({starting, *running}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            gc.freeze()  # start-up's objects stay: walking them would stop the loop for 30 to 65 ms now and then
            at_end.callback(gc.unfreeze)
            on_ready()
            await _first_of(stop.asked.wait(), log_stats_regularly(state.engine.pipeline.stat_loggers), *running)
        starting.cancel()
        await drain(state, stop, shutdown_timeout_s)
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)


async def log_stats_regularly(loggers: StatLoggerManager) -> None:
    """Writes the statistics at every interval, also while there is no step that would."""
    while True:
        await asyncio.sleep(max(envs.LOG_STATS_INTERVAL.number(), 1.0))
        loggers.log_regularly()


async def drain(state: ServerState, stop: StopRequests, shutdown_timeout_s: float) -> None:
    """From the wish to stop to the end of the last request (promise P11)."""
    lifecycle = state.lifecycle
    lifecycle.is_draining = True
    state.engine.expect_shutdown()
    logger.info("shutting down; %d requests are under way", lifecycle.num_in_flight)
    if state.config.drain_accept_s:  # else nothing may come between the two
        await _first_of(asyncio.sleep(state.config.drain_accept_s), stop.hurried.wait())
    lifecycle.refuses_requests = True
    await _first_of(asyncio.sleep(shutdown_timeout_s), lifecycle.wait_idle(), stop.hurried.wait())
    lifecycle.is_stopping = True
    left = list(state.engine.pipeline.output_processor.request_states)
    if left:
        logger.warning("ending %d requests that --shutdown-timeout left no time for", len(left))
        await state.engine.abort(left, internal=True)
    await _first_of(asyncio.sleep(END_GRACE_S), lifecycle.wait_idle())


async def _first_of(*waits: Any) -> None:
    """Until one of them is over; the others are cancelled, unless they are tasks of somebody else."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    own = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()


class _Server(uvicorn.Server):
    """uvicorn's, with signals left to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture."""
        yield


def _make_server(state: ServerState, app: FastAPI) -> _Server:
    config = state.config
    settings = uvicorn.Config(
        app,
        http=make_connection_class(config.header_timeout_s, config.h11_max_incomplete_event_size),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=int(END_GRACE_S),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers or "TLSv1",
    )
    settings.load()
    return _Server(settings)


async def _wait_started(servers: Sequence[uvicorn.Server]) -> None:
    while not all(server.started for server in servers):
        await asyncio.sleep(0.005)


def _route_log(config: ServerConfig) -> None:
    """uvicorn's messages go where ours go."""
    log = logging.getLogger("uvicorn")
    log.setLevel(config.uvicorn_log_level.upper() if config.uvicorn_log_level != "trace" else "DEBUG")
    log.handlers = list(logging.getLogger("quire").handlers)
    log.propagate = not log.handlers

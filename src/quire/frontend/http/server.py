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
from starlette.applications import Starlette

from quire import envs
from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.frontend.http.connection import make_connection_class, make_tls_context
from quire.frontend.http.state import ServerState
from quire.frontend.metrics.publish.stat_loggers import StatLoggerManager
from quire.logger import init_logger
from quire.timeline import release_garbage
from quire.wire.sockets import has_listener

logger = init_logger(__name__)

BACKLOG = 2048
IDLE_CONNECTION_S = 75
"""Time after which an idle connection is closed. Longer than clients keep theirs (httpx 5 s, usual balancers 60 s):
otherwise a request may arrive while the server closes, and its sender cannot know whether it was processed."""
END_GRACE_S = 1.0
"""Time for connections to send their last bytes."""


class AppBuilder(Protocol):
    """Makes the application of the main listener, or of the admin one."""

    def __call__(self, state: ServerState, *, is_admin: bool = False) -> Starlette: ...


@dataclass
class Listeners:
    """The sockets of a server. They are bound before anything is loaded, so that a taken port is reported at once."""

    main: socket.socket
    admin: socket.socket | None
    url: str
    admin_url: str | None = None
    tls: ssl.SSLContext | None = None
    is_closed: bool = field(default=False, init=False)

    @property
    def sockets(self) -> list[socket.socket]:
        """All sockets."""
        return [listener for listener in (self.main, self.admin) if listener is not None]

    @staticmethod
    def bind(config: ServerConfig) -> Listeners:
        """Binds the sockets. Raises ConfigError where the system refuses, and for unusable TLS files."""
        tls = make_tls_context(config)
        scheme = "http" if tls is None else "https"
        if config.uds is not None:
            main, url = _bind_unix(config.uds), f"unix:{config.uds}"
        else:
            main = bind_port(config.host, config.port, "--port")
            url = _url(scheme, config.host, main)
        if not config.admin_is_apart:
            return Listeners(main, None, url, tls=tls)
        try:
            admin = bind_port(config.admin_host, config.admin_port, "--admin-port")
        except ConfigError:
            main.close()
            raise
        return Listeners(main, admin, url, _url(scheme, config.admin_host, admin), tls)

    def close(self) -> None:
        """Closes the sockets and removes a Unix socket's file.

        Only the first call removes the file: later it may belong to another server.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if self.url.startswith("unix:"):
            with contextlib.suppress(OSError):
                os.unlink(self.url.removeprefix("unix:"))
        for listener in self.sockets:
            listener.close()


def bind_port(host: str | None, port: int, flag: str) -> socket.socket:
    """Returns a socket that listens. Raises ConfigError, with the flag's name, where the system refuses."""
    try:
        family = socket.AF_INET6 if host is not None and ":" in host else socket.AF_INET
        return socket.create_server((host or "", port), family=family, backlog=BACKLOG)
    except OSError as e:
        raise ConfigError(
            f"{flag} {port} on {host or 'all addresses'} cannot be listened on: {e.strerror or e}; choose another one"
        ) from None


def _bind_unix(path: str) -> socket.socket:
    if has_listener(path):
        raise ConfigError(f"--uds {path} cannot be listened on: another process listens there; choose another one")
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(Path(path).stat().st_mode):  # left behind by a server
                os.unlink(path)
        before = os.umask(0o177)  # other users must use a port, with a key
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
    """Requests to end the server, normally or at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def ask(self) -> None:
        """Asks the server to end. Idempotent."""
        self.asked.set()

    def hurry(self) -> None:
        """Asks the server to end at once."""
        self.asked.set()
        self.hurried.set()


class StopSignals(StopRequests):
    """Handles SIGTERM and SIGINT while it is entered. The second signal ends the server at once."""

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
    """Answers requests until SIGTERM, SIGINT or a request of `stop`, drains, and returns. A second signal ends running
    requests at once.

    Raises ConfigError for a middleware that cannot be used. The caller shuts the engine down.
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
            release_garbage()  # a collection of the objects of start-up would block the loop for 30 to 65 ms
            at_end.callback(gc.unfreeze)
            on_ready()
            await _first_of(stop.asked.wait(), log_stats_regularly(state.engine.pipeline.stat_loggers), *running)
        starting.cancel()
        await drain(state, stop, shutdown_timeout_s)
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)


async def log_stats_regularly(loggers: StatLoggerManager) -> None:
    """Writes the statistics at every interval, also while the engine makes no steps."""
    while True:
        await asyncio.sleep(max(envs.LOG_STATS_INTERVAL.number(), 1.0))
        loggers.log_regularly()


async def drain(state: ServerState, stop: StopRequests, shutdown_timeout_s: float) -> None:
    """Ends a server: refuses new requests and waits for the running ones, up to `shutdown_timeout_s` (promise P11)."""
    lifecycle = state.lifecycle
    lifecycle.is_draining = True
    state.engine.expect_shutdown()
    logger.info("shutting down; %d requests are under way", lifecycle.num_in_flight)
    if state.config.drain_accept_s:  # without it no request may come in between
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
    """Waits until one of `waits` is over and cancels the others, except tasks that the caller has made."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    own = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers; `serve` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _make_server(state: ServerState, app: Starlette) -> _Server:
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
    """Sends uvicorn's messages to Quire's log."""
    log = logging.getLogger("uvicorn")
    log.setLevel(config.uvicorn_log_level.upper() if config.uvicorn_log_level != "trace" else "DEBUG")
    log.handlers = list(logging.getLogger("quire").handlers)
    log.propagate = not log.handlers

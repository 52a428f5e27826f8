"""One API process of several: `python -m quire.frontend.fleet.proc`, started by `ApiProcess`.

It accepts connections from the sockets it has inherited, attaches to the core its parent has started, and serves like
any server. It ends on request, and with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from quire.config.server import decode_config, decode_server_config
from quire.errors import NotFoundError, QuireError, ServerError, error_name
from quire.frontend.adapters import AdapterRegistry, RemoteTable
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.link import Verdict
from quire.frontend.client.mp import AsyncMPClient
from quire.frontend.client.shared_links import MemberLink, Suspect
from quire.frontend.fleet.counts import FleetCounts
from quire.frontend.fleet.crash_attribution import EncodedSuspect, encode_suspects
from quire.frontend.fleet.metrics import encode_report, gather_from_parent
from quire.frontend.fleet.peer_link import FleetPeers, PeerLink
from quire.frontend.http.connection import make_tls_context
from quire.frontend.http.errors import UnavailableError
from quire.frontend.http.membership import Membership
from quire.frontend.http.server import Listeners, StopRequests, StopSignals, serve
from quire.frontend.http.state import ServerState
from quire.frontend.metrics.collect.facts import Load
from quire.frontend.metrics.publish.stat_loggers import LoggingStatLogger, RecentRequests
from quire.frontend.metrics.server_metrics import ServerMetrics
from quire.frontend.openai.app import add_parts, build_app, load_adapters
from quire.frontend.openai.responses.store import OPERATIONS, ServerResponses
from quire.frontend.supervision.quarantine import CoreDeath, DeathCause
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.handshake import check_protocol_version
from quire.wire.peers import LENGTH, ApiLaunch, PeerMessage, encode_peer
from quire.wire.process import die_with_parent, set_process_title

logger = init_logger("quire.frontend.fleet.proc")  # as a process this module is __main__


class PeerServices:
    """The table of calls. Arguments are those that the callers, in this package and in `responses/`, send."""

    def __init__(self, state: ServerState, client: AsyncMPClient, stop: StopRequests) -> None:
        self._state = state
        self._client = client
        self._stop = stop
        responses = state.part(ServerResponses).local
        self._table: dict[str, Callable[..., Awaitable[Any]]] = {
            "abort": self._abort,
            "watch": self._watch,
            "report": self._report_metrics,
            "core_died": self._report_death,
            "convict": self._convict,
            "core_gone": self._note_core_gone,
            "stop": self._end,
            "adapter": self._note_adapter,
            "response_events": responses.events_from,
            **{name: partial(operation, responses) for name, operation in OPERATIONS.items()},
        }

    async def handle(self, call: PeerMessage) -> Any:
        """Carries out a call. Raises NotFoundError for an unknown one."""
        method = self._table.get(call.method)
        if method is None:
            raise NotFoundError(f"an API process has no call {call.method!r}")
        return await method(*call.args)

    async def _abort(self, request_ids: list[str]) -> None:
        await self._state.engine.abort(request_ids)

    async def _watch(self, request_ids: list[str], after: int) -> tuple[Any, Any]:
        return self._state.watch.look_here(request_ids, after)

    async def _report_metrics(self, load: Any) -> bytes:
        self._state.engine.pipeline.stats.note_load(msgspec.convert(load, Load))
        return encode_report(self._state.metrics.take())

    async def _note_core_gone(self, reason: str, engine: int | None = None) -> None:
        self._client.note_gone(reason, engine)

    async def _report_death(
        self,
        engine: int,
        incarnation: int,
        cause: DeathCause,
        description: str,
        request_ids: list[str] | None,
        was_asked: bool,
        is_planned: bool = False,
    ) -> list[EncodedSuspect]:
        ids = None if request_ids is None else tuple(request_ids)
        death = CoreDeath(cause, description, ids, was_asked, is_planned)
        engines, link = self._client.engines, self._link(engine)

        def take_in() -> list[Suspect]:
            suspects = link.report_death(incarnation, death)
            engines.follow_death(engine, death)
            return suspects

        suspects = await asyncio.wrap_future(self._client.ask_link(take_in))
        return await asyncio.to_thread(encode_suspects, suspects) if suspects else []

    async def _convict(self, engine: int, request_id: str, message: str) -> None:
        link, verdict = self._link(engine), Verdict(request_id, message)
        await asyncio.wrap_future(self._client.ask_link(lambda: link.convict(verdict)))

    def _link(self, engine: int) -> MemberLink:
        link = self._client.engines.links[engine]
        assert isinstance(link, MemberLink)  # made with addresses of a member
        return link

    async def _note_adapter(self, name: str, adapter: Any) -> None:
        names = self._state.part(AdapterRegistry).names
        assert isinstance(names, RemoteTable)  # there are several processes
        names.note(name, adapter)

    async def _end(self, is_hurried: bool) -> None:
        (self._stop.hurry if is_hurried else self._stop.ask)()


class ApiServer:
    """Composition root of an API process: the engine it attaches to, and the state it shares with the others."""

    def __init__(self, launch: ApiLaunch) -> None:
        """Blocks until the core is ready. Raises the error that keeps this process from serving."""
        self._launch = launch
        self._config = decode_server_config(launch.server_config)
        engine_config = decode_config(launch.engine_config)
        self._counts = FleetCounts.attach(Path(launch.counts_path), launch.index, launch.key_digests)
        self._lifecycle = engine_config.lifecycle_config
        self._stall_s = engine_config.frontend_config.slow_client_timeout_s
        self.engine = AsyncLLM(engine_config, client_addresses=launch.client)
        self._counts.share_admission(self.engine.admission)
        self._recent = RecentRequests(clock=_now_us)
        self.engine.pipeline.stat_loggers.add(self._recent)
        self.engine.pipeline.stat_loggers.drop(LoggingStatLogger)  # the parent's covers all processes
        self._stop = StopSignals()
        self._services: PeerServices | None = None

    async def run(self, connection: socket.socket) -> None:
        """Serves until asked to end. Ends the process at once if the parent is gone."""
        link = PeerLink(self._handle)
        await link.connect(connection)
        reading = asyncio.create_task(link.run())
        try:
            serving = asyncio.create_task(self._serve(link))
            await asyncio.wait({serving, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                logger.error("the process that started this API process is gone: it ends")
                os._exit(1)
            await serving
        except QuireError as e:
            link.notify("failed", error_name(e), str(e))
            raise
        finally:
            await link.end()

    async def _serve(self, link: PeerLink) -> None:
        client = self.engine.engine_core
        assert isinstance(client, AsyncMPClient)  # it was made with addresses
        client.control_relay = partial(link.call, "control")
        state = self._make_state(link)
        self._services = PeerServices(state, client, self._stop)
        await link.call("join")
        await load_adapters(state)
        async with self._exchanging_metrics(link, state.metrics):
            await serve(
                state,
                build_app,
                self._listeners(),
                shutdown_timeout_s=self._lifecycle.shutdown_timeout,
                on_ready=partial(link.notify, "ready"),
                stop=self._stop,
            )

    @contextlib.asynccontextmanager
    async def _exchanging_metrics(self, link: PeerLink, metrics: ServerMetrics) -> AsyncIterator[None]:
        """Lets the parent gather this process's metrics meanwhile, and sends it the last report afterwards."""
        if self.engine.pipeline.stats.metrics is None:
            yield
            return
        await link.call("report", encode_report(metrics.take()), False)
        metrics.gather = partial(gather_from_parent, link)
        try:
            yield
        finally:
            last = None
            with contextlib.suppress(ServerError):  # the exporter has failed
                last = encode_report(metrics.take())
            with contextlib.suppress(UnavailableError):
                await link.call("report", last, True)

    def _make_state(self, link: PeerLink) -> ServerState:
        launch = self._launch
        member = Membership(
            index=launch.index,
            num_processes=launch.num_processes,
            peers=FleetPeers(link),
            in_flight=self._counts.in_flight,
            rooms_of_keys=self._counts.rooms_of_keys,
            salt_secret=launch.salt_secret,
            created=launch.created,
        )
        return add_parts(
            ServerState(
                self.engine,
                self._config,
                key_digests=launch.key_digests,
                stall_s=self._stall_s,
                recent=self._recent,
                member=member,
                metrics=ServerMetrics(self.engine.pipeline.stats, str(launch.index)),
            )
        )

    def _listeners(self) -> Listeners:
        launch = self._launch
        admin = None if launch.admin_listener is None else socket.socket(fileno=launch.admin_listener)
        main = socket.socket(fileno=launch.listener)
        return Listeners(main, admin, *launch.urls, make_tls_context(self._config))

    async def _handle(self, call: PeerMessage) -> Any:
        assert self._services is not None  # there are no calls before this process has joined
        return await self._services.handle(call)


def _now_us() -> int:
    """Returns the time of a clock that all processes of this machine share, and that never goes back."""
    return time.monotonic_ns() // 1000


def read_launch(connection: socket.socket) -> ApiLaunch:
    """Returns the first message. Raises EOFError without one, ConfigError from another version of Quire."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    launch = msgspec.msgpack.decode(_read(connection, length), type=ApiLaunch)
    check_protocol_version(launch.protocol_version, "the server")
    return launch


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the server that started this API process is gone")
        data += part
    return bytes(data)


def main() -> int:
    """Runs the process. Returns its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    connection = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    launch = read_launch(connection)
    die_with_parent(launch.parent_pid)
    set_process_title(f"quire-api-{launch.index}")
    try:
        server = ApiServer(launch)
        try:
            with asyncio.Runner(loop_factory=resolve("uvloop:new_event_loop")) as runner:
                runner.run(server.run(connection))
        finally:
            server.engine.shutdown()
    except QuireError as e:
        logger.error("API process %d cannot serve: %s", launch.index, e)
        with contextlib.suppress(OSError):  # closed if the error has been reported already
            connection.sendall(encode_peer(PeerMessage(0, "failed", args=(error_name(e), str(e)))))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

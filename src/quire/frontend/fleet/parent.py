"""A server of several API processes, from its start to its end: the process that owns the sockets and the core.

It answers no request itself. It starts the processes and the core, restarts them when they die, passes calls on between
the processes, and ends them before the core.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from quire import envs
from quire.config.engine import EngineConfig
from quire.config.server import ServerConfig, encode_config
from quire.errors import ConfigError, NotFoundError, QuireError, ServerError, make_error
from quire.frontend.adapters import AdapterTable, ServedAdapter, answer_peer, load_modules, make_door
from quire.frontend.client.engine_set import EngineSet
from quire.frontend.client.launcher import make_client_addresses
from quire.frontend.client.mp import AsyncMPClient
from quire.frontend.client.shared_links import OwnerLink
from quire.frontend.fleet.counts import FleetCounts
from quire.frontend.fleet.crash_attribution import CrashAttribution
from quire.frontend.fleet.metrics import EngineWatch, FleetMetrics, encode_report
from quire.frontend.fleet.peer_link import PeerLink
from quire.frontend.http.connection import WaitingRoom
from quire.frontend.http.errors import UnavailableError
from quire.frontend.http.membership import Membership
from quire.frontend.http.server import END_GRACE_S, Listeners, StopRequests, StopSignals, log_stats_regularly
from quire.frontend.metrics.server_metrics import ServerMetrics
from quire.frontend.routing.load_board import LoadBoard
from quire.frontend.routing.policy import LeastWait
from quire.frontend.routing.router import Router
from quire.frontend.supervision.quarantine import SAME_SIGNAL_GRACE_S, describe_exit, was_asked_to_end
from quire.frontend.supervision.supervisor import RestartBudget
from quire.logger import child_level, init_logger
from quire.timeline import release_garbage
from quire.wire.peers import EVERYBODY, PARENT, ApiLaunch, PeerMessage, encode_peer
from quire.wire.process import search_path
from quire.wire.serial import WireError
from quire.wire.sockets import SocketDirectory

logger = init_logger(__name__)

RESTART_LIMIT = 6
RESTART_WINDOW_S = 60.0
"""Number of restarts of each process within `RESTART_WINDOW_S`; after more the server ends."""
END_MARGIN_S = 5.0
"""Time for the processes to end, beyond the time for their requests."""
ANSWER_TIMEOUT_S = 2.0
"""Time for which a call of all processes waits for one of them, which may have been stopped."""
API_MODULE = "quire.frontend.fleet.proc"
KILL_TIMEOUT_S = 10.0
"""Time for a process to end once its connection has ended, and again after SIGKILL."""
_LOOK_S = 0.02


class ApiProcess:
    """A running API process. Belongs to the thread that makes it: when that thread ends, the system kills it.

    The child is a plain command, `python -m quire.frontend.fleet.proc`. It inherits the listening sockets, the
    environment without keys, standard error, and as its standard input one end of a socket pair: when the pair is
    closed, it ends.
    """

    def __init__(self, launch: ApiLaunch) -> None:
        """Raises ServerError if the system refuses to start it."""
        self.index = launch.index
        self.connection, theirs = socket.socketpair()
        """Connection to the process. Its user closes it."""
        try:
            self._process = _spawn(launch, theirs)
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # it has died already, which will be noticed
            self.connection.sendall(encode_peer(launch))

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Sends a signal. Does nothing if the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> int:
        """Kills the process. Returns its exit code, negative for a signal."""
        self._process.kill()
        return self._process.wait(KILL_TIMEOUT_S)

    async def wait_end(self, timeout_s: float) -> int:
        """Waits for the process to end, and kills it after `timeout_s`. Returns its exit code."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (code := self._process.poll()) is None:
            if asyncio.get_running_loop().time() > deadline:
                return self.kill()
            await asyncio.sleep(_LOOK_S)
        return code


def _spawn(launch: ApiLaunch, standard_input: socket.socket) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise ConfigError("this Python does not know its own executable, so no API process can be started")
    keys = (envs.API_KEY.name, envs.API_KEY.vllm_name)
    environment = {name: value for name, value in os.environ.items() if name not in keys}
    environment["PYTHONPATH"] = search_path()
    environment[envs.LOGGING_LEVEL.name] = child_level()
    listeners = [fd for fd in (launch.listener, launch.admin_listener) if fd is not None]
    try:
        # -P: a file json.py in the working directory must not stand in for a module.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", API_MODULE],
            stdin=standard_input.fileno(),
            pass_fds=listeners,
            env=environment,
            start_new_session=True,  # the parent handles Ctrl-C in the user's terminal
        )
    except OSError as e:
        raise ServerError(f"no API process can be started: {e}") from e


class ApiProcesses:
    """Runs `num_processes`, restarts them when they die, and passes their calls on.

    Everything but `start` belongs to one event loop, on the thread that has called `start`.
    """

    def __init__(
        self, num_processes: int, make_launch: Callable[[int], ApiLaunch], on_death: Callable[[int], None]
    ) -> None:
        self._make_launch = make_launch
        self._on_death = on_death
        self._indices = range(1, num_processes + 1)
        self._processes: dict[int, ApiProcess] = {}
        self._connections: dict[int, PeerLink] = {}
        """Links to live processes."""
        self._links: dict[int, PeerLink] = {}
        """Links to processes that have joined; the others answer no calls."""
        self._failures: dict[int, QuireError] = {}
        """Errors that keep a process from serving, as it has reported them."""
        self._waiting = set(self._indices)
        """Processes that have never served yet."""
        self._stopping = asyncio.Event()
        self._is_hurried = False
        self._cores_gone: dict[int | None, str] = {}
        """Engines that are gone for good, and why; None: all."""
        self.are_ready = asyncio.Event()
        self.call_core: Callable[..., Any] | None = None
        """Calls a control verb that changes the core."""
        self.adapters: AdapterTable | None = None
        self.metrics: FleetMetrics | None = None
        """None where statistics are off."""

    def start(self) -> None:
        """Starts all processes. Raises ServerError."""
        for index in self._indices:
            self._processes[index] = ApiProcess(self._make_launch(index))

    def kill(self) -> None:
        """Kills all processes. Idempotent."""
        for process in self._processes.values():
            process.kill()

    async def run(self) -> None:
        """Runs the processes until all have ended on request. If one cannot serve, ends the others and raises its
        error."""
        keepers = [asyncio.ensure_future(self._keep(index)) for index in self._indices]
        done, others = await asyncio.wait(keepers, return_when=asyncio.FIRST_EXCEPTION)
        for _ in range(2):
            if others:
                self.stop()
                _, others = await asyncio.wait(others, timeout=END_MARGIN_S)
        for keeper in others:
            keeper.cancel()
        await asyncio.wait(keepers)
        for keeper in keepers:  # one error is raised; asyncio logs each that was not retrieved, with a traceback
            if not keeper.cancelled():
                keeper.exception()
        for keeper in done:
            keeper.result()

    def stop(self) -> None:
        """Asks the processes to end; the second call asks them to end at once."""
        self._is_hurried = self._stopping.is_set()
        self._stopping.set()
        for index, process in self._processes.items():
            link = self._links.get(index)
            if link is None:
                process.signal(signal.SIGTERM)  # it has no requests
            else:  # a signal could be its second: one sent to the process group has reached it, too
                link.notify("stop", self._is_hurried)

    def note_core_gone(self, reason: str, engine: int | None = None) -> None:
        """Reports that the core of an engine is gone for good, or all are: then the processes answer requests with an
        error from now on."""
        self._cores_gone[engine] = reason
        for link in self._links.values():
            link.notify("core_gone", reason, engine)

    # -- one process ----------------------------------------------------------------------------------------------

    async def _keep(self, index: int) -> None:
        budget = RestartBudget(RESTART_LIMIT, RESTART_WINDOW_S)
        while True:
            code = await self._follow(index)
            was_asked = was_asked_to_end(code)
            if await self._is_stopping_within(SAME_SIGNAL_GRACE_S if was_asked else 0.0):
                return
            failure = self._failures.pop(index, None)
            if index in self._waiting:
                raise failure or ServerError(
                    f"API process {index} {describe_exit(code)} before it served; its last words are above, on "
                    "standard error"
                )
            how = describe_exit(code)
            level = logging.WARNING if was_asked else logging.ERROR
            logger.log(level, "API process %d %s: its connections are lost, and its requests end", index, how)
            backoff_s = budget.take(time.monotonic())
            if backoff_s is None:
                raise ServerError(
                    f"API process {index} {how}{'' if failure is None else f' ({failure})'}, and its "
                    f"budget of {budget} is used up: the server ends"
                )
            if await self._is_stopping_within(backoff_s):
                return
            logger.warning("starting API process %d again", index)
            self._processes[index] = ApiProcess(self._make_launch(index))

    async def _is_stopping_within(self, duration_s: float) -> bool:
        """Waits so long, or until the processes are asked to end. Returns whether they are."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), duration_s)
        return self._stopping.is_set()

    async def _follow(self, index: int) -> int:
        """Follows a process to its end. Returns its exit code."""
        process = self._processes[index]
        link = PeerLink(partial(self._handle, index))
        await link.connect(process.connection)
        self._connections[index] = link
        try:
            await link.run()
        except WireError:
            logger.exception("API process %d sent an invalid message and is killed", index)
            process.signal(signal.SIGKILL)
        finally:
            del self._connections[index]
            self._links.pop(index, None)
        code = await process.wait_end(KILL_TIMEOUT_S)
        if self.metrics is not None:
            self.metrics.note_gone(index)
        self._on_death(index)
        return code

    # -- calls ----------------------------------------------------------------------------------------------------

    async def _handle(self, source: int, call: PeerMessage) -> Any:
        if call.target == PARENT:
            return await self._handle_own(source, call)
        if call.target == EVERYBODY:
            return list((await self._ask(call.method, call.args, apart_from=source)).values())
        if call.target not in self._indices:
            raise NotFoundError(f"this server has no process {call.target}")
        link = self._links.get(call.target)
        if link is None:
            raise UnavailableError(f"API process {call.target} is being started again")
        return await link.call(call.method, *call.args)

    async def ask_all(self, method: str, *args: Any) -> dict[int, Any]:
        """Returns the answer of each process, by its number, without those of processes that are gone. A process that
        fails, or takes longer than `ANSWER_TIMEOUT_S`, is logged and left out."""
        return await self._ask(method, args)

    async def _ask(self, method: str, args: tuple[Any, ...], *, apart_from: int | None = None) -> dict[int, Any]:
        links = {index: link for index, link in self._links.items() if index != apart_from}
        calls = (asyncio.wait_for(link.call(method, *args), ANSWER_TIMEOUT_S) for link in links.values())
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers = {}
        for index, result in zip(links, results, strict=True):
            if not isinstance(result, BaseException):
                answers[index] = result
            elif not isinstance(result, UnavailableError):
                words = f"no answer within {ANSWER_TIMEOUT_S:g} s" if isinstance(result, TimeoutError) else result
                logger.warning("API process %d is left out of %s: %s", index, method, words)
        return answers

    async def note_adapter(self, name: str, adapter: ServedAdapter | None) -> None:
        """Reports to all processes that a name has another adapter, or none."""
        await self.ask_all("adapter", name, adapter)

    async def _handle_own(self, source: int, call: PeerMessage) -> Any:
        match call.method, call.args:
            case "join", ():
                self._note_joined(source)
            case "ready", ():
                self._note_ready(source)
            case "failed", (error_type, message):
                self._failures[source] = make_error(error_type, message, ServerError)
            case "control", (method, args) if self.call_core is not None:
                return await self.call_core(method, *args)
            case "adapters", (str() as operation, *args) if self.adapters is not None:
                return await answer_peer(self.adapters, operation, *args)
            case "metrics", () if self.metrics is not None:
                return encode_report(await self.metrics.gather())
            case "report", (None | bytes() as report, bool() as is_final) if self.metrics is not None:
                self.metrics.note_report(source, report, is_final=is_final)
            case _:
                raise ServerError(f"the parent has no call {call.method!r}")
        return None

    def _note_joined(self, index: int) -> None:
        link = self._links[index] = self._connections[index]
        if self.metrics is not None:
            self.metrics.join(index, link)
        for engine, reason in self._cores_gone.items():
            link.notify("core_gone", reason, engine)
        if self._stopping.is_set():
            link.notify("stop", self._is_hurried)

    def _note_ready(self, index: int) -> None:
        if index not in self._waiting:
            logger.info("API process %d serves again", index)
            return
        self._waiting.discard(index)
        if not self._waiting:
            self.are_ready.set()


def serve_with_processes(
    config: EngineConfig,
    server: ServerConfig,
    key_digests: tuple[bytes, ...],
    listeners: Listeners,
    on_ready: Callable[[], None],
) -> None:
    """Serves until asked to end, with `server.api_server_count` processes. `server` holds no keys.

    Raises the error that keeps the core, or a process, from starting; ServerError if a process dies too often.
    """
    directory = SocketDirectory()
    client: AsyncMPClient | None = None
    count = server.api_server_count
    counts = FleetCounts.create(directory.path / "counts", count, key_digests)
    parallel = config.parallel_config
    board: LoadBoard | None = None
    if parallel.num_engines > 1:
        board = LoadBoard.create(directory.path / "loads", count, parallel.first_engine, parallel.num_engines)
    member = Membership()  # values that all processes share

    def make_launch(index: int) -> ApiLaunch:
        return ApiLaunch(
            index=index,
            num_processes=count,
            parent_pid=os.getpid(),
            engine_config=encode_config(config),
            server_config=encode_config(server),
            key_digests=key_digests,
            salt_secret=member.salt_secret,
            created=member.created,
            client=make_client_addresses(
                directory, index, is_judged=True, board_path="" if board is None else str(directory.path / "loads")
            ),
            listener=listeners.main.fileno(),
            admin_listener=None if listeners.admin is None else listeners.admin.fileno(),
            urls=(listeners.url, listeners.admin_url),
            counts_path=str(directory.path / "counts"),
        )

    def forget(index: int) -> None:
        counts.clear(index)
        if board is not None:
            board.clear(index)

    processes = ApiProcesses(count, make_launch, forget)
    first = parallel.first_engine
    owners = [OwnerLink(counts.are_others_busy) for _ in range(parallel.num_local_engines)]
    log_stats = not config.observability_config.disable_log_stats
    try:
        with WaitingRoom(listeners.sockets, listeners.tls, server.root_path or "", config.model_config.names[0]):
            client = AsyncMPClient(
                config,
                log_stats=log_stats,
                client_count=count + 1,
                directory=directory,
                meanwhile=processes.start,
                engines=EngineSet(owners, router=Router(LeastWait(), board), reroute="never", first_engine=first),
            )
        processes.call_core = client.call_utility_async
        names = config.model_config.names
        processes.adapters = AdapterTable(make_door(config), client.call_utility_async, names, processes.note_adapter)
        core = _SharedCore(
            client,
            EngineWatch(config, client, log_stats=log_stats),
            [
                CrashAttribution(
                    owner, client.ask_link, processes.ask_all, engine=engine, on_gone=processes.note_core_gone
                )
                for engine, owner in enumerate(owners, start=first)
            ],
        )
        drain_s = server.drain_accept_s + config.lifecycle_config.shutdown_timeout
        asyncio.run(_run(processes, core, drain_s, on_ready, server.lora_modules))
    finally:
        processes.kill()
        listeners.close()  # before the core ends, so that new clients are refused at once
        if client is not None:
            client.shutdown()
        directory.remove()


class _SharedCore(NamedTuple):
    """The parent's view of the core."""

    client: AsyncMPClient
    watch: EngineWatch
    attributions: list[CrashAttribution]
    """One per engine."""


async def _run(
    processes: ApiProcesses, core: _SharedCore, drain_s: float, on_ready: Callable[[], None], modules: Sequence[str]
) -> None:
    stats = core.watch.stats
    if processes.adapters is not None:
        await load_modules(processes.adapters, modules)  # the processes wait until they may join
    with StopSignals() as stop:
        helpers = [
            asyncio.create_task(_report_ready(processes, on_ready)),
            asyncio.create_task(_stop_when_asked(processes, core.client, stop, drain_s)),
            asyncio.create_task(_watch_core(processes, core.watch)),
            *(asyncio.create_task(attribution.run()) for attribution in core.attributions),
            asyncio.create_task(log_stats_regularly(stats.loggers)),
        ]
        if stats.metrics is not None:
            processes.metrics = FleetMetrics(ServerMetrics(stats, "0").take, stats.get_load)
            helpers.append(asyncio.create_task(processes.metrics.run()))
        try:
            await processes.run()
        finally:
            for helper in helpers:
                helper.cancel()


async def _report_ready(processes: ApiProcesses, on_ready: Callable[[], None]) -> None:
    await processes.are_ready.wait()
    release_garbage()
    on_ready()


async def _stop_when_asked(processes: ApiProcesses, client: AsyncMPClient, stop: StopRequests, drain_s: float) -> None:
    """Passes both signals on. Kills processes that do not end in time."""
    await stop.asked.wait()
    logger.info("shutting down the API processes")
    client.expect_shutdown()
    processes.stop()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.hurried.wait(), drain_s + END_GRACE_S + END_MARGIN_S)
    processes.stop()
    await asyncio.sleep(2 * END_GRACE_S + END_MARGIN_S)
    logger.warning("API processes did not end when they were asked to, and are killed")
    processes.kill()


async def _watch_core(processes: ApiProcesses, watch: EngineWatch) -> None:
    processes.note_core_gone(str(await watch.run()))

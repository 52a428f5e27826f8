"""The client of a server with several engines of its own: their state, restarts one by one, another number of them.

An engine's requests move to others before it ends (`EngineSet`), so that no client notices any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import msgspec

from quire.errors import ClientError, NotFoundError, ServerError, ValidationError
from quire.frontend.client.link import EngineLink, LinkState
from quire.frontend.client.mp import AsyncMPClient
from quire.frontend.supervision.nodes import RemoteEngine
from quire.logger import init_logger

logger = init_logger(__name__)

DrainMode = Literal["move", "wait"]
"""Fate of the requests of an engine that is taken out: others go on with them, or they end there."""
LOOK_S = 0.02
MAX_ENGINES = 64
"""Most engines of one machine."""


class EngineStatus(msgspec.Struct):
    """One engine, for operators."""

    engine: int
    state: str
    """up, restoring, down (it is being started), gone (it cannot be started again)."""
    is_draining: bool
    num_requests: int
    """Requests of this server at it."""
    incarnation: int
    """Number of cores it has had before this one."""
    pid: int | None
    restarts: dict[str, int] = {}
    """Restarts by cause; those that an operator asked for are not among them."""
    num_gpu_blocks: int = 0
    host: str = ""
    """Machine it is on; empty for this one, or while it is on none."""


class DPAsyncMPClient(AsyncMPClient):
    """A client that can say what its engines do, and take one out."""

    def list_engines(self) -> list[EngineStatus]:
        """Returns the state of each engine."""
        links, set_ = self._link_thread.links.links, self._link_thread.links
        statuses = []
        for engine, link in links.items():
            supervisor = self.resources.supervisor_of(engine)
            ready = link.ready_response
            statuses.append(
                EngineStatus(
                    engine,
                    link.state.value,
                    set_.is_draining(engine),
                    link.num_live_requests,
                    0 if supervisor is None else supervisor.incarnation,
                    None if supervisor is None else supervisor.core_pid,
                    {} if supervisor is None else dict(supervisor.restarts),
                    0 if ready is None else ready.num_gpu_blocks,
                    (supervisor.host or "") if isinstance(supervisor, RemoteEngine) else "",
                )
            )
        return statuses


class DPLBAsyncMPClient(DPAsyncMPClient):
    """A client that chooses the engine of each request, and can change their number.

    `is_scaling` is True while engines are added or removed. One operation runs at a time; a second one is refused.
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.is_scaling = False
        self._operation = asyncio.Lock()
        super().__init__(*args, **fields)

    async def drain_engine(self, engine: int, mode: DrainMode = "move", timeout_s: float = 120.0) -> None:
        """Sends an engine no requests until `resume_engine`, and waits until it has none. Raises ClientError for the
        last engine that takes any, TimeoutError if requests are left."""
        links = self._link_thread.links
        self._check_engine(engine)
        others = [i for i, link in links.links.items() if i != engine and link.state is LinkState.UP]
        if not any(not links.is_draining(i) for i in others):
            raise ClientError(f"engine {engine} is the only one that takes requests: there would be none")
        await self._ask(lambda: links.drain(engine, moves=mode == "move"))
        await self._wait(lambda: not links.links[engine].num_live_requests, timeout_s, f"engine {engine} has requests")

    async def resume_engine(self, engine: int) -> None:
        """Sends an engine requests again."""
        self._check_engine(engine)
        links = self._link_thread.links
        await self._ask(lambda: links.undrain(engine))

    async def restart_engine(self, engine: int, mode: DrainMode = "move", timeout_s: float = 120.0) -> None:
        """Ends the core of an engine in good order and starts another in its place; requests go on elsewhere meanwhile.

        With one engine they wait. Raises ServerError if no core comes up: the requests of others go on. Raises
        ClientError if engines share experts.
        """
        self._check_independent("restarted")
        async with self._one_operation():
            await self._restart(engine, mode, timeout_s)

    async def restart_engines(self, mode: DrainMode = "move", timeout_s: float = 120.0) -> None:
        """Restarts all engines, one after the other. Raises as `restart_engine`: a failed start ends the roll."""
        self._check_independent("restarted")
        async with self._one_operation():
            for engine in sorted(self._link_thread.links.links):
                supervisor = self.resources.supervisor_of(engine)
                if not (isinstance(supervisor, RemoteEngine) and supervisor.host is None):  # there is none to restart
                    await self._restart(engine, mode, timeout_s)

    async def _restart(self, engine: int, mode: DrainMode, timeout_s: float) -> None:
        self._check_engine(engine)
        links, supervisor = self._link_thread.links, self.resources.supervisor_of(engine)
        assert supervisor is not None  # there is such an engine
        if isinstance(supervisor, RemoteEngine) and supervisor.host is None:
            raise ClientError(f"engine {engine} is on a machine that is out of reach: start it there")
        link = links.links[engine]
        if len(links.links) > 1 and link.state is LinkState.UP:
            await self.drain_engine(engine, mode, timeout_s)
        before = self._incarnation_of(engine)
        try:
            supervisor.ask_restart()
            if self.resources.nodes is not None:
                self.resources.nodes.tell()

            def is_back() -> bool:
                if link.state is LinkState.GONE:
                    raise ServerError(f"engine {engine} could not be started again: {link.gone_reason}")
                return link.state is LinkState.UP and self._incarnation_of(engine) > before

            await self._wait(is_back, timeout_s, f"engine {engine} is not ready")
        finally:
            await self._ask(lambda: links.undrain(engine))
        logger.info("engine %d was restarted", engine)

    def _incarnation_of(self, engine: int) -> int:
        ready = self._link_thread.links.links[engine].ready_response
        return -1 if ready is None else ready.incarnation

    async def scale(self, num_engines: int, timeout_s: float = 120.0) -> None:
        """Changes the number of engines: new ones get requests once they are ready; the requests of those that are
        removed, the last ones, move first. If one cannot start, the number stays what it is then, and the error is
        raised."""
        if not 1 <= num_engines <= MAX_ENGINES:
            raise ValidationError(
                f"a server of one machine has 1 to {MAX_ENGINES} engines, not {num_engines}",
                param="new_data_parallel_size",
                value=num_engines,
            )
        self._check_independent("added or removed")
        if self.resources.launcher is None or not self.resources.launcher.may_scale:
            raise ClientError(
                "this server has a part of the engines (--data-parallel-hybrid-lb), or some are on other machines: "
                "their number is fixed; start another server or machine, or end one"
            )
        async with self._one_operation():
            self.is_scaling = True
            try:
                while len(known := self._link_thread.links.links) < num_engines:
                    await self._add_engine(min(set(range(num_engines)) - known.keys()), timeout_s)
                while len(known := self._link_thread.links.links) > num_engines:
                    await self._remove_engine(max(known))
            finally:
                self.is_scaling = False

    async def remove_engine(self, engine: int) -> None:
        """Removes an engine for good; its requests move first. Raises ClientError for the last one, and if engines
        share experts."""
        self._check_engine(engine)
        self._check_independent("removed")
        if len(self._link_thread.links.links) == 1:
            raise ClientError(f"engine {engine} is the last one: end the server instead")
        if engine not in self.resources.supervisors:
            raise ClientError(f"engine {engine} is on another machine: end it there")
        async with self._one_operation():
            await self._remove_engine(engine)

    async def _add_engine(self, engine: int, timeout_s: float) -> None:
        launcher, links = self.resources.launcher, self._link_thread.links
        assert launcher is not None  # `scale` has asked
        supervisor = launcher.make_supervisor(engine, self._link_thread)
        link = EngineLink()
        await self._ask(lambda: links.add_engine(engine, link))
        self.resources.supervisors[engine] = supervisor
        supervisor.start()

        def is_ready() -> bool:
            if link.state is LinkState.GONE:
                raise ServerError(f"engine {engine} could not be started: {link.gone_reason}")
            return link.state is LinkState.UP

        try:
            await self._wait(is_ready, timeout_s, f"engine {engine} is not ready")
        except BaseException:
            await asyncio.shield(self._remove_engine(engine))
            raise
        launcher.pin(supervisor, self.ready_response.max_model_len, self.engine_responses[engine])

    async def _remove_engine(self, engine: int, timeout_s: float = 120.0) -> None:
        links, supervisor = self._link_thread.links, self.resources.supervisors[engine]
        await self._ask(lambda: links.drain(engine, moves=True))
        await self._wait(lambda: links.can_empty(engine), timeout_s, f"engine {engine} has streams no other can take")
        await self._ask(lambda: links.remove_engine(engine))
        supervisor.stop()
        await asyncio.to_thread(supervisor.join, supervisor.end_timeout_s)
        if self.resources.launcher is not None:
            self.resources.launcher.note_removed(engine, supervisor)
        self.resources.former_restarts.update(supervisor.restarts)
        del self.resources.supervisors[engine]

    # -- on the way ---------------------------------------------------------------------------------------------------

    def _check_engine(self, engine: int) -> None:
        known = self._link_thread.links.links
        if engine not in known:
            raise NotFoundError(f"there is no engine {engine}; there are {', '.join(map(str, known))}")

    def _check_independent(self, what: str) -> None:
        launcher = self.resources.launcher
        if launcher is not None and launcher.shares_experts:
            raise ClientError(
                f"engines that share experts (--enable-expert-parallel) cannot be {what} one by one, because none "
                "steps without the others; restart the server"
            )

    @contextlib.asynccontextmanager
    async def _one_operation(self) -> AsyncIterator[None]:
        if self._operation.locked():
            raise ClientError("engines are being restarted or scaled already; try again when that has ended")
        async with self._operation:
            yield

    async def _ask(self, command: Callable[[], object]) -> None:
        await asyncio.wrap_future(self.ask_link(command))

    async def _wait(self, is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not is_so():
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"{what} after {timeout_s:g} s")
            await asyncio.sleep(LOOK_S)

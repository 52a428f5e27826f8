"""The client of a server with several engines of its own: their state, restarts one by one, another number of them.

An engine's requests move to others before it ends (`EngineSet`), so that no client notices any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import msgspec

from quire.errors import ClientError, ConfigError, NotFoundError, QuireError, ServerError, ValidationError
from quire.frontend.client.launcher import EngineLauncher, SharedExperts, SharingGroup
from quire.frontend.client.link import EngineLink, LinkState
from quire.frontend.client.mp import AsyncMPClient
from quire.frontend.supervision.nodes import RemoteEngine
from quire.logger import init_logger
from quire.wire.elastic import ReconfigureDistributedRequest, ReconfigureRankType

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

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if method != "update_weights" or not self.shares_experts:
            return await super().call_utility_async(method, *args)
        async with self._one_operation():
            return await super().call_utility_async(method, *args)

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

        With one engine they wait. Raises ServerError if no core comes up: the requests of others go on. Engines that
        share experts are restarted all at once, and all requests wait.
        """
        if self.shares_experts:
            self._check_engine(engine)
            await self._restart_together(mode, timeout_s)
            return
        async with self._one_operation():
            await self._restart(engine, mode, timeout_s)

    async def restart_engines(self, mode: DrainMode = "move", timeout_s: float = 120.0) -> None:
        """Restarts all engines, one after the other; all at once if they share experts. Raises as `restart_engine`: a
        failed start ends the roll."""
        if self.shares_experts:
            await self._restart_together(mode, timeout_s)
            return
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
        raised.

        Engines that share experts are prepared beside the steps and go over to the new number between two of them.
        Until then a failure changes nothing; an engine that dies later is started again in the new group."""
        if not 1 <= num_engines <= MAX_ENGINES:
            raise ValidationError(
                f"a server of one machine has 1 to {MAX_ENGINES} engines, not {num_engines}",
                param="new_data_parallel_size",
                value=num_engines,
            )
        if self.resources.launcher is None or not self.resources.launcher.may_scale:
            raise ClientError(
                "this server has a part of the engines (--data-parallel-hybrid-lb), or some of them or of their "
                "workers are on other machines (--nnodes, Ray): their number is fixed; start another server or "
                "machine, or end one"
            )
        if self.shares_experts:
            await self._whole(self._scale_together(num_engines, timeout_s))
            return
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
        if self.shares_experts:
            raise ClientError(
                "engines that share experts (--enable-expert-parallel) are removed from the last one on: change their "
                "number (quire fleet scale)"
            )
        if len(self._link_thread.links.links) == 1:
            raise ClientError(f"engine {engine} is the last one: end the server instead")
        if engine not in self.resources.supervisors:
            raise ClientError(f"engine {engine} is on another machine: end it there")
        async with self._one_operation():
            await self._remove_engine(engine)

    async def _add_engine(self, engine: int, timeout_s: float) -> None:
        await self._launch_engine(engine)
        try:
            await self._wait_launched(engine, timeout_s)
        except BaseException:
            await asyncio.shield(self._remove_engine(engine))
            raise
        self._pin(engine)

    async def _launch_engine(self, engine: int, group: SharingGroup | None = None) -> None:
        """Begins to start an engine. One of a `group` that does not compute yet gets no requests."""
        launcher, links = self._launcher, self._link_thread.links
        supervisor = launcher.make_supervisor(engine, self._link_thread, group)
        link = EngineLink()

        def add() -> None:
            links.add_engine(engine, link)
            if group is not None:
                links.drain(engine, moves=False)

        await self._ask(add)
        self.resources.supervisors[engine] = supervisor
        supervisor.start()

    async def _wait_launched(self, engine: int, timeout_s: float) -> None:
        link = self._link_thread.links.links[engine]

        def is_ready() -> bool:
            if link.state is LinkState.GONE:
                raise ServerError(f"engine {engine} could not be started: {link.gone_reason}")
            return link.state is LinkState.UP

        await self._wait(is_ready, timeout_s, f"engine {engine} is not ready")

    def _pin(self, engine: int) -> None:
        supervisor = self.resources.supervisors[engine]
        self._launcher.pin(supervisor, self.ready_response.max_model_len, self.engine_responses[engine])

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

    # -- engines that share experts -----------------------------------------------------------------------------------

    @property
    def _launcher(self) -> EngineLauncher:
        assert self.resources.launcher is not None  # this client starts the engines
        return self.resources.launcher

    @property
    def _sharing(self) -> SharedExperts:
        assert self._launcher.sharing is not None  # the engines share experts
        return self._launcher.sharing

    async def _whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Carries `work` out to its end, also if the caller does not wait for it any more."""
        await asyncio.shield(asyncio.create_task(work))

    async def _scale_together(self, num_engines: int, timeout_s: float) -> None:
        launcher, sharing, links = self._launcher, self._sharing, self._link_thread.links
        if num_engines > launcher.most_engines:
            raise ValidationError(
                f"at most {launcher.most_engines} engines share experts (--elastic-ep-max-dp-size), not {num_engines}",
                param="new_data_parallel_size",
                value=num_engines,
            )
        async with self._one_operation():
            if num_engines == len(links.links):
                return
            self.is_scaling = True
            former, group = sharing.group, sharing.begin(num_engines)
            before = {engine: self._incarnation_of(engine) for engine in links.links}
            try:
                try:
                    await self._prepare(group, before, timeout_s)
                    orders = await self._commit(group, before)
                except BaseException:
                    await self._discard(group, before)
                    raise
                await self._finish(group, before, orders)
                sharing.retire(former)
            finally:
                self.is_scaling = False

    async def _prepare(self, group: SharingGroup, before: Mapping[int, int], timeout_s: float) -> None:
        """Starts the engines that are added, and has the others read their next experts, beside their steps; moves the
        requests of those that are removed."""
        links = self._link_thread.links
        for engine, link in links.links.items():
            if link.state is not LinkState.UP:
                raise ClientError(f"engine {engine} is {link.state.value}: try again when it is up")
        if await self.call_utility_async("is_scheduler_paused"):
            raise ClientError("the engines are paused or asleep: resume them before their number is changed")
        added = [engine for engine in range(group.num_engines) if engine not in before]
        self._sharing.standby = frozenset(added)
        for engine in added:
            await self._launch_engine(engine, group)
        answers = [
            await self._call(engine, "reinitialize_distributed", make_request(group, engine)) for engine in before
        ]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*answers)
        except ConfigError as e:  # more engines than experts
            raise ValidationError(str(e), param="new_data_parallel_size", value=group.num_engines) from e
        except TimeoutError:
            raise TimeoutError(
                f"the experts of {group.num_engines} engines are not there after {timeout_s:g} s"
            ) from None
        for engine in added:
            await self._wait_launched(engine, timeout_s)
        removed = [engine for engine in before if engine >= group.num_engines]
        for engine in removed:
            await self._ask(partial(links.drain, engine, moves=True))
        for engine in removed:
            await self._wait(partial(_is_empty, links.links[engine]), timeout_s, f"engine {engine} has requests")

    async def _commit(self, group: SharingGroup, before: Mapping[int, int]) -> dict[int, asyncio.Future[Any]]:
        """Orders the engines to go over to `group`; from now on it is that of every core that is started. Returns their
        answers. Raises ServerError, with nothing changed, if one has died since it was asked to prepare."""
        thread, supervisors, launcher = self._link_thread, self.resources.supervisors, self._launcher
        orders: dict[int, Future[Any]] = {engine: Future() for engine in before}

        def commit() -> str:
            for engine, link in thread.links.links.items():
                has_died = engine in before and self._incarnation_of(engine) != before[engine]
                if has_died or link.state is not LinkState.UP:
                    return f"engine {engine} has died while all prepared for {group.num_engines} engines; try again"
            launcher.adopt_group(group, supervisors)
            for engine, order in orders.items():
                if engine >= group.num_engines:
                    supervisors[engine].expect_leave()
                thread.call("commit_prepared_elastic_ep", (), order, engine)
            return ""

        if why := await asyncio.wrap_future(self.ask_link(commit)):
            raise ServerError(why)
        return {engine: asyncio.wrap_future(order) for engine, order in orders.items()}

    async def _finish(
        self, group: SharingGroup, before: Mapping[int, int], orders: Mapping[int, asyncio.Future[Any]]
    ) -> None:
        """Waits until all engines are in their new group. There is no way back, and no limit of time: an engine that
        has not gone over is started again in the group; if that fails, the server ends."""
        links, strays = self._link_thread.links, list[int]()
        for engine, order in orders.items():
            try:
                await order
            except QuireError as e:
                strays.append(engine)
                logger.warning("engine %d has not gone over to %d engines: %s", engine, group.num_engines, e)
        for engine in strays:
            if engine < group.num_engines:
                await self._wait_in_group(engine, group)
        for engine in before:
            if engine >= group.num_engines:
                await self._remove_engine(engine)
        for engine in links.links:
            if engine not in before:
                self._pin(engine)
                await self._ask(partial(links.undrain, engine))
        logger.info("%d engines share the experts", group.num_engines)

    async def _wait_in_group(self, engine: int, group: SharingGroup, timeout_s: float = math.inf) -> None:
        """Waits until a core of an engine has been started in `group`. One that was started before is ended."""
        link, supervisor = self._link_thread.links.links[engine], self.resources.supervisors[engine]
        ended = set[int]()

        def is_there() -> bool:
            ready = link.ready_response
            if link.state is LinkState.GONE:
                raise ServerError(f"engine {engine} could not be started again: {link.gone_reason}")
            if link.state is not LinkState.UP or ready is None:
                return False
            if ready.experts_generation != group.generation and ready.incarnation not in ended:
                ended.add(ready.incarnation)
                supervisor.ask_restart()
            return ready.experts_generation == group.generation

        await self._wait(is_there, timeout_s, f"engine {engine} is not ready")

    async def _discard(self, group: SharingGroup, before: Mapping[int, int]) -> None:
        """Gives up a group that does not compute yet."""
        links = self._link_thread.links
        answers = [await self._call(engine, "discard_prepared_elastic_ep") for engine in before]
        await asyncio.gather(*answers, return_exceptions=True)
        for engine in links.links.keys() - before.keys():
            await self._remove_engine(engine)
        for engine in before:
            await self._ask(partial(links.undrain, engine))
        self._sharing.standby = frozenset()
        self._sharing.retire(group)

    async def _restart_together(self, mode: DrainMode, timeout_s: float) -> None:
        if mode == "wait":
            raise ClientError(
                "mode wait: engines that share experts (--enable-expert-parallel) restart together, and their requests "
                "go on then; use mode move"
            )
        if self.resources.nodes is not None:
            raise ClientError(
                "engines that share experts (--enable-expert-parallel) on several machines restart together: end the "
                "server, which ends its nodes, and start all again"
            )
        await self._whole(self._restart_group(timeout_s))

    async def _restart_group(self, timeout_s: float) -> None:
        launcher, sharing, links = self._launcher, self._sharing, self._link_thread.links
        async with self._one_operation():
            former, group = sharing.group, sharing.begin(len(links.links))
            await self._ask(lambda: launcher.adopt_group(group, self.resources.supervisors))
            await asyncio.gather(*(self._wait_in_group(engine, group, timeout_s) for engine in links.links))
            sharing.retire(former)
        logger.info("the engines were restarted")

    async def _call(self, engine: int, method: str, *args: Any) -> asyncio.Future[Any]:
        """Calls a control verb of one engine. Returns its answer."""
        thread, answer = self._link_thread, Future[Any]()
        await self._ask(lambda: thread.call(method, args, answer, engine))
        return asyncio.wrap_future(answer)

    # -- on the way ---------------------------------------------------------------------------------------------------

    def _check_engine(self, engine: int) -> None:
        known = self._link_thread.links.links
        if engine not in known:
            raise NotFoundError(f"there is no engine {engine}; there are {', '.join(map(str, known))}")

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


def _is_empty(link: EngineLink) -> bool:
    return not link.num_live_requests


def make_request(group: SharingGroup, engine: int) -> ReconfigureDistributedRequest:
    """Returns the request that an engine prepares for `group`."""
    stays = engine < group.num_engines
    rank = ReconfigureRankType.KEEP_CURRENT_RANK if stays else ReconfigureRankType.SHUTDOWN_CURRENT_RANK
    return ReconfigureDistributedRequest(
        group.num_engines, rank, rank, generation=group.generation, group_file=str(group.page)
    )

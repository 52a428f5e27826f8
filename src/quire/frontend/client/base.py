"""The interface of the frontend to an engine core, in this process or in another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from quire import envs
from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.resolve import resolve
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from quire.wire.handshake import ClientAddresses

CLIENTS: dict[tuple[bool, bool], str] = {
    (False, True): "quire.frontend.client.mp:SyncMPClient",
    (False, False): "quire.frontend.client.inproc:InprocClient",
    (True, True): "quire.frontend.client.mp:AsyncMPClient",
    (True, False): "quire.frontend.client.inproc:AsyncInprocClient",
}
"""(for asyncio, core in a process of its own) to the client."""
BALANCING_CLIENTS = {
    False: "quire.frontend.client.dp:DPLBAsyncMPClient",
    True: "quire.frontend.client.dp:DPAsyncMPClient",
}
"""Client for asyncio of several engines, by whether another process chooses the engine, or has started them."""


class _CoreClient(ABC):
    """The common part of clients of both kinds."""

    ready_response: EngineCoreReadyResponse
    """Values the core discovered at start-up."""

    @property
    def engine_responses(self) -> Mapping[int, EngineCoreReadyResponse]:
        """The same of each engine, by its index."""
        return {self.ready_response.engine_index: self.ready_response}

    @property
    def engine_dead(self) -> bool:
        """True once the core is gone for good: every call from now on raises EngineDeadError."""
        return False

    @property
    def is_ready(self) -> bool:
        """True if the core would work on a request now; False while it is being started again."""
        return not self.engine_dead

    @property
    def num_engines_up(self) -> int:
        """Number of engines that would work on a request now."""
        return int(self.is_ready)

    @property
    def counts(self) -> Mapping[str, int]:
        """Events so far, as `EngineLink.counts` has them; empty for a core in this process."""
        return {}

    @property
    def restarts(self) -> Mapping[str, int]:
        """Restarts of the core by cause of the death before; empty where another process supervises it."""
        return {}

    @abstractmethod
    def shutdown(self) -> None:
        """Releases the core and its workers. Idempotent, bounded in time, callable from any thread."""


class EngineCoreClient(_CoreClient):
    """One engine core. Only `EngineCoreRequest`s, ids and control calls go down; only outputs come up."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """Returns the outputs of the next step; blocks until there are some."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends a request to the core."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Aborts requests by internal id; unknown ids are ignored."""

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a control verb, a row of `wire/utility.py: UTILITIES`. Returns its result, of the row's type.

        Raises what the verb raised, or an error with its message.
        """


class AsyncEngineCoreClient(_CoreClient):
    """An engine core for a caller on an asyncio event loop. All coroutines belong to that one loop.

    A core that dies is started again behind this interface: readers of outputs wait a little longer, and only
    `is_ready` shows it.
    """

    @abstractmethod
    async def get_output_async(self) -> EngineCoreOutputs:
        """Returns the next outputs, when there are some. Raises EngineDeadError once the core is gone for good and the
        last outputs (an ERROR for each live request) have been taken."""

    @abstractmethod
    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Sends a request to the core. Raises EngineDeadError. A request that the core refuses is answered with an
        output of FinishReason.ERROR."""

    @abstractmethod
    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Aborts requests by internal id; unknown ids are ignored. Suspends only after the abort was sent, so
        that a caller that is cancelled meanwhile has aborted all the same."""

    @abstractmethod
    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Calls a control verb, as `EngineCoreClient.call_utility` does."""

    def expect_shutdown(self) -> None:  # a core without a process of its own cannot die alone
        """Announces that `shutdown` follows once the live requests have ended: no core is started for others.
        From any thread."""


def make_client(
    config: EngineConfig,
    *,
    log_stats: bool,
    multiprocess: bool | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> EngineCoreClient:
    """Returns a client of a new engine core. Raises what the core's start-up raises.

    `multiprocess` of None is what QUIRE_ENABLE_MULTIPROCESSING says. `meanwhile` is called once, while a core in a
    process of its own starts; what it raises ends that start.
    """
    client: EngineCoreClient = _make_client(False, config, log_stats, multiprocess, None, meanwhile)
    return client


def make_async_client(
    config: EngineConfig,
    *,
    log_stats: bool,
    multiprocess: bool | None = None,
    client_addresses: ClientAddresses | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> AsyncEngineCoreClient:
    """Returns a client for asyncio: of a new core, or with `client_addresses` of one that another client has started.

    Needs no running loop yet; blocks until the core is ready.
    """
    client: AsyncEngineCoreClient = _make_client(True, config, log_stats, multiprocess, client_addresses, meanwhile)
    return client


def _make_client(
    for_asyncio: bool,
    config: EngineConfig,
    log_stats: bool,
    multiprocess: bool | None,
    addresses: ClientAddresses | None,
    meanwhile: Callable[[], object] | None,
) -> Any:
    if multiprocess is None:
        multiprocess = addresses is not None or envs.ENABLE_MULTIPROCESSING.flag()
    if config.parallel_config.headless:
        raise ConfigError("--headless runs engines of a server on another machine: quire serve --headless")
    parallel, num_engines = config.parallel_config, config.parallel_config.num_engines
    if (num_engines > 1 or parallel.num_remote_engines or parallel.has_waves) and not multiprocess:
        raise ConfigError(
            f"--data-parallel-size {num_engines}: several engines need processes of their own; unset "
            f"{envs.ENABLE_MULTIPROCESSING.name}"
        )
    if (parallel.data_parallel_size > 1 or parallel.shares_experts) and for_asyncio:
        make = resolve(BALANCING_CLIENTS[addresses is not None or parallel.is_external])
    else:
        make = resolve(CLIENTS[for_asyncio, multiprocess])
    if multiprocess:
        return make(config, log_stats=log_stats, client_addresses=addresses, meanwhile=meanwhile)
    if addresses is not None:
        raise ConfigError("only an engine core in a process of its own can be shared")
    if meanwhile is not None:
        meanwhile()  # in one process the two would only take turns
    return make(config, log_stats=log_stats)

"""How the frontend speaks to an engine core, wherever that lives."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire import envs
from quire.config.engine import EngineConfig
from quire.errors import ConfigError, ValidationError
from quire.lora_request import LoRARequest
from quire.resolve import resolve
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest, PauseMode
from quire.wire.handshake import ClientAddresses
from quire.wire.snapshot import EngineSnapshot
from quire.wire.trace import TraceWindow

CLIENTS: dict[tuple[bool, bool], str] = {
    (False, True): "quire.frontend.client.sync_mp:SyncMPClient",
    (False, False): "quire.frontend.client.inproc:InprocClient",
    (True, True): "quire.frontend.client.async_mp:AsyncMPClient",
    (True, False): "quire.frontend.client.inproc:AsyncInprocClient",
}
"""(for asyncio, core in a process of its own) to the client (checklist S2-CL-006)."""


class _CoreHistory:
    """What clients of both kinds tell of the core's past."""

    @property
    def counts(self) -> Mapping[str, int]:
        """What has happened so far, as `EngineLink.counts` has it; empty for a core in this process."""
        return {}

    @property
    def restarts(self) -> Mapping[str, int]:
        """Restarts of the core by cause of the death before; empty where another process looks after it."""
        return {}


class EngineCoreClient(_CoreHistory, ABC):
    """One engine core. Only `EngineCoreRequest`s, ids and control calls go down; only outputs come up (S2-CL-026).

    A transport implements the five abstract methods. The control verbs below them are one `call_utility` each; what
    they do is said in `engine/utility.py: UTILITIES` and the methods it names.
    """

    ready_response: EngineCoreReadyResponse
    """What the core discovered at start-up."""

    @property
    def engine_dead(self) -> bool:
        """Whether the core is gone for good: every call from now on raises EngineDeadError."""
        return False

    @property
    def is_ready(self) -> bool:
        """Whether a request handed over now would be worked on now: False while a core is being started again."""
        return not self.engine_dead

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The outputs of the next step; blocks until there are some."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort by internal id; unknown ids are ignored."""

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a control verb of the core and wait for its result. Raises what it raised, or an error that says so."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release the core and its workers. Idempotent."""

    # -- pause and sleep ------------------------------------------------------------------------------------------

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling; returns when nothing is running any more."""
        self.call_utility("pause_scheduler", mode, clear_cache)

    def resume_scheduler(self) -> None:
        """Schedule everything again."""
        self.call_utility("resume_scheduler")

    def is_scheduler_paused(self) -> bool:
        """Whether new requests wait."""
        return bool(self.call_utility("is_scheduler_paused"))

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause and give memory back: 0 none, 1 the KV cache, 2 the weights, too."""
        self.call_utility("sleep", level, mode)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Take memory again, all of it or by tag; True once the engine serves."""
        return bool(self.call_utility("wake_up", tags))

    def is_sleeping(self) -> bool:
        """Between `sleep` and the `wake_up` that ends it."""
        return bool(self.call_utility("is_sleeping"))

    def release_kv_cache_memory(self, mode: PauseMode = "abort") -> None:
        """Pause and give back the KV cache only; `wake_up` takes it again."""
        self.call_utility("release_kv_cache_memory", mode)

    # -- caches ---------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes; False if blocks were in use and nothing was done."""
        return bool(self.call_utility("reset_prefix_cache", reset_running_requests, reset_connector))

    def reset_mm_cache(self) -> None:
        """Forget processed images and sounds."""
        self.call_utility("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        """Forget encoder outputs."""
        self.call_utility("reset_encoder_cache")

    # -- weights --------------------------------------------------------------------------------------------------

    def update_weights(self, path: str, version: str | None = None) -> str:
        """Replace the weights by those of another checkpoint directory; the new weight version. A relative path begins
        in the caller's working directory."""
        return str(self.call_utility("update_weights", os.path.abspath(path), version))

    def get_weight_version(self) -> str:
        """Of the weights that are loaded."""
        return str(self.call_utility("get_weight_version"))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        return bool(self.call_utility("add_lora", lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        return bool(self.call_utility("remove_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Ids of the adapters that are loaded."""
        return set(self.call_utility("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter from being evicted."""
        return bool(self.call_utility("pin_lora", lora_id))

    # -- workers --------------------------------------------------------------------------------------------------

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can do."""
        return tuple(self.call_utility("get_supported_tasks"))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker; one result per worker. Functions cross no process: ValidationError."""
        return list(self.call_utility("collective_rpc", method_name(method), timeout, args, kwargs or {}))

    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop the workers' profiler."""
        self.call_utility("profile", is_start, prefix, delay_iterations, max_iterations)

    def execute_dummy_batch(self) -> None:
        """A forward pass that serves nobody."""
        self.call_utility("execute_dummy_batch")

    def get_dropped_messages(self) -> dict[str, int]:
        """Messages the core could not take in, by reason: "corrupt", "unknown type", "replayed"."""
        return dict(self.call_utility("get_dropped_messages"))

    def get_trace(self, seconds: float) -> TraceWindow:
        """What the core did in the last `seconds`. Raises ValidationError if it keeps no traces."""
        return msgspec.convert(self.call_utility("get_trace", seconds), TraceWindow)

    def get_snapshot(self) -> EngineSnapshot:
        """The blocks and requests of this moment, for people who watch."""
        return msgspec.convert(self.call_utility("get_snapshot"), EngineSnapshot)


class AsyncEngineCoreClient(_CoreHistory, ABC):
    """The same engine core for a caller on an asyncio event loop. All coroutines belong to that one loop.

    A core that dies is started again behind this interface: whoever awaits outputs waits a little longer, and nothing
    else is to be seen of it but `is_ready`. Every control verb of `EngineCoreClient` is here as `<verb>_async`.
    """

    @property
    @abstractmethod
    def ready_response(self) -> EngineCoreReadyResponse:
        """What the core discovered at start-up."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether a request handed over now would be worked on now: False while a core is being started again."""

    @property
    @abstractmethod
    def engine_dead(self) -> bool:
        """Whether the core is gone for good: every call from now on raises EngineDeadError."""

    @abstractmethod
    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Hand a request over. Raises EngineDeadError; ValidationError only where the core is in this process (a core
        elsewhere answers such a request with an output of FinishReason.ERROR)."""

    @abstractmethod
    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort by internal id; unknown ids are ignored. Suspends only when the abort is on its way, so that one who is
        cancelled meanwhile has aborted all the same."""

    @abstractmethod
    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs, when there are some. Raises EngineDeadError once the core is gone for good and the last
        outputs (an ERROR for each live request) have been taken."""

    @abstractmethod
    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a control verb of the core. Raises what it raised, or an error that says so."""

    def expect_shutdown(self) -> None:  # a core without a process of its own cannot die alone
        """`shutdown` comes once the live requests have ended: no core is started for others. From any thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release the core and its workers. Idempotent, bounded in time, callable from any thread."""

    async def pause_scheduler_async(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """As `EngineCoreClient.pause_scheduler`."""
        await self.call_utility_async("pause_scheduler", mode, clear_cache)

    async def resume_scheduler_async(self) -> None:
        """As `EngineCoreClient.resume_scheduler`."""
        await self.call_utility_async("resume_scheduler")

    async def is_scheduler_paused_async(self) -> bool:
        """As `EngineCoreClient.is_scheduler_paused`."""
        return bool(await self.call_utility_async("is_scheduler_paused"))

    async def sleep_async(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """As `EngineCoreClient.sleep`."""
        await self.call_utility_async("sleep", level, mode)

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        """As `EngineCoreClient.wake_up`."""
        return bool(await self.call_utility_async("wake_up", tags))

    async def is_sleeping_async(self) -> bool:
        """As `EngineCoreClient.is_sleeping`."""
        return bool(await self.call_utility_async("is_sleeping"))

    async def release_kv_cache_memory_async(self, mode: PauseMode = "abort") -> None:
        """As `EngineCoreClient.release_kv_cache_memory`."""
        await self.call_utility_async("release_kv_cache_memory", mode)

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """As `EngineCoreClient.reset_prefix_cache`."""
        return bool(await self.call_utility_async("reset_prefix_cache", reset_running_requests, reset_connector))

    async def reset_mm_cache_async(self) -> None:
        """As `EngineCoreClient.reset_mm_cache`."""
        await self.call_utility_async("reset_mm_cache")

    async def reset_encoder_cache_async(self) -> None:
        """As `EngineCoreClient.reset_encoder_cache`."""
        await self.call_utility_async("reset_encoder_cache")

    async def update_weights_async(self, path: str, version: str | None = None) -> str:
        """As `EngineCoreClient.update_weights`."""
        return str(await self.call_utility_async("update_weights", os.path.abspath(path), version))

    async def get_weight_version_async(self) -> str:
        """As `EngineCoreClient.get_weight_version`."""
        return str(await self.call_utility_async("get_weight_version"))

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """As `EngineCoreClient.add_lora`."""
        return bool(await self.call_utility_async("add_lora", lora_request))

    async def remove_lora_async(self, lora_id: int) -> bool:
        """As `EngineCoreClient.remove_lora`."""
        return bool(await self.call_utility_async("remove_lora", lora_id))

    async def list_loras_async(self) -> set[int]:
        """As `EngineCoreClient.list_loras`."""
        return set(await self.call_utility_async("list_loras"))

    async def pin_lora_async(self, lora_id: int) -> bool:
        """As `EngineCoreClient.pin_lora`."""
        return bool(await self.call_utility_async("pin_lora", lora_id))

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """As `EngineCoreClient.get_supported_tasks`."""
        return tuple(await self.call_utility_async("get_supported_tasks"))

    async def collective_rpc_async(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """As `EngineCoreClient.collective_rpc`."""
        return list(await self.call_utility_async("collective_rpc", method_name(method), timeout, args, kwargs or {}))

    async def profile_async(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """As `EngineCoreClient.profile`."""
        await self.call_utility_async("profile", is_start, prefix, delay_iterations, max_iterations)

    async def execute_dummy_batch_async(self) -> None:
        """As `EngineCoreClient.execute_dummy_batch`."""
        await self.call_utility_async("execute_dummy_batch")

    async def get_dropped_messages_async(self) -> dict[str, int]:
        """As `EngineCoreClient.get_dropped_messages`."""
        return dict(await self.call_utility_async("get_dropped_messages"))

    async def get_trace_async(self, seconds: float) -> TraceWindow:
        """As `EngineCoreClient.get_trace`."""
        return msgspec.convert(await self.call_utility_async("get_trace", seconds), TraceWindow)

    async def get_snapshot_async(self) -> EngineSnapshot:
        """As `EngineCoreClient.get_snapshot`."""
        return msgspec.convert(await self.call_utility_async("get_snapshot"), EngineSnapshot)


def method_name(method: str | Callable[..., Any]) -> str:
    """The method a message can name. Raises ValidationError for a function: no code crosses a process here."""
    if isinstance(method, str):
        return method
    raise ValidationError(
        f"collective_rpc({getattr(method, '__name__', method)}): a function cannot be sent to a worker in another "
        "process; name a method of the worker class (--worker-cls takes your own), or use the in-process engine",
        param="method",
    )


def make_client(
    config: EngineConfig,
    *,
    log_stats: bool,
    multiprocess: bool | None = None,
    client_addresses: ClientAddresses | None = None,
    client_count: int = 1,
    meanwhile: Callable[[], object] | None = None,
) -> EngineCoreClient:
    """A client of a new engine core, or with `client_addresses` of one that another client has started.

    `multiprocess` of None is what QUIRE_ENABLE_MULTIPROCESSING says. `client_count` clients share the core. `meanwhile`
    is called once, while a core in a process of its own starts; what it raises ends that start. Raises what the core's
    start-up raises.
    """
    client: EngineCoreClient = _make_client(
        False, config, log_stats, multiprocess, client_addresses, client_count, meanwhile
    )
    return client


def make_async_client(
    config: EngineConfig,
    *,
    log_stats: bool,
    multiprocess: bool | None = None,
    client_addresses: ClientAddresses | None = None,
    client_count: int = 1,
    meanwhile: Callable[[], object] | None = None,
) -> AsyncEngineCoreClient:
    """The same for asyncio. Needs no running loop yet; blocks until the core is ready."""
    client: AsyncEngineCoreClient = _make_client(
        True, config, log_stats, multiprocess, client_addresses, client_count, meanwhile
    )
    return client


def _make_client(
    for_asyncio: bool,
    config: EngineConfig,
    log_stats: bool,
    multiprocess: bool | None,
    addresses: ClientAddresses | None,
    client_count: int,
    meanwhile: Callable[[], object] | None,
) -> Any:
    is_shared = addresses is not None or client_count > 1
    if multiprocess is None:
        multiprocess = is_shared or envs.ENABLE_MULTIPROCESSING.flag()
    make = resolve(CLIENTS[for_asyncio, multiprocess])
    if not multiprocess:
        if is_shared:
            raise ConfigError("only an engine core in a process of its own can be shared")
        if meanwhile is not None:
            meanwhile()  # in one process the two would only take turns
        return make(config, log_stats=log_stats)
    return make(config, log_stats=log_stats, client_addresses=addresses, client_count=client_count, meanwhile=meanwhile)

"""The interface between the engine core and the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.lora_request import LoRARequest
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.heartbeat import WorkerEnd
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad


class Executor(ABC):
    """Owns the workers of one engine. Knows nothing of requests: a step is a `SchedulerOutput`, executed in order.

    The constructor loads no weights; `determine_available_memory` loads them, `initialize_from_config` allocates the KV
    cache and warms up. Only then may steps be executed. Methods raise what the worker raised.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Registers a function to call, from any thread, when workers are lost. An executor that cannot lose workers
        ignores it."""

    @property
    def max_concurrent_batches(self) -> int:
        """Number of steps that may be in flight at once; more than 1 makes the core use `step_with_batch_queue`."""
        return 1

    @property
    def needs_sampled_tokens(self) -> bool:
        """True if some workers do not sample: steps must bring them the tokens that others have sampled."""
        return False

    @abstractmethod
    def get_kv_cache_specs(self) -> list[dict[str, AnyKVCacheSpec]]:
        """Returns, per worker, the KV that each attention layer keeps, by layer name."""

    @abstractmethod
    def determine_available_memory(self) -> list[int]:
        """Loads the weights. Returns the bytes that are left for the KV cache, per worker."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocates the KV cache and warms up. One config per worker."""

    @abstractmethod
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """Runs a step's forward pass.

        Returns None if logits are held: call `sample_tokens`. Returns an output if nothing is to be sampled. With
        `non_block` returns a Future of the same, and raises errors through the Future only.
        """

    @abstractmethod
    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Samples from the logits of the last executed step. `non_block` as in `execute_model`."""

    @abstractmethod
    def execute_dummy_batch(self) -> None:
        """Runs a forward pass without requests, which keeps the ranks of a data-parallel wave together."""

    @abstractmethod
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Returns the draft tokens that the last step proposed; None without speculation."""

    @abstractmethod
    def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns the tasks of the model, e.g. ("generate",)."""

    def get_numerics_id(self) -> str:
        """Returns what decides the bits of the logits (`EngineCoreReadyResponse.numerics_id`); empty: unknown."""
        return ""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a worker method by name (or a function with the worker as first argument) on every worker."""

    def measure_adapter(self, lora_request: LoRARequest) -> Future[int]:
        """Returns the memory that an adapter will take, in bytes, from its configuration and header.

        Neither blocks nor raises: the Future has the error, AdapterError. Callable from any thread, as `load_adapter`.
        """
        raise NotImplementedError

    def load_adapter(self, load: AdapterLoad) -> Future[AdapterInfo]:
        """Reads a revision of an adapter on all workers, beside the steps. Its requests may be sent once all have it.

        Neither blocks nor raises: the Future has the error, AdapterError or another. It is completed on any thread.
        """
        raise NotImplementedError

    def drop_adapter(self, key: AdapterKey) -> None:
        """Drops a loaded revision, which no request uses any more, before the next step."""
        raise NotImplementedError

    def register_transfer_callback(self, callback: Callable[[KVConnectorOutput], None]) -> None:
        """Registers the function that gets the reports of transfers that have ended on all workers, on any thread.

        Raises ConfigError if the workers cannot transfer blocks.
        """
        raise ConfigError(f"{type(self).__name__} cannot transfer blocks of the KV cache; leave the connector out")

    def send_transfers(self, orders: KVConnectorMetadata) -> None:
        """Gives orders to the workers at once, where no step may come. No step is in flight."""
        raise NotImplementedError

    def take_barrier_wait(self) -> float:
        """Returns the seconds that workers have waited for one another since the last call, all together."""
        return 0.0

    @property
    def worker_end(self) -> WorkerEnd:
        """End of the first worker that has ended."""
        return WorkerEnd.NONE

    @abstractmethod
    def check_health(self) -> None:
        """Raises an error if a worker cannot serve."""

    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Starts or stops the workers' profiler. None for the counts means as configured."""
        self.collective_rpc("profile", args=(is_start, prefix, delay_iterations, max_iterations))

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers. May be called twice."""

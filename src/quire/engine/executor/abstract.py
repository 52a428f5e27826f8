"""What the engine core asks of whoever runs the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from quire.config.engine import EngineConfig
from quire.errors import ClientError
from quire.lora_request import LoRARequest
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig


class Executor(ABC):
    """Owns the workers of one engine. Knows nothing of requests: a step is a `SchedulerOutput`, executed in order.

    Made with the weights not yet loaded; `determine_available_memory` loads them, `initialize_from_config` allocates
    the KV cache and warms up, then steps may come. Methods raise what the worker raised.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, when workers are lost. One whose workers cannot be lost may ignore it."""

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once; more than 1 makes the core use `step_with_batch_queue`."""
        return 1

    @abstractmethod
    def get_kv_cache_specs(self) -> list[dict[str, AnyKVCacheSpec]]:
        """Per worker: the KV each attention layer keeps, by layer name."""

    @abstractmethod
    def determine_available_memory(self) -> list[int]:
        """Load the weights, then the bytes left for the KV cache, per worker."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the KV cache and warm up. One config per worker."""

    @abstractmethod
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """Run a step's forward pass. None: logits are held, call `sample_tokens`. An output: nothing is to be sampled.

        With `non_block` a Future of the same, and errors come out of the Future only.
        """

    @abstractmethod
    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Sample from the logits of the last step executed. `non_block` as in `execute_model`."""

    @abstractmethod
    def execute_dummy_batch(self) -> None:
        """A forward pass that serves nobody: keeps the ranks of a data-parallel wave together."""

    @abstractmethod
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Draft tokens proposed by the last step; None without speculation."""

    @abstractmethod
    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can do: ("generate",)."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method by name (or a function with the worker as first argument) on every worker."""

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. Raises ClientError: no executor here can yet."""
        raise _no_loras(f"load adapter {lora_request.lora_name!r}")

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter. Raises ClientError, as `add_lora` does."""
        raise _no_loras(f"unload adapter {lora_id}")

    def list_loras(self) -> set[int]:
        """Ids of the adapters that are loaded: none."""
        return set()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter from being evicted. Raises ClientError, as `add_lora` does."""
        raise _no_loras(f"pin adapter {lora_id}")

    @abstractmethod
    def check_health(self) -> None:
        """Raise if a worker cannot serve."""

    @abstractmethod
    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop the workers' profiler. None for the counts means as configured."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers. May be called twice."""


def _no_loras(what: str) -> ClientError:
    return ClientError(
        f"cannot {what}: this version serves no LoRA adapters; merge it into the checkpoint, then load that"
    )

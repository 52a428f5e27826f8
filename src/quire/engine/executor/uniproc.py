"""An executor whose worker runs in the engine's own process, on its thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from quire.config.engine import EngineConfig
from quire.engine.executor.abstract import Executor
from quire.lora_request import LoRARequest
from quire.resolve import resolve
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad

T = TypeVar("T")


class UniProcExecutor(Executor):
    """Owns one worker and calls it directly. A non-blocking call has finished when it returns.

    A KeyboardInterrupt is no error of the worker: it is never put into a Future but raised where it happens.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.worker: Any = resolve(config.parallel_config.worker_cls)(config, rank=0)
        self.worker.init_device()

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Does nothing: this worker cannot be lost without its engine."""

    def get_kv_cache_specs(self) -> list[dict[str, AnyKVCacheSpec]]:
        return [self.worker.get_kv_cache_spec()]

    def determine_available_memory(self) -> list[int]:
        self.worker.load_model()
        return [self.worker.determine_available_memory()]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        (kv_cache_config,) = kv_cache_configs
        self.worker.initialize_from_config(kv_cache_config)
        self.worker.compile_or_warm_up_model()

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        if non_block:
            return _run(lambda: self.worker.execute_model(scheduler_output))
        output: ModelRunnerOutput | None = self.worker.execute_model(scheduler_output)
        return output

    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        if non_block:
            return _run(lambda: self.worker.sample_tokens(grammar_output))
        output: ModelRunnerOutput = self.worker.sample_tokens(grammar_output)
        return output

    def execute_dummy_batch(self) -> None:
        self.worker.execute_dummy_batch()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts: DraftTokenIds | None = self.worker.take_draft_token_ids()
        return drafts

    def get_supported_tasks(self) -> tuple[str, ...]:
        return tuple(self.worker.get_supported_tasks())

    def get_numerics_id(self) -> str:
        return str(self.worker.get_numerics_id())

    def measure_adapter(self, lora_request: LoRARequest) -> Future[int]:
        future: Future[int] = self.worker.measure_adapter(lora_request)
        return future

    def load_adapter(self, load: AdapterLoad) -> Future[AdapterInfo]:
        future: Future[AdapterInfo] = self.worker.load_adapter(load)
        return future

    def drop_adapter(self, key: AdapterKey) -> None:
        self.worker.drop_adapter(key)

    def register_transfer_callback(self, callback: Callable[[KVConnectorOutput], None]) -> None:
        self.worker.register_transfer_callback(callback)

    def send_transfers(self, orders: KVConnectorMetadata) -> None:
        self.worker.start_transfers(orders)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Ignores `timeout`: the call runs on this thread."""
        kwargs = kwargs or {}
        if isinstance(method, str):
            return [getattr(self.worker, method)(*args, **kwargs)]
        return [method(self.worker, *args, **kwargs)]

    def check_health(self) -> None:
        self.worker.check_health()

    def shutdown(self) -> None:
        self.worker.shutdown()


def _run(call: Callable[[], T]) -> Future[T]:
    """Returns a Future that is done, with the call's result or with the Exception it raised."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as e:
        future.set_exception(e)
    return future

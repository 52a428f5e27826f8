"""An engine core in this process: calls instead of messages, and a step whenever output is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.config.engine import EngineConfig
from quire.frontend.client.base import EngineCoreClient
from quire.resolve import resolve
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequest

ENGINE_CORE = "quire.engine.core:EngineCore"
RUN_UTILITY = "quire.engine.utility:run_utility"


class InprocClient(EngineCoreClient):
    """Builds the core and drives it. Its composition is by dotted name: the frontend does not import the engine."""

    def __init__(self, config: EngineConfig, *, log_stats: bool) -> None:
        executor_class = resolve(config.parallel_config.executor_class)
        self.engine_core = resolve(ENGINE_CORE)(config, executor_class, log_stats)
        self.ready_response = self.engine_core.ready_response
        self._run_utility = resolve(RUN_UTILITY)

    def get_output(self) -> EngineCoreOutputs:
        outputs, model_executed = self.engine_core.step_fn()
        self.engine_core.post_step(model_executed)
        return (outputs or {}).get(0) or EngineCoreOutputs()

    def has_work(self) -> bool:
        """Whether `get_output` would run a step, or has outputs to give."""
        return bool(self.engine_core.has_work())

    def add_request(self, request: EngineCoreRequest) -> None:
        core_request, wave = self.engine_core.preprocess_add_request(request)
        self.engine_core.add_request(core_request, wave)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.engine_core.abort_requests(request_ids)

    def call_utility(self, method: str, *args: Any) -> Any:
        return self._run_utility(self.engine_core, method, args)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Functions are welcome: they cross no process. The worker is their first argument."""
        return list(self.engine_core.executor.collective_rpc(method, timeout, args, kwargs))

    def shutdown(self) -> None:
        self.engine_core.shutdown()

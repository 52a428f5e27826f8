"""An engine core in this process: calls instead of messages, and a step whenever output is asked for."""

from __future__ import annotations

from typing import Any

from quire.config.engine import EngineConfig
from quire.frontend.client.base import EngineCoreClient
from quire.resolve import resolve
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequest

ENGINE_CORE = "quire.engine.core:EngineCore"


class InprocClient(EngineCoreClient):
    """Builds the core and drives it. Its composition is by dotted name: the frontend does not import the engine."""

    def __init__(self, config: EngineConfig, *, log_stats: bool) -> None:
        executor_class = resolve(config.parallel_config.executor_class)
        self.engine_core = resolve(ENGINE_CORE)(config, executor_class, log_stats)
        self.ready_response = self.engine_core.ready_response

    def get_output(self) -> EngineCoreOutputs:
        outputs, model_executed = self.engine_core.step_fn()
        self.engine_core.post_step(model_executed)
        return (outputs or {}).get(0) or EngineCoreOutputs()

    def add_request(self, request: EngineCoreRequest) -> None:
        core_request, wave = self.engine_core.preprocess_add_request(request)
        self.engine_core.add_request(core_request, wave)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.engine_core.abort_requests(request_ids)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return bool(self.engine_core.reset_prefix_cache(reset_running_requests))

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        return list(self.engine_core.collective_rpc(method, timeout, args, kwargs))

    def profile(self, is_start: bool, prefix: str | None = None) -> None:
        self.engine_core.profile(is_start, prefix)

    def shutdown(self) -> None:
        self.engine_core.shutdown()

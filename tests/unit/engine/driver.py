"""Drives an engine core by hand, step by step."""

from __future__ import annotations

from typing import Any

from quire.engine.core import EngineCore
from quire.wire.engine_core import EngineCoreOutput

from .harness import ScriptedExecutor, make_config, make_core_request


class Core:
    """An EngineCore, its executor, and everything its clients were sent."""

    def __init__(
        self, executor_class: type[ScriptedExecutor] = ScriptedExecutor, *, log_stats: bool = False, **config: Any
    ) -> None:
        self.core = EngineCore(make_config(**config), executor_class, log_stats)
        assert isinstance(self.core.executor, ScriptedExecutor)
        self.executor = self.core.executor
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def add(self, request_id: str, prompt: Any = 4, **fields: Any) -> None:
        self.core.add_request(*self.core.preprocess_add_request(make_core_request(request_id, prompt, **fields)))

    def step(self) -> bool:
        """One call; returns whether a model ran."""
        batches, executed = self.core.step_fn()
        self.core.post_step(executed)
        for batch in (batches or {}).values():
            for output in batch.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
        return executed

    def run(self) -> None:
        for _ in range(200):
            if not self.core.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("no end in sight")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.new_token_ids]

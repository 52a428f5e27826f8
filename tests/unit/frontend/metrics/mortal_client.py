"""An engine core in this process that can die: behind the real link, which sends its requests to the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.lifecycle import run_utility
from quire.frontend.client.base import EngineCoreClient
from quire.frontend.client.link import EngineLink
from quire.frontend.supervision.quarantine import CoreDeath
from quire.resolve import resolve
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType


class MortalClient(EngineCoreClient):
    """One core after the other, each on `clock`. `die` ends one, `start` makes the next."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._link = EngineLink()
        self._restarts: Counter[str] = Counter()
        self.core: EngineCore | None = None
        self.start()

    @property
    def counts(self) -> Mapping[str, int]:
        return self._link.counts

    @property
    def restarts(self) -> Mapping[str, int]:
        return self._restarts

    @property
    def is_ready(self) -> bool:
        return self.core is not None

    def start(self) -> None:
        """A core takes over what lives."""
        executor_class = resolve(self._config.parallel_config.executor_class)
        self.core = EngineCore(self._config, executor_class, log_stats=True)
        self.core.scheduler.clock = self._clock
        self.ready_response = replace(self.core.ready_response, incarnation=self._restarts.total())
        self._link.on_ready(self.ready_response)
        self._send()

    def die(self) -> None:
        """The core is gone, and whatever it has not been asked for."""
        assert self.core is not None
        self.core.shutdown()
        self.core = None
        self._restarts["killed"] += 1
        self._link.on_death(CoreDeath("killed", "was killed by SIGKILL"))

    def _send(self) -> None:
        messages, self._link.messages = self._link.messages, []
        for message in messages:
            assert self.core is not None
            if message.type is EngineCoreRequestType.ADD:
                self.core.add_request(*self.core.preprocess_add_request(message.payload))
            else:
                assert message.type is EngineCoreRequestType.ABORT
                self.core.abort_requests(message.payload)

    def run_step(self) -> EngineCoreOutputs:
        """Runs a step of the core. Returns the outputs that it would send."""
        assert self.core is not None
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        return (outputs or {}).get(0) or EngineCoreOutputs()

    def get_output(self) -> EngineCoreOutputs:
        if self.core is None:
            return EngineCoreOutputs()
        outputs = self.run_step()
        outputs.incarnation = self.ready_response.incarnation
        self._link.on_outputs(outputs)
        self._send()
        deliveries, self._link.deliveries = self._link.deliveries, []
        return deliveries[0] if deliveries else EngineCoreOutputs()

    def add_request(self, request: EngineCoreRequest) -> None:
        self._link.add_request(request)
        self._send()

    def abort_requests(self, request_ids: list[str]) -> None:
        self._link.abort_requests(request_ids)
        self._send()

    def call_utility(self, method: str, *args: Any) -> Any:
        assert self.core is not None
        return run_utility(self.core, method, args)

    def shutdown(self) -> None:
        if self.core is not None:
            self.core.shutdown()

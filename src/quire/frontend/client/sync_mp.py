"""An engine core in its own process, for a caller that waits for outputs: `LLM` and `LLMEngine`."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from quire.config.engine import EngineConfig
from quire.errors import EngineDeadError
from quire.frontend.client.base import EngineCoreClient
from quire.frontend.client.mp import MPClient
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from quire.wire.handshake import ClientAddresses


class QueueSink:
    """Outputs for one thread that waits for them."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[EngineCoreOutputs | EngineDeadError] = queue.SimpleQueue()

    def put_outputs(self, outputs: EngineCoreOutputs) -> None:
        """The outputs of a step."""
        self.queue.put(outputs)

    def put_end(self, error: EngineDeadError) -> None:
        """There will be no more."""
        self.queue.put(error)


class SyncMPClient(EngineCoreClient):
    """Starts a core process, or attaches to one with `client_addresses`; ends it with `shutdown`, when it is garbage,
    or when the interpreter ends. Raises what the core's start-up raises.

    Ctrl-C never reaches the core: waiting for outputs can be interrupted at any time and gone on with.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_stats: bool,
        client_addresses: ClientAddresses | None = None,
        client_count: int = 1,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        sink = QueueSink()
        self.mp = MPClient(
            config,
            sink,
            log_stats=log_stats,
            client_addresses=client_addresses,
            client_count=client_count,
            meanwhile=meanwhile,
        )
        self._outputs = sink.queue
        self._finalizer = weakref.finalize(self, self.mp.resources.close)

    @property
    def ready_response(self) -> EngineCoreReadyResponse:  # type: ignore[override]  # read-only here
        return self.mp.ready_response

    @property
    def is_ready(self) -> bool:
        """Whether a core is there: False while one is being started again."""
        return self.mp.is_ready

    @property
    def engine_dead(self) -> bool:
        """Whether the core is gone for good."""
        return self.mp.engine_dead

    @property
    def counts(self) -> Mapping[str, int]:
        return self.mp.counts

    @property
    def restarts(self) -> Mapping[str, int]:
        return self.mp.restarts

    @property
    def core_pid(self) -> int | None:
        """Of the core process that lives now; None between two, and where another process looks after it."""
        return self.mp.core_pid

    def get_output(self) -> EngineCoreOutputs:
        """Blocks. Raises EngineDeadError once the core is gone for good and its last outputs have been taken."""
        outputs = self._outputs.get()
        if isinstance(outputs, EngineDeadError):
            self._outputs.put(outputs)
            raise outputs
        return outputs

    def add_request(self, request: EngineCoreRequest) -> None:
        self.mp.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.mp.abort_requests(request_ids)

    def call_utility(self, method: str, *args: Any) -> Any:
        return self.mp.call_utility(method, args).result()

    def shutdown(self) -> None:
        self._finalizer()

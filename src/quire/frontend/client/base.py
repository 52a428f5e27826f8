"""How the frontend speaks to an engine core, wherever that lives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from quire.config.engine import EngineConfig
from quire.resolve import resolve
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest

SYNC_CLIENTS: dict[str, str] = {"inproc": "quire.frontend.client.inproc:InprocClient"}
"""Transports by name."""


class EngineCoreClient(ABC):
    """One engine core. Only `EngineCoreRequest`s, ids and control calls go down; only outputs come up (S2-CL-026)."""

    ready_response: EngineCoreReadyResponse
    """What the core discovered at start-up."""

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
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False if blocks were in use and nothing was done."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker; one result per worker."""

    @abstractmethod
    def profile(self, is_start: bool, prefix: str | None = None) -> None:
        """Start or stop the workers' profiler."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release the core and its workers. Idempotent."""


def make_client(config: EngineConfig, *, log_stats: bool, transport: str = "inproc") -> EngineCoreClient:
    """A client of a new engine core. Raises what the core's start-up raises."""
    client: EngineCoreClient = resolve(SYNC_CLIENTS[transport])(config, log_stats=log_stats)
    return client

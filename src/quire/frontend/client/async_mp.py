"""An engine core in its own process, for a caller on an asyncio event loop: `AsyncLLM`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from quire.config.engine import EngineConfig
from quire.frontend.client.base import AsyncEngineCoreClient
from quire.frontend.client.control_calls import REMEMBERED_VERBS
from quire.frontend.client.link import EngineLink
from quire.frontend.client.mailbox import LoopMailbox
from quire.frontend.client.mp import MPClient
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from quire.wire.handshake import ClientAddresses
from quire.wire.sockets import SocketDirectory

ControlRelay = Callable[[str, tuple[Any, ...]], Awaitable[Any]]
"""Calls a control verb elsewhere: its result."""


class AsyncMPClient(AsyncEngineCoreClient):
    """As `SyncMPClient`, without waiting: coroutines of one event loop. Made on any thread, with or without a loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_stats: bool,
        client_addresses: ClientAddresses | None = None,
        client_count: int = 1,
        directory: SocketDirectory | None = None,
        meanwhile: Callable[[], object] | None = None,
        link: EngineLink | None = None,
    ) -> None:
        """As `MPClient`."""
        self._sink = LoopMailbox()
        self.mp = MPClient(
            config,
            self._sink,
            log_stats=log_stats,
            client_addresses=client_addresses,
            client_count=client_count,
            directory=directory,
            meanwhile=meanwhile,
            link=link,
        )
        self.control_relay: ControlRelay | None = None
        """Who makes the calls that change the core, so that whoever starts it again knows of them; None: we do."""
        self._finalizer = weakref.finalize(self, self.mp.resources.close)

    @property
    def ready_response(self) -> EngineCoreReadyResponse:
        return self.mp.ready_response

    @property
    def is_ready(self) -> bool:
        return self.mp.is_ready

    @property
    def engine_dead(self) -> bool:
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

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._sink.take()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.mp.add_request(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.mp.abort_requests(request_ids)

    def note_gone(self, reason: str) -> None:
        """As `MPClient.note_gone`."""
        self.mp.note_gone(reason)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if self.control_relay is not None and method in REMEMBERED_VERBS:
            return await self.control_relay(method, args)
        return await asyncio.wrap_future(self.mp.call_utility(method, args))

    def expect_shutdown(self) -> None:
        self.mp.expect_shutdown()

    def shutdown(self) -> None:
        self._finalizer()

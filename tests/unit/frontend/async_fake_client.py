"""The fake core for asyncio, run by hand: it computes a step when a test says so, and not before."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.errors import EngineDeadError
from quire.frontend.client.base import AsyncEngineCoreClient
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest

from .fake_client import FakeClient


class AsyncFakeClient(AsyncEngineCoreClient):
    """`core` is the fake engine core; `calls` what was asked of it, in order."""

    def __init__(self, core: FakeClient | None = None) -> None:
        self.core = core or FakeClient()
        self.calls: list[tuple[str, Any]] = []
        self.dead: EngineDeadError | None = None
        self.ready = True
        self._outputs: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()

    async def step(self, num_steps: int = 1) -> None:
        """Compute, send the outputs, and let everyone who waits for them go on."""
        for _ in range(num_steps):
            self.send(self.core.get_output())
            await settle()

    def send(self, outputs: EngineCoreOutputs) -> None:
        self._outputs.put_nowait(outputs)

    def die(self, why: str) -> None:
        self.dead = EngineDeadError(why)
        self._outputs.put_nowait(None)

    @property
    def ready_response(self) -> EngineCoreReadyResponse:
        return self.core.ready_response

    @property
    def is_ready(self) -> bool:
        return self.ready

    @property
    def engine_dead(self) -> bool:
        return self.dead is not None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if self.dead is not None:
            raise self.dead
        self.calls.append(("add", request.request_id))
        self.core.add_request(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.calls.append(("abort", list(request_ids)))
        self.core.abort_requests(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self._outputs.get()
        if outputs is None:
            assert self.dead is not None
            raise self.dead
        return outputs

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.calls.append((method, args))
        return self.core.call_utility(method, *args)

    def shutdown(self) -> None:
        self.core.shutdown()


async def settle(turns: int = 20) -> None:
    """Let every coroutine that can go on do so."""
    for _ in range(turns):
        await asyncio.sleep(0)

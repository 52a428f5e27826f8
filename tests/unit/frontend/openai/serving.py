"""A server inside the test: the whole application over an engine whose model is fake, spoken to in process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx2

from quire.config.engine_args import EngineArgs
from quire.config.server import ServerConfig
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.inproc import AsyncInprocClient
from quire.frontend.http.state import ServerState
from quire.frontend.openai.app import add_parts, build_app
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequest
from quire.wire.serial import MsgpackDecoder, MsgpackEncoder

MODEL = "demo"
MAX_MODEL_LEN = 512


class WiredClient(AsyncInprocClient):
    """A core in this process, with which nothing is exchanged that could not cross to another: all of it is encoded."""

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        frames = [bytes(frame) for frame in MsgpackEncoder().encode(request)]
        await super().add_request_async(MsgpackDecoder(EngineCoreRequest).decode(frames))

    async def get_output_async(self) -> EngineCoreOutputs:
        frames = [bytes(frame) for frame in MsgpackEncoder().encode(await super().get_output_async())]
        return MsgpackDecoder(EngineCoreOutputs).decode(frames)


class Server:
    """One server and a client of it."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, keys: Sequence[bytes]) -> None:
        self.engine = engine
        self.state = add_parts(ServerState(engine, config, key_digests=keys))
        self.app = build_app(self.state)
        self.client = client_of(self.app)

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        return await self.client.post(path, json=body, **options)

    async def get(self, path: str, **options: Any) -> httpx2.Response:
        return await self.client.get(path, **options)

    async def answer(self, path: str, **body: Any) -> dict[str, Any]:
        """The body of an answer that must be a good one."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    async def refusal(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error object of an answer with `status`."""
        response = await self.post(path, body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["code"] == status
        return error

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """The data of every event of a stream; its end must be there."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_of(response.text)


def events_of(text: str) -> list[Any]:
    """The events of a stream, without the one that ends it."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def client_of(app: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost")


Test = Callable[[Server], Awaitable[None]]


def check(
    test: Test,
    *,
    model: str = MODEL,
    executor: str | None = "Quick",
    keys: Sequence[bytes] = (),
    engine_flags: dict[str, Any] | None = None,
    timeout_s: float = 180,
    in_process: bool = True,
    **flags: Any,
) -> None:
    """Run `test` against a fresh server with these flags; afterwards nothing is left of any request.

    An `executor` of None runs the real `model`. The core runs on a thread, but what it is sent and sends is encoded; or
    it is a process, which can die. However long a stream is silent on a slow machine, it holds no comments, unless
    `flags` ask for them.
    """
    fake = {} if executor is None else {"distributed_executor_backend": f"tests.process.executors:{executor}"}

    async def run() -> None:
        args = EngineArgs(
            model,
            max_model_len=MAX_MODEL_LEN,
            num_gpu_blocks_override=256,
            **{**fake, **(engine_flags or {})},
        )
        config = args.create_engine_config("serving")
        log_stats = not config.observability_config.disable_log_stats
        client = WiredClient(config, log_stats=log_stats) if in_process else None
        async with AsyncLLM(config, client=client) as engine:
            server = Server(engine, ServerConfig(**{"sse_keep_alive_interval": 0.0, **flags}), keys)
            async with server.client:
                await test(server)
            assert not engine.pipeline.output_processor.request_states
            assert (engine.admission.num_reqs, engine.admission.num_tokens) == (0, 0)
            assert server.state.lifecycle.num_in_flight == 0

    asyncio.run(asyncio.wait_for(run(), timeout_s))

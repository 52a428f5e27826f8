"""The inputs of a streaming-input session, sent on as its user's generator gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from quire.errors import EngineDeadError, ValidationError
from quire.frontend.client.base import AsyncEngineCoreClient
from quire.frontend.new_request import Params
from quire.frontend.output_handler import RequestOutputCollector
from quire.frontend.request_pipeline import RequestPipeline
from quire.frontend.session import StreamingInput

Inputs = AsyncGenerator[StreamingInput, None]


class SessionFeed:
    """One task per session, from its second input to its last one, or to its end. What goes wrong with an input, in the
    user's generator or here, ends the session, and its reader is told."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        engine_core: AsyncEngineCoreClient,
        inputs: Inputs,
        params: Params,
        tokenization_kwargs: Mapping[str, Any] | None,
        tokenize: Callable[[Any, Mapping[str, Any]], Awaitable[Any]],
    ) -> None:
        self._pipeline = pipeline
        self._engine_core = engine_core
        self._inputs = inputs
        self._params = params
        self._tokenization_kwargs = {"add_special_tokens": False, **(tokenization_kwargs or {})}
        self._tokenize = tokenize
        self._task: asyncio.Task[None] | None = None

    async def first(self) -> StreamingInput:
        """The input the session begins with. Raises ValidationError if there is none."""
        try:
            return _checked(await anext(self._inputs))
        except StopAsyncIteration:
            raise ValidationError("a streaming-input session needs an input to begin with", param="prompt") from None

    def start(self, collector: RequestOutputCollector) -> None:
        """The session is added: send the rest of its inputs."""
        collector.on_end = self._stop
        self._task = asyncio.get_running_loop().create_task(self._run(collector.request_id), name="quire-session-feed")

    def _stop(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    async def close(self) -> None:
        """Let go of the user's generator."""
        await self._inputs.aclose()

    async def _run(self, session_id: str) -> None:
        try:
            async for item in self._inputs:
                checked = _checked(item)
                await self._send(session_id, checked.prompt, checked.sampling_params or self._params, resumable=True)
            await self._send(session_id, [], self._params, resumable=False)
        except Exception as e:
            failed = self._pipeline.fail([session_id], e)
            if failed.reqs_to_abort and not isinstance(e, EngineDeadError):
                await self._engine_core.abort_requests_async(failed.reqs_to_abort)
        finally:
            await self.close()

    async def _send(self, session_id: str, prompt: Any, params: Params, *, resumable: bool) -> None:
        prompt = await self._tokenize(prompt, self._tokenization_kwargs)
        session = self._pipeline.output_processor.request_states[session_id]  # when it ends, this task is cancelled
        new = self._pipeline.prepare_input(
            session, prompt, params, resumable=resumable, tokenization_kwargs=self._tokenization_kwargs
        )
        for request in self._pipeline.add_input(session_id, new).reqs_to_add:
            await self._engine_core.add_request_async(request)


def _checked(item: Any) -> StreamingInput:
    if not isinstance(item, StreamingInput):
        raise ValidationError(
            f"the inputs of a session are StreamingInput objects, got {type(item).__name__}", param="prompt"
        )
    return item

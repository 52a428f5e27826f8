"""Requests of a load as HTTP: their bodies, and what the chunks of an answer say of its times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import msgspec

from quire.cli.bench.load import LoadRequest
from quire.cli.generation import RequestTiming
from quire.cli.remote.client import HttpClient
from quire.cli.remote.events import Choice, Chunk
from quire.cli.remote.failures import RemoteError


class Endpoint(Enum):
    """Where requests go."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class Sender:
    """Sends requests to one model of a server. `fields` are added to every body, and may replace its own."""

    def __init__(
        self,
        client: HttpClient,
        endpoint: Endpoint,
        model: str,
        *,
        ignore_eos: bool = True,
        fields: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._model = model
        self._ignore_eos = ignore_eos
        self._fields = dict(fields or {})
        self._clock = clock

    async def send(self, request: LoadRequest, timing: RequestTiming) -> None:
        """One streamed request. Raises RemoteError, RefusedError."""
        num_chunks = 0

        def on_chunk(chunk: Chunk) -> None:
            nonlocal num_chunks
            if chunk.usage is not None:
                timing.num_prompt_tokens = chunk.usage.prompt_tokens or 0
                timing.num_cached_tokens = chunk.usage.cached_tokens
                timing.num_output_tokens = chunk.usage.completion_tokens or timing.num_output_tokens
            if chunk.choices and _has_output(chunk.choices[0], timing):
                timing.stamp(self._clock())
                num_chunks += 1

        await self._client.stream(self._endpoint.value, msgspec.json.encode(self.body(request)), on_chunk)
        timing.num_output_tokens = timing.num_output_tokens or num_chunks  # a server that does not count
        if timing.num_output_tokens == 0:
            raise RemoteError("the answer has no tokens", "empty answer")
        if self._ignore_eos and timing.num_output_tokens < request.output_len:
            raise RemoteError(
                f"{timing.num_output_tokens} tokens arrived, not {request.output_len}; --no-ignore-eos where a server "
                "does not know ignore_eos",
                "short answer",
            )

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """What is posted."""
        prompt = request.prompt
        if self._endpoint is Endpoint.CHAT:
            is_conversation = isinstance(prompt, list)
            what: dict[str, Any] = {"messages": prompt if is_conversation else [{"role": "user", "content": prompt}]}
        else:
            what = {"prompt": prompt}
        # A server says nothing of a token without text: what comes after the end of a text must show.
        full_length = {"min_tokens": request.output_len, "ignore_eos": True, "skip_special_tokens": False}
        return {
            "model": self._model,
            **what,
            "max_tokens": request.output_len,
            **(full_length if self._ignore_eos else {}),
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }


def _has_output(choice: Choice, timing: RequestTiming) -> bool:
    """Whether a chunk brought something to read. The opening of a conversation does not, nor do tokens whose text a
    server still holds back, chunk or no chunk; an end does where nothing came yet."""
    if choice.finish_reason is not None and timing.first_token_s is None:
        return True
    if choice.delta is not None:
        return choice.delta.has_output
    return bool(choice.text or choice.token_ids)

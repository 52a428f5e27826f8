"""Server-sent events: from the bytes of a stream to its JSON objects, and what those hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quire.cli.remote.address import ServerAddress
from quire.cli.remote.failures import RemoteError, event_error

MAX_LINE = 16 << 20
"""Bytes of one event, at most."""


class TopLogprobs(msgspec.Struct):
    """The log-probabilities of /v1/completions."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class Delta(msgspec.Struct):
    """What a chunk of a conversation adds. Text is in one of the three."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_output(self) -> bool:
        """Whether it has anything that the model wrote."""
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class Choice(msgspec.Struct):
    """One output in a chunk: `text` of a completion, `delta` of a conversation."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Any = None


class TokenDetails(msgspec.Struct):
    """Of a prompt: how much of it was in the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The counts of a whole request."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: TokenDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """0 where the server does not tell."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0


class Chunk(msgspec.Struct):
    """One event of /v1/completions or /v1/chat/completions. Fields that are not here are skipped."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None


_DECODER = msgspec.json.Decoder(Chunk)


class EventReader:
    """Hands each chunk of a stream to `on_chunk`. The pieces it is fed may end anywhere; comments are skipped."""

    def __init__(self, on_chunk: Callable[[Chunk], None], address: ServerAddress) -> None:
        self._on_chunk = on_chunk
        self._address = address
        self._rest = b""
        self.is_complete = False
        """Whether [DONE] has come."""

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises RemoteError for an error event, and for what is no event."""
        *lines, rest = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = rest
        if len(rest) > MAX_LINE:
            raise RemoteError(f"{self._address} sent an event of more than {MAX_LINE >> 20} MiB", "event too long")
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:].strip())

    def _read(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self.is_complete = True
            return
        try:
            chunk = _DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise RemoteError(f"{self._address} sent an event that is none: {e}", "not an event") from None
        if chunk.error:
            raise event_error(chunk.error, self._address)
        self._on_chunk(chunk)

"""`quire chat` on a server: conversations as streams of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.cli.chat_session import AnswerPiece, ChatPrompt, Message
from quire.cli.generation import RequestTiming
from quire.cli.option_groups import make_sampling_params
from quire.cli.remote.client import ModelCard
from quire.cli.remote.events import Chunk, Delta
from quire.cli.remote.failures import RefusedError
from quire.cli.remote.requests import RemoteServer

PATH = "/v1/chat/completions"


class RemoteChatModel:
    """Tokens are counted by the server's /tokenize, if it has one as Quire's and vLLM's have it."""

    def __init__(self, server: RemoteServer, card: ModelCard) -> None:
        self.name = card.id
        self.max_model_len = card.max_model_len
        self._server = server
        self._can_count = card.max_model_len is not None

    def longest_answer(self, params: Mapping[str, Any]) -> int | None:
        """Raises ValidationError, in the words of an engine here."""
        return make_sampling_params({**params, "n": 1}, {}).max_tokens

    def render(self, messages: Sequence[Message]) -> ChatPrompt:
        """The messages themselves: the server has the template."""
        return ChatPrompt(list(messages), self._count(messages) if self._can_count else None)

    def answer(
        self, prompt: ChatPrompt, params: Mapping[str, Any], timing: RequestTiming
    ) -> Generator[AnswerPiece, None, None]:
        """Raises RefusedError, RemoteError."""
        body = {
            "model": self.name,
            "messages": prompt.content,
            **params,
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        key = self._server.start(PATH, body)
        is_reasoning = False
        try:
            for arrival in self._server.arrivals(key):
                if arrival.error is not None:
                    raise arrival.error
                for piece in _pieces(arrival.chunk or Chunk(), arrival.now, timing):
                    if is_reasoning and piece.text and not piece.shown_only:
                        yield AnswerPiece("\n\n", shown_only=True)
                    is_reasoning = piece.shown_only
                    yield piece
        finally:
            self._server.stop(key)

    def _count(self, messages: Sequence[Message]) -> int | None:
        try:
            answer = self._server.post("/tokenize", {"model": self.name, "messages": list(messages)})
        except RefusedError as e:
            if e.status_code not in (404, 405):
                raise
            self._can_count = False
            return None
        count = answer.get("count") if isinstance(answer, dict) else None
        return count if isinstance(count, int) else None


def _pieces(chunk: Chunk, now: float, timing: RequestTiming) -> Generator[AnswerPiece, None, None]:
    if chunk.usage is not None:
        timing.num_prompt_tokens = chunk.usage.prompt_tokens or 0
        timing.num_cached_tokens = chunk.usage.cached_tokens
        timing.num_output_tokens = chunk.usage.completion_tokens or timing.num_output_tokens
    for choice in chunk.choices[:1]:
        delta = choice.delta or Delta()
        if delta.has_output:
            timing.stamp(now)
            timing.num_output_tokens += 1
        reasoning = delta.reasoning or delta.reasoning_content
        if reasoning:
            yield AnswerPiece(reasoning, shown_only=True)
        if delta.content or choice.finish_reason:
            yield AnswerPiece(delta.content or "", choice.finish_reason)

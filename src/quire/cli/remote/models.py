"""Models of a server for `quire chat` and `quire complete`, with the interfaces of models that run here."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.cli.chat_session import AnswerPiece, ChatPrompt, Message
from quire.cli.generation import RequestTiming
from quire.cli.option_groups import make_sampling_params
from quire.cli.remote.protocol import Choice, Chunk, Delta, ModelCard, RefusedError
from quire.errors import ClientError
from quire.outputs import CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from quire.cli.remote.client import Arrival, RemoteServer

REMOTE_SERVER = "quire.cli.remote.client:RemoteServer"
"""Resolved by name when a server is used, because its HTTP library takes a while to load."""
CHAT_PATH = "/v1/chat/completions"


class RemoteChatModel:
    """Conversations as streams of /v1/chat/completions.

    Tokens are counted by the server's /tokenize, where it has that route in the form of Quire and vLLM.
    """

    def __init__(self, server: RemoteServer, card: ModelCard) -> None:
        self.name = card.id
        self.max_model_len = card.max_model_len
        self._server = server
        self._can_count = card.max_model_len is not None

    def longest_answer(self, params: Mapping[str, Any]) -> int | None:
        return make_sampling_params({**params, "n": 1}, {}).max_tokens

    def render(self, messages: Sequence[Message]) -> ChatPrompt:
        """Returns the messages themselves: the server applies the template."""
        return ChatPrompt(list(messages), self._count(messages) if self._can_count else None)

    def answer(
        self, prompt: ChatPrompt, params: Mapping[str, Any], timing: RequestTiming
    ) -> Generator[AnswerPiece, None, None]:
        body = {
            "model": self.name,
            "messages": prompt.content,
            **params,
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        key = self._server.start(CHAT_PATH, body)
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
    timing.take_usage(chunk.usage)
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


COMPLETIONS_PATH = "/v1/completions"
_ID_PREFIX = "token_id:"


class RemoteCompletions:
    """Prompts as streams of /v1/completions, all at once. `fields` are sampling parameters by their API names.

    Token ids are requested where the server knows vLLM's extensions; others may refuse unknown fields.
    """

    def __init__(self, server: RemoteServer, card: ModelCard, fields: Mapping[str, Any]) -> None:
        self._server = server
        self._num_top = int(fields.get("logprobs") or 0)
        self._num_outputs = int(fields.get("n") or 1)
        self._ended: set[tuple[int, int]] = set()
        """The (prompt, output) pairs that have ended."""
        extensions = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        self._body = {
            "model": card.id,
            **fields,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(extensions if card.max_model_len is not None else {}),
        }
        self._timings: list[RequestTiming] = []
        self._keys: list[int] = []

    def start(self, prompts: Sequence[str]) -> list[RequestTiming]:
        """Sends the prompts. Returns the timing of each, which `outputs` updates."""
        for prompt in prompts:
            self._timings.append(RequestTiming(added_s=time.perf_counter()))
            self._keys.append(self._server.start(COMPLETIONS_PATH, {**self._body, "prompt": prompt}))
        return self._timings

    def outputs(self) -> Iterator[RequestOutput]:
        """Yields updates of kind DELTA until all prompts are done; the last of each is `finished` and has no text.

        A failure is an output with finish_reason "error"; a refusal is raised, as by an engine.
        """
        numbers = {key: number for number, key in enumerate(self._keys)}
        for arrival in self._server.arrivals(*self._keys):
            if isinstance(arrival.error, ClientError):
                raise arrival.error
            yield self._output(numbers[arrival.key], arrival)

    def _output(self, number: int, arrival: Arrival) -> RequestOutput:
        timing, chunk = self._timings[number], arrival.chunk
        outputs: list[CompletionOutput] = []
        if chunk is not None:
            outputs = [_completion(choice, self._num_top) for choice in chunk.choices]
            if outputs and (timing.first_token_s is None or any(o.text or o.token_ids for o in outputs)):
                timing.stamp(arrival.now)
                timing.num_output_tokens += sum(len(o.token_ids) or bool(o.text) for o in outputs)
            timing.take_usage(chunk.usage)
        else:
            words = str(arrival.error or f"{self._server.address} ended its answer without a reason")
            left = [i for i in range(self._num_outputs) if (number, i) not in self._ended]
            outputs = [CompletionOutput(i, "", [], None, None, "error", error_message=words) for i in left]
        self._ended |= {(number, o.index) for o in outputs if o.finished()}
        return RequestOutput(str(number), None, None, None, outputs, finished=chunk is None)


def _completion(choice: Choice, num_top: int) -> CompletionOutput:
    return CompletionOutput(
        choice.index,
        choice.text or "",
        choice.token_ids or [],
        None,
        _logprobs(choice, num_top),
        choice.finish_reason,
        choice.stop_reason,
    )


def _logprobs(choice: Choice, num_top: int) -> list[dict[int, Logprob]] | None:
    """Returns log-probabilities by token id, where tokens are written as ids.

    The API has neither texts beside the ids nor the rank of a token that is not among the most likely ones.
    """
    if not isinstance(choice.logprobs, dict):
        return None
    rows = []
    for top in choice.logprobs.get("top_logprobs") or ():
        values = {int(name.removeprefix(_ID_PREFIX)): lp for name, lp in top.items() if name.startswith(_ID_PREFIX)}
        ranks = {token_id: i + 1 for i, token_id in enumerate(sorted(values, key=lambda t: -values[t])[:num_top])}
        rows.append({token_id: Logprob(value, ranks.get(token_id)) for token_id, value in values.items()})
    return rows or None

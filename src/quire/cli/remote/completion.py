"""`quire complete` on a server: prompts as streams of /v1/completions, their chunks as an engine's outputs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.cli.generation import RequestTiming
from quire.cli.remote.client import ModelCard
from quire.cli.remote.events import Choice
from quire.cli.remote.requests import Arrival, RemoteServer
from quire.errors import ClientError
from quire.outputs import CompletionOutput, Logprob, RequestOutput

PATH = "/v1/completions"
_ID_PREFIX = "token_id:"


class RemoteCompletions:
    """All prompts at once, each a request. `fields` are sampling parameters by their names in the API.

    Token ids are asked for where the server knows vLLM's extensions; others may refuse fields they do not know.
    """

    def __init__(self, server: RemoteServer, card: ModelCard, fields: Mapping[str, Any]) -> None:
        self._server = server
        self._num_top = int(fields.get("logprobs") or 0)
        self._num_outputs = int(fields.get("n") or 1)
        self._ended: set[tuple[int, int]] = set()
        """(prompt, output) that have come to their end."""
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
        """Send them; the stopwatch of each, which `outputs` keeps."""
        for prompt in prompts:
            self._timings.append(RequestTiming(added_s=time.perf_counter()))
            self._keys.append(self._server.start(PATH, {**self._body, "prompt": prompt}))
        return self._timings

    def outputs(self) -> Iterator[RequestOutput]:
        """Updates of kind DELTA until all prompts are done; the last of each is `finished` and has no text.

        What fails is an output with finish_reason "error"; a refusal is raised, as an engine's is.
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
            if chunk.usage is not None:
                timing.num_prompt_tokens = chunk.usage.prompt_tokens or 0
                timing.num_cached_tokens = chunk.usage.cached_tokens
                timing.num_output_tokens = chunk.usage.completion_tokens or timing.num_output_tokens
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
    """By token id, where they are written so. The API tells neither texts beside the ids, nor the rank of a token that
    is not among the most likely ones."""
    if not isinstance(choice.logprobs, dict):
        return None
    rows = []
    for top in choice.logprobs.get("top_logprobs") or ():
        values = {int(name.removeprefix(_ID_PREFIX)): lp for name, lp in top.items() if name.startswith(_ID_PREFIX)}
        ranks = {token_id: i + 1 for i, token_id in enumerate(sorted(values, key=lambda t: -values[t])[:num_top])}
        rows.append({token_id: Logprob(value, ranks.get(token_id)) for token_id, value in values.items()})
    return rows or None

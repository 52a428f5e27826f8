"""Parts of answers: log-probabilities of texts, conversations and prompts, and counts of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.frontend.text.tokenizer import Tokenizer
from quire.outputs import CompletionOutput, Logprob, PromptLogprobs, RequestOutput

MIN_LOGPROB = -9999.0
"""Value shown for minus infinity, which JSON does not have."""
Position = dict[int, Logprob]


class TokenNames:
    """Writes tokens as their text, or as `token_id:N` for clients that must distinguish equal texts."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token_id: int, entry: Logprob) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id, entry)

    def text(self, token_id: int, entry: Logprob) -> str:
        """Returns the text that a token adds."""
        if entry.decoded_token is not None or self._tokenizer is None:
            return entry.decoded_token or ""
        return self._tokenizer.token_text(token_id)


def text_logprobs(
    token_ids: Sequence[int], positions: Iterable[Position | None], name: TokenNames, first_offset: int = 0
) -> tuple[dict[str, Any], int]:
    """Returns (the shape of /v1/completions, the offset of the next token).

    A position of None is the first token of a prompt. `first_offset` is the length of the text before.
    """
    offsets: list[int] = []
    values: list[float | None] = []
    tokens: list[str] = []
    tops: list[dict[str, float] | None] = []
    offset = first_offset
    for token_id, position in zip(token_ids, positions, strict=True):
        entry = Logprob(0.0) if position is None else position[token_id]
        offsets.append(offset)
        tokens.append(name(token_id, entry))
        values.append(None if position is None else shown(entry.logprob))
        tops.append(None if position is None else {name(i, x): shown(x.logprob) for i, x in position.items()})
        offset += len(name.text(token_id, entry))
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}, offset


def chat_logprobs(
    token_ids: Sequence[int], positions: Iterable[Position], name: TokenNames, num_top: int
) -> dict[str, Any]:
    """Returns the shape of /v1/chat/completions: at most `num_top` tokens per position, most likely first; -1: all."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        # the sampled token comes first; its rank shows whether it is a top one, too
        top = [_token(name(i, x), x) for i, x in position.items() if x.rank is not None and 0 <= num_top >= x.rank]
        if num_top == -1:
            top = [_token(name(i, x), x) for i, x in position.items()]
        content.append({**_token(name(token_id, position[token_id]), position[token_id]), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(positions: PromptLogprobs | None) -> list[dict[str, Any] | None] | None:
    """Returns the shape of the `prompt_logprobs` extension: token id (as text) to log-probability, rank and text."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(i): {"logprob": shown(x.logprob), "rank": x.rank, "decoded_token": x.decoded_token}
            for i, x in position.items()
        }
        for position in positions
    ]


def shown(logprob: float) -> float:
    """Returns a finite number."""
    return max(logprob, MIN_LOGPROB)


def _token(text: str, entry: Logprob) -> dict[str, Any]:
    return {"token": text, "logprob": shown(entry.logprob), "bytes": list(text.encode("utf-8", errors="replace"))}


_PREDICTION_FIELDS = ("accepted_prediction_tokens", "rejected_prediction_tokens")


def answer_metrics(completions: Sequence[CompletionOutput]) -> dict[str, Any] | None:
    """Returns the field `metrics` of an answer with one choice; None where nothing was asked for, or not one choice."""
    metrics = completions[0].spec_decode_metrics if len(completions) == 1 else None
    return None if metrics is None else {"speculative_decoding": metrics}


class TokenCount:
    """Counts the prompts and outputs of one HTTP request as they come."""

    def __init__(self, *, shows_cached: bool) -> None:
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        self.num_reasoning_tokens: int | None = None
        """Number of completion tokens that are reasoning; None without a parser, and in a stream until its end."""
        self.prediction: tuple[int, int] | None = None
        """(Accepted, rejected) tokens drafted from the prediction; None without one, and in a stream until an end."""
        self.has_prediction = False
        self._shows_cached = shows_cached
        self._seen: set[int] = set()

    def add(self, index: int, output: RequestOutput) -> None:
        """Adds one output of prompt `index`, and the prompt if it is the first."""
        self.add_prompt(index, output)
        self.add_outputs(output)

    def add_prompt(self, index: int, output: RequestOutput) -> None:
        """Adds prompt `index`, once."""
        if index not in self._seen:
            self._seen.add(index)
            self.num_prompt_tokens += len(output.prompt_token_ids or ())
            self.num_cached_tokens += output.num_cached_tokens or 0

    def add_outputs(self, output: RequestOutput) -> None:
        """Adds the tokens of one output."""
        self.num_completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if not self.has_prediction:
            return
        ended = [completion for completion in output.outputs if completion.finish_reason is not None]
        if ended:
            accepted, rejected = self.prediction or (0, 0)
            accepted += sum(completion.num_accepted_prediction_tokens for completion in ended)
            rejected += sum(completion.num_rejected_prediction_tokens for completion in ended)
            self.prediction = accepted, rejected

    def add_reasoning(self, num_tokens: int) -> None:
        """Adds the tokens of one output's reasoning."""
        self.num_reasoning_tokens = (self.num_reasoning_tokens or 0) + num_tokens

    @property
    def shown_cached_tokens(self) -> int:
        """Number of prompt tokens from the cache, with --enable-prompt-tokens-details; otherwise 0."""
        return self.num_cached_tokens if self._shows_cached else 0

    def in_chunk(self) -> dict[str, Any]:
        """Returns the counts in the shape of streams."""
        counts: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "completion_tokens": self.num_completion_tokens,
        }
        if self._shows_cached:
            counts["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        details = {} if self.num_reasoning_tokens is None else {"reasoning_tokens": self.num_reasoning_tokens}
        if self.prediction is not None:
            details |= dict(zip(_PREDICTION_FIELDS, self.prediction, strict=True))
        if details:
            counts["completion_tokens_details"] = details
        return counts

    def in_answer(self) -> dict[str, Any]:
        """Returns the counts in the shape of whole answers."""
        counts = self.in_chunk()
        details = {name: counts.pop(name, None) for name in ("prompt_tokens_details", "completion_tokens_details")}
        return counts | details

"""Log-probabilities as users see them: per position a map from token id to `Logprob` with the token's text.

The text of a token is what it adds to the output in its place: a token that ends inside a UTF-8 character shows what is
complete, and the token that completes the character shows all of it. So the texts of the sampled tokens, joined, are
the text of the output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quire.frontend.text.tokenizer import CONTEXT_TOKENS, REPLACEMENT, Tokenizer
from quire.outputs import Logprob, PromptLogprobs, SampleLogprobs
from quire.sampling_params import SamplingParams
from quire.wire.execution import LogprobsLists, LogprobsTensors


class LogprobsProcessor:
    """Collects the log-probabilities of one request. Fields are None when they were not asked for."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        wanted = params.logprobs is not None or params.logprob_token_ids is not None
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        top = 0 if params.logprob_token_ids else params.logprobs or 0
        self._num_top = sys.maxsize if top == -1 else top
        self._before: list[int] = []
        self.logprobs: SampleLogprobs | None = [] if wanted else None
        self.cumulative_logprob: float | None = 0.0 if wanted else None
        self.prompt_logprobs: PromptLogprobs | None = None

    @staticmethod
    def from_params(
        tokenizer: Tokenizer | None, params: SamplingParams, prompt_ids: Sequence[int]
    ) -> LogprobsProcessor | None:
        """What a request needs: nothing, if it asks for no log-probabilities."""
        asks = params.logprobs is not None or params.logprob_token_ids is not None or params.prompt_logprobs is not None
        return LogprobsProcessor(tokenizer, params, prompt_ids) if asks else None

    def update_from_output(self, new: LogprobsLists | None, prompt: LogprobsTensors | None, num_tokens: int) -> None:
        """Take in a step's rows, the first `num_tokens` of the new ones: a stop string may have cut off the rest."""
        if prompt is not None:
            self._update_prompt(prompt)
        if new is not None and self.logprobs is not None:
            for ids, values, rank in zip(
                new.logprob_token_ids[:num_tokens], new.logprobs, new.sampled_token_ranks, strict=False
            ):
                self.logprobs.append(self._position(ids, values, rank, self._num_top, self._before))
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + values[0]
                self._before = [*self._before, ids[0]][-CONTEXT_TOKENS:]

    def _update_prompt(self, rows: LogprobsTensors) -> None:
        """Row i predicts prompt token i + 1; nothing precedes the first one (its entry is None)."""
        self.prompt_logprobs = [None]
        lists = (rows.logprob_token_ids.tolist(), rows.logprobs.tolist(), rows.selected_token_ranks.tolist())
        for row, (ids, values, rank) in enumerate(zip(*lists, strict=True)):
            before = self._prompt_ids[max(0, row + 1 - CONTEXT_TOKENS) : row + 1]
            self.prompt_logprobs.append(self._position(ids, values, rank, len(ids), before))

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """The prompt's, once: for streams of deltas."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def _position(
        self, ids: Sequence[int], values: Sequence[float], rank: int, num_top: int, before: Sequence[int]
    ) -> dict[int, Logprob]:
        """One position: the token that is there, the `num_top` most likely ones in order, then ones asked for by id."""
        entry: dict[int, Logprob] = {}
        for column, (token_id, value) in enumerate(zip(ids, values, strict=True)):
            if token_id not in entry:
                of_column = rank if column == 0 else column if column <= num_top else None
                entry[token_id] = Logprob(value, of_column, self._text(token_id, before))
        return entry

    def _text(self, token_id: int, before: Sequence[int]) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._tokenizer.token_text(token_id)
        return text if REPLACEMENT not in text else text_after(self._tokenizer, before, token_id)


def text_after(tokenizer: Tokenizer, before: Sequence[int], token_id: int) -> str:
    """The text `token_id`, which begins or ends inside a character, adds after the tokens `before`."""
    for length in range(1, min(len(before), CONTEXT_TOKENS - 1) + 1):
        context = list(before[-length:])
        text = tokenizer.decode([*context, token_id])
        if REPLACEMENT not in text:
            return text[len(tokenizer.decode(context).rstrip(REPLACEMENT)) :]
    return tokenizer.token_text(token_id).rstrip(REPLACEMENT)

"""How to sample the rows of one step: the parameters of its requests, turned into arrays.

`SamplingTable` keeps them per row of the batch; `select` turns the rows that sample into `SamplingMetadata`, which
holds only what someone asked for: a field that is None or empty is work that is skipped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.sampling_params import SamplingParams
from quire.structured_outputs import ReasoningTokens
from quire.worker.sample.edits import TokenEntries
from quire.worker.sample.history import TokenHistory
from quire.worker.sample.kernel import DrawRules

Rows = npt.NDArray[np.int64]
"""Row numbers of the batch, ascending."""


@dataclass(frozen=True)
class PenalizedRows:
    """Rows with a penalty; the arrays have one element for each."""

    rows: list[int]
    histories: list[TokenHistory]
    factors: npt.NDArray[np.float32]
    """[n, 3]: presence, frequency, repetition."""


@dataclass(frozen=True)
class LogprobRow:
    """A row whose log-probabilities are wanted: the top `num_top` (-1: all), then those of `token_ids`."""

    row: int
    num_top: int
    token_ids: list[int] | None


@dataclass(frozen=True)
class ThinkingRow:
    """A row whose reasoning is to be closed after `budget` tokens."""

    row: int
    budget: int
    tokens: ReasoningTokens
    history: TokenHistory

    @property
    def is_used_up(self) -> bool:
        """Whether it has had them, and reasons still."""
        num_thought = None if self.history.has(self.tokens.close) else self.history.num_after(self.tokens.open)
        return num_thought is not None and num_thought >= self.budget


@dataclass(frozen=True)
class SamplingMetadata:
    """Constant while the same requests sample: what changes with each step is in histories and output lengths."""

    rules: DrawRules | None
    """None: all rows are greedy."""
    allowed: TokenEntries | None
    bias: tuple[TokenEntries, Tensor] | None
    penalized: PenalizedRows | None
    bad_words: list[tuple[int, list[list[int]], TokenHistory]]
    min_tokens: list[tuple[int, int, list[int]]]
    """(row, outputs before which its stop tokens are banned, stop tokens)"""
    thinking: list[ThinkingRow]
    logprobs: list[LogprobRow]

    @property
    def edits_logits(self) -> bool:
        """Whether sampling changes logits of greedy rows, too."""
        return bool(self.allowed or self.bias or self.penalized or self.bad_words or self.min_tokens or self.thinking)


class SamplingTable:
    """Sampling parameters by row of the batch: arrays of what every request has, the rest looked up when it is rare."""

    def __init__(self, max_num_reqs: int) -> None:
        self._temperature = np.zeros(max_num_reqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_reqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_reqs, dtype=np.int64)
        self._top_p = np.ones(max_num_reqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_reqs, dtype=np.uint64)
        self._params: list[SamplingParams | None] = [None] * max_num_reqs
        self._is_plain = np.ones(max_num_reqs, dtype=bool)
        self.histories: dict[int, TokenHistory] = {}
        """By row, of the requests whose sampling looks back."""

    def set_row(
        self, row: int, req_id: str, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> None:
        """Enter a request."""
        self._temperature[row] = 0.0 if params.is_greedy else params.temperature
        self._min_p[row], self._top_k[row], self._top_p[row] = params.min_p, params.top_k, params.top_p
        self._seeds[row] = _seed_of(req_id, params)
        self._params[row] = params
        self._is_plain[row] = _is_plain(params)
        if _has_penalty(params) or params.bad_words_token_ids or params.thinking_token_budget is not None:
            # Only the repetition penalty looks at the prompt.
            prompt = prompt_token_ids if params.repetition_penalty != 1.0 else []
            self.histories[row] = TokenHistory(prompt, output_token_ids)

    def clear_row(self, row: int) -> None:
        """Forget the request of a row."""
        self._params[row] = None
        self.histories.pop(row, None)

    def move_row(self, source: int, target: int) -> None:
        """Move a request to a free row."""
        for array in (self._temperature, self._min_p, self._top_k, self._top_p, self._seeds, self._is_plain):
            array[target] = array[source]
        self._params[target], self._params[source] = self._params[source], None
        if source in self.histories:
            self.histories[target] = self.histories.pop(source)

    def select(self, rows: Rows, device: torch.device) -> SamplingMetadata:
        """The metadata of the requests in `rows`; row i of the logits will be the request in rows[i]."""
        special = [
            (i, params) for i in np.flatnonzero(~self._is_plain[rows]).tolist() if (params := self._params[rows[i]])
        ]
        allowed = [(i, sorted(set(p.allowed_token_ids))) for i, p in special if p.allowed_token_ids]
        return SamplingMetadata(
            rules=self._select_rules(rows),
            allowed=TokenEntries.build(allowed, device) if allowed else None,
            bias=_select_bias(special, device),
            penalized=self._select_penalized(special, rows),
            bad_words=[
                (i, p.bad_words_token_ids, self.histories[int(rows[i])]) for i, p in special if p.bad_words_token_ids
            ],
            min_tokens=[
                (i, p.min_tokens, stop_ids)
                for i, p in special
                if p.min_tokens and (stop_ids := sorted(p.all_stop_token_ids))
            ],
            thinking=[
                ThinkingRow(i, p.thinking_token_budget, p.reasoning_tokens, self.histories[int(rows[i])])
                for i, p in special
                if p.thinking_token_budget is not None and p.reasoning_tokens is not None
            ],
            logprobs=[
                LogprobRow(i, p.num_logprobs or 0, p.logprob_token_ids)
                for i, p in special
                if p.num_logprobs is not None or p.logprob_token_ids
            ],
        )

    def _select_rules(self, rows: Rows) -> DrawRules | None:
        temperature = self._temperature[rows]
        if not temperature.any():
            return None
        return DrawRules(temperature, self._min_p[rows], self._top_k[rows], self._top_p[rows], self._seeds[rows])

    def _select_penalized(self, special: list[tuple[int, SamplingParams]], rows: Rows) -> PenalizedRows | None:
        penalized = [(i, p) for i, p in special if _has_penalty(p)]
        if not penalized:
            return None
        factors = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for _, p in penalized]
        return PenalizedRows(
            rows=[i for i, _ in penalized],
            histories=[self.histories[int(rows[i])] for i, _ in penalized],
            factors=np.array(factors, dtype=np.float32),
        )


def _has_penalty(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _is_plain(params: SamplingParams) -> bool:
    """Whether temperature, top-k, top-p, min-p and seed are all there is to it."""
    return not (
        _has_penalty(params)
        or params.allowed_token_ids
        or params.logit_bias
        or params.bad_words_token_ids
        or params.min_tokens
        or params.thinking_token_budget is not None
        or params.logprobs is not None
        or params.logprob_token_ids
    )


def _seed_of(req_id: str, params: SamplingParams) -> int:
    """The seed as an unsigned 64-bit number. A request without one gets its id's: the same after every restart."""
    if params.seed is None:
        return int.from_bytes(hashlib.sha256(req_id.encode()).digest()[:8], "little")
    return params.seed & 0xFFFFFFFFFFFFFFFF


def _select_bias(special: list[tuple[int, SamplingParams]], device: torch.device) -> tuple[TokenEntries, Tensor] | None:
    biased = [(i, p.logit_bias) for i, p in special if p.logit_bias]
    if not biased:
        return None
    entries = TokenEntries.build([(i, list(bias)) for i, bias in biased], device)
    values = np.array([value for _, bias in biased for value in bias.values()], dtype=np.float32)
    return entries, torch.from_numpy(values).to(device)

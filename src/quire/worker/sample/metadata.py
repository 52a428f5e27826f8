"""Sampling parameters of the rows of one step, as arrays.

`SamplingTable` stores them by row of the batch. `select` turns the rows that sample into `SamplingMetadata`, which
holds only what some request asked for: a field that is None or empty is work that is skipped.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.sampling_params import SamplingParams
from quire.structured_outputs import ReasoningTokens
from quire.worker.sample.kernel import DrawRules


class TokenHistory:
    """The outputs of one request, and how often each distinct token of prompt and output occurs in the output.

    Sparse: memory and work grow with the distinct tokens of the request, not with the vocabulary.
    """

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self.output_token_ids: list[int] = []
        self._slot_of = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._token_ids = np.array([*distinct, *[0] * 16], dtype=np.int32)
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Appends one output token."""
        self.output_token_ids.append(token_id)
        slot = self._slot_of.setdefault(token_id, len(self._slot_of))
        if slot == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[slot] = token_id
        self._counts[slot] += 1

    def token_counts(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Returns the distinct tokens of prompt and output, and their counts in the output. Views: use at once."""
        n = len(self._slot_of)
        return self._token_ids[:n], self._counts[:n]

    def num_after(self, token_id: int | None) -> int | None:
        """Returns the number of outputs after the first one that was `token_id` (None: after the prompt); None if it
        has not occurred."""
        if token_id is None:
            return len(self.output_token_ids)
        return len(self.output_token_ids) - self.output_token_ids.index(token_id) - 1 if self.has(token_id) else None

    def has(self, token_id: int) -> bool:
        """Returns True if the token is among the outputs."""
        slot = self._slot_of.get(token_id)
        return slot is not None and bool(self._counts[slot])

    def banned_by(self, words: Iterable[list[int]]) -> list[int]:
        """Returns the tokens that would complete one of `words` (non-empty token sequences) at the end of the
        output."""
        return list({word[-1] for word in words if self._ends_with(word[:-1])})

    def _ends_with(self, tail: list[int]) -> bool:
        return not tail or self.output_token_ids[-len(tail) :] == tail


class TokenEntries(NamedTuple):
    """(row, token) pairs, parallel [m] int64 tensors. No pair occurs twice."""

    rows: Tensor
    token_ids: Tensor

    @staticmethod
    def build(
        ids_by_row: Sequence[tuple[int, Sequence[int] | npt.NDArray[np.int32]]], device: torch.device
    ) -> TokenEntries:
        """Returns the pairs of (row, its distinct tokens)."""
        rows = np.repeat([row for row, _ in ids_by_row], [len(ids) for _, ids in ids_by_row]).astype(np.int64)
        token_ids = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in ids_by_row])
        return TokenEntries(torch.from_numpy(rows).to(device), torch.from_numpy(token_ids).to(device))

    def move(self, places: Rows) -> tuple[TokenEntries, Tensor]:
        """Returns the pairs with places[row] for row, without those where that is negative; and which are left, [m]
        bool."""
        rows = torch.from_numpy(places).to(self.rows.device)[self.rows]
        is_left = rows >= 0
        return TokenEntries(rows[is_left], self.token_ids[is_left]), is_left


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
    """A row whose reasoning is closed after `budget` tokens."""

    row: int
    budget: int
    tokens: ReasoningTokens
    history: TokenHistory

    @property
    def is_used_up(self) -> bool:
        """True if the budget is used up and the reasoning has not ended."""
        num_thought = None if self.history.has(self.tokens.close) else self.history.num_after(self.tokens.open)
        return num_thought is not None and num_thought >= self.budget


@dataclass(frozen=True)
class SamplingMetadata:
    """Sampling parameters that are constant while the same requests sample; histories and output lengths change in each
    step."""

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
    histories: dict[int, TokenHistory]
    """Histories by row."""

    @cached_property
    def edited(self) -> Rows:
        """Rows whose logits sampling edits."""
        rows = [row for row, *_ in (*self.bad_words, *self.min_tokens)] + [limit.row for limit in self.thinking]
        if self.allowed is not None:
            rows += self.allowed.rows.tolist()
        if self.bias is not None:
            rows += self.bias[0].rows.tolist()
        if self.penalized is not None:
            rows += self.penalized.rows
        return np.unique(np.array(rows, dtype=np.int64))

    def move_edits(self, places: Rows) -> SamplingMetadata:
        """Returns the edits of row i as those of row places[i]; without the rows where that is negative."""
        to = places.tolist()
        allowed, bias, penalized = self.allowed, self.bias, self.penalized
        if bias is not None:
            entries, is_left = bias[0].move(places)
            bias = entries, bias[1][is_left]
        if penalized is not None:
            left = [i for i, row in enumerate(penalized.rows) if to[row] >= 0]
            histories = [penalized.histories[i] for i in left]
            penalized = PenalizedRows([to[penalized.rows[i]] for i in left], histories, penalized.factors[left])
        return dataclasses.replace(
            self,
            allowed=allowed and allowed.move(places)[0],
            bias=bias,
            penalized=penalized,
            bad_words=[(to[row], *rest) for row, *rest in self.bad_words if to[row] >= 0],
            min_tokens=[(to[row], *rest) for row, *rest in self.min_tokens if to[row] >= 0],
            thinking=[dataclasses.replace(w, row=to[w.row]) for w in self.thinking if to[w.row] >= 0],
        )

    @property
    def edits_logits(self) -> bool:
        """True if sampling changes the logits of greedy rows, too."""
        return bool(self.allowed or self.bias or self.penalized or self.bad_words or self.min_tokens or self.thinking)


class SamplingTable:
    """Sampling parameters by row of the batch: arrays for what every request has, a list for the rest."""

    def __init__(self, max_num_reqs: int) -> None:
        self._temperature = np.zeros(max_num_reqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_reqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_reqs, dtype=np.int64)
        self._top_p = np.ones(max_num_reqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_reqs, dtype=np.uint64)
        self.params: list[SamplingParams | None] = [None] * max_num_reqs
        """Parameters by row; None: there is no request, or it does not sample."""
        self._is_plain = np.ones(max_num_reqs, dtype=bool)
        self.histories: dict[int, TokenHistory] = {}
        """Histories of the requests whose sampling depends on earlier tokens, by row."""

    def set_row(
        self, row: int, req_id: str, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> None:
        """Stores the parameters of a request."""
        self._temperature[row] = 0.0 if params.is_greedy else params.temperature
        self._min_p[row], self._top_k[row], self._top_p[row] = params.min_p, params.top_k, params.top_p
        self._seeds[row] = _seed_of(req_id, params)
        self.params[row] = params
        self._is_plain[row] = _is_plain(params)
        if _has_penalty(params) or params.bad_words_token_ids or params.thinking_token_budget is not None:
            # only the repetition penalty depends on the prompt
            prompt = prompt_token_ids if params.repetition_penalty != 1.0 else []
            self.histories[row] = TokenHistory(prompt, output_token_ids)

    def clear_row(self, row: int) -> None:
        """Drops the request of a row."""
        self.params[row] = None
        self.histories.pop(row, None)

    def move_row(self, source: int, target: int) -> None:
        """Moves a request to a free row."""
        for array in (self._temperature, self._min_p, self._top_k, self._top_p, self._seeds, self._is_plain):
            array[target] = array[source]
        self.params[target], self.params[source] = self.params[source], None
        if source in self.histories:
            self.histories[target] = self.histories.pop(source)

    def select(self, rows: Rows, device: torch.device) -> SamplingMetadata:
        """Returns the metadata of the requests in `rows`; row i of the logits will be the request in rows[i]."""
        special = [
            (i, params) for i in np.flatnonzero(~self._is_plain[rows]).tolist() if (params := self.params[rows[i]])
        ]
        allowed = [(i, sorted(set(p.allowed_token_ids))) for i, p in special if p.allowed_token_ids]
        return SamplingMetadata(
            rules=self.select_rules(rows),
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
            histories={i: self.histories[int(rows[i])] for i, _ in special if int(rows[i]) in self.histories},
        )

    def select_rules(self, rows: Rows) -> DrawRules | None:
        """Returns how the requests in `rows` draw; None if all are greedy."""
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
    """Returns True if temperature, top-k, top-p, min-p and seed are the only parameters."""
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
    """Returns the seed as an unsigned 64-bit number. Without a seed it follows from the request's id, so that it is the
    same after a restart."""
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

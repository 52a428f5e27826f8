"""Sampling in plain torch, on any device: the reference for the native kernel.

Filters take float32 logits [n, vocab] with a temperature [n] float32, > 0, and a parameter per row. They treat every
row as if it were alone and work in place: a filtered token gets -inf. Tokens as likely as the last one kept are kept,
too. Tokens are equal if their logits are, before these are divided by the temperature.

Random numbers are Philox4x32-10 (J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC '11). The key
is the request's seed, the counter the index of the output token. They are computed in numpy on the host, so that every
device draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.worker.sample.kernel import DrawRules, Ids, TokenLogprobs


def compute_logprobs(logits: Tensor, selected: Tensor, num_top: int) -> TokenLogprobs:
    """Returns log-probabilities. logits: [n, vocab] float32; selected: [n] int64; num_top: at most the vocabulary."""
    chosen = logits.gather(1, selected[:, None])  # [n, 1]
    token_ids = torch.cat([selected[:, None], _rank(logits, num_top)], dim=1)
    log_totals = logits.logsumexp(dim=-1).double()
    values = (logits.gather(1, token_ids).double() - log_totals[:, None]).float()
    ranks = (logits > chosen).sum(dim=-1) + 1
    return TokenLogprobs(*(t.cpu().numpy() for t in (token_ids, values, ranks, log_totals)))


def _rank(logits: Tensor, k: int) -> Tensor:
    """Returns the k most likely tokens of each row in order, the smaller id first among equals; topk has no
    such order."""
    bits = (logits + 0.0).view(torch.int32).long()  # no negative zeros
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers, in the order of the floats
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered * 2**32 + (2**32 - 1 - ids)).topk(k, dim=-1).indices


U64Array = npt.NDArray[np.uint64]

ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_KEY_STEPS = np.array([[(r * w) & 0xFFFFFFFF for w in _WEYL] for r in range(ROUNDS)], dtype=np.uint64)[:, :, None]
_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counters: U64Array, keys: U64Array) -> U64Array:
    """counters: [4, n], keys: [2, n], every element below 2**32. Returns [4, n] of the same kind."""
    even, odd = counters[0::2], counters[1::2]  # [2, n] each
    for round_keys in (keys + _KEY_STEPS) & _LOW_32:
        products = (_MULTIPLIERS * even)[::-1]
        even = (products >> _32) ^ odd ^ round_keys
        odd = products & _LOW_32
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: U64Array, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns [n] numbers in [0, 1), one for each (seed, output index).

    They are multiples of 2**-52, not 2**-53: then u * x < x holds for every positive float64 x after rounding, which
    the inverse CDF relies on.
    """
    unsigned = indices.astype(np.uint64)
    zeros = np.zeros_like(unsigned)
    counters = np.stack([unsigned & _LOW_32, unsigned >> _32, zeros, zeros])
    words = philox4x32(counters, np.stack([seeds & _LOW_32, seeds >> _32]))
    bits = ((words[0] << _32) | words[1]) >> np.uint64(12)
    result: npt.NDArray[np.float64] = bits * 2.0**-52
    return result


TOP_P_CANDIDATES = 128
"""Number of tokens that top-p examines before it sorts the whole vocabulary: mostly enough, and much cheaper."""
LEAST_LOG_WEIGHT = -87.0
"""Smaller min_p than e^-87 count as e^-87: about the smallest number that float32 distinguishes from zero."""


def keep_min_p(logits: Tensor, temperature: Tensor, min_p: Tensor) -> None:
    """Drops tokens less likely than min_p times the most likely one. min_p: [n] float32 in [0, 1]."""
    share = min_p.double().log().clamp(min=LEAST_LOG_WEIGHT)  # p / p_max >= min_p, in logarithms
    threshold = (logits.amax(dim=-1).double() + temperature.double() * share).float()
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)


def keep_top_k(logits: Tensor, temperature: Tensor, top_k: Tensor) -> None:
    """Keeps the k most likely tokens. top_k: [n] int64, >= 1; more than the vocabulary keeps all."""
    k = top_k.clamp(max=logits.shape[1])
    best = logits.topk(int(k.max()), dim=-1).values
    threshold = best.gather(1, k[:, None] - 1)
    logits.masked_fill_(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, temperature: Tensor, top_p: Tensor) -> None:
    """Keeps the smallest set of most likely tokens whose probability reaches top_p. top_p: [n] float32 in (0, 1]."""
    log_total = _scale(logits, temperature).logsumexp(dim=-1)
    best = logits.topk(min(TOP_P_CANDIDATES, logits.shape[1]), dim=-1).values
    threshold, is_reached = _last_kept(best, temperature, log_total, top_p)
    if best.shape[1] < logits.shape[1] and not is_reached.all():
        rest = ~is_reached
        of_rest = (t[rest] for t in (temperature, log_total, top_p))
        threshold[rest] = _last_kept(_sort_descending(logits[rest]), *of_rest)[0]
    logits.masked_fill_(logits < threshold, -torch.inf)


def _scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns the logits divided by the temperature, 0 for the largest of a row."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]


def _last_kept(ranked: Tensor, temperature: Tensor, log_total: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logit among `ranked` [n, m], the largest of the row, at which the sum of probabilities reaches top_p:
    [n, 1]; and [n], True where it does. log_total: that of the row, scaled."""
    probs = (_scale(ranked, temperature) - log_total[:, None]).exp()
    mass = probs.cumsum(dim=-1, dtype=torch.float64)
    last = (mass < top_p.double()[:, None]).sum(dim=-1, keepdim=True)
    return ranked.gather(1, last.clamp(max=ranked.shape[1] - 1)), last[:, 0] < ranked.shape[1]


def _sort_descending(rows: Tensor) -> Tensor:
    if rows.device.type == "cpu":  # numpy sorts rows 3 to 4 times faster than torch 2.13 here
        return torch.from_numpy(np.sort(rows.numpy(), axis=-1)[:, ::-1].copy())
    return rows.sort(dim=-1, descending=True).values


def draw(logits: Tensor, temperature: Tensor, numbers: Tensor) -> Tensor:
    """Returns one token per row, [n] int64, by inverse CDF in token id order. numbers: [n] float64 in [0, 1).

    A token of probability zero is never drawn. Rows without any finite logit (a request that forbade every token) give
    an arbitrary id inside the vocabulary.
    """
    cdf = _scale(logits, temperature).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)  # [n, vocab]
    targets = numbers[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


@dataclass(frozen=True)
class RowValues:
    """A parameter of some rows, and their temperatures. `rows` is None when all rows have it."""

    rows: Tensor | None
    temperature: Tensor
    values: Tensor


@dataclass(frozen=True)
class RandomRows:
    """The rows that are not greedy. Row numbers in the three filters are indices into these."""

    rows: Ids
    seeds: npt.NDArray[np.uint64]
    temperature: Tensor
    """[n] float32"""
    min_p: RowValues | None
    top_k: RowValues | None
    top_p: RowValues | None

    @staticmethod
    def select(rules: DrawRules, device: torch.device) -> RandomRows:
        """Returns the rows of a batch that are not greedy."""
        rows = np.flatnonzero(rules.temperature)
        temperature = rules.temperature[rows]

        def values(array: npt.NDArray[np.generic], active: npt.NDArray[np.bool_]) -> RowValues | None:
            if not active.any():
                return None
            selected = None if active.all() else torch.from_numpy(np.flatnonzero(active)).to(device)
            of_active = (torch.from_numpy(a[active]).to(device) for a in (temperature, array))
            return RowValues(selected, *of_active)

        min_p, top_k, top_p = rules.min_p[rows], rules.top_k[rows], rules.top_p[rows]
        return RandomRows(
            rows=rows,
            seeds=rules.seeds[rows],
            temperature=torch.from_numpy(temperature).to(device),
            min_p=values(min_p, min_p > 0),
            top_k=values(top_k, top_k > 0),
            top_p=values(top_p, top_p < 1),
        )


class TorchSampling:
    """The reference SamplingKernel."""

    def __init__(self) -> None:
        self._rules: DrawRules | None = None
        self._random: RandomRows | None = None

    def choose(self, logits: Tensor, rules: DrawRules | None, indices: Ids) -> Ids:
        if rules is None:
            return argmax(logits)
        random = self._select(rules, logits.device)
        if len(random.rows) == len(logits):
            return _draw(logits, random, indices)
        token_ids = argmax(logits)
        rows = torch.from_numpy(random.rows).to(logits.device)
        token_ids[random.rows] = _draw(logits[rows], random, indices[random.rows])
        return token_ids

    def logprobs(self, logits: Tensor, which: Ids, selected: Ids, num_top: int) -> TokenLogprobs:
        rows = logits[torch.from_numpy(which).to(logits.device)]
        return compute_logprobs(rows, torch.from_numpy(selected).to(logits.device), num_top)

    def _select(self, rules: DrawRules, device: torch.device) -> RandomRows:
        if self._random is None or rules is not self._rules:
            self._rules, self._random = rules, RandomRows.select(rules, device)
        return self._random


def argmax(logits: Tensor) -> Ids:
    """Returns the most likely token of each row, the first among equals."""
    if logits.device.type == "cpu":  # 12 times faster than torch 2.13's
        return np.asarray(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1).cpu().numpy()


def _draw(logits: Tensor, random: RandomRows, indices: Ids) -> Ids:
    """Draws a token per row. logits: [len(random.rows), vocab]."""
    if random.min_p or random.top_k or random.top_p:
        logits = logits.clone()
        _filter_rows(logits, random.min_p, keep_min_p)
        _filter_rows(logits, random.top_k, keep_top_k)
        _filter_rows(logits, random.top_p, keep_top_p)
    numbers = torch.from_numpy(uniforms(random.seeds, indices)).to(logits.device)
    return draw(logits, random.temperature, numbers).cpu().numpy()


def _filter_rows(logits: Tensor, selected: RowValues | None, keep: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Applies a filter to the rows that have its parameter."""
    if selected is None:
        return
    if selected.rows is None:
        keep(logits, selected.temperature, selected.values)
        return
    some = logits[selected.rows]
    keep(some, selected.temperature, selected.values)
    logits[selected.rows] = some

"""Sampling in plain torch, on any device: the reference for the native kernel, and what runs where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.worker.sample import filters
from quire.worker.sample.kernel import DrawRules, Ids, TokenLogprobs
from quire.worker.sample.logprobs import compute_logprobs
from quire.worker.sample.philox import uniforms


@dataclass(frozen=True)
class RowValues:
    """A parameter of some rows, and their temperatures. `rows` is None when all rows have it."""

    rows: Tensor | None
    temperature: Tensor
    values: Tensor


@dataclass(frozen=True)
class RandomRows:
    """The rows that are not greedy. Row numbers in the three filters count within these."""

    rows: Ids
    seeds: npt.NDArray[np.uint64]
    temperature: Tensor
    """[n] float32"""
    min_p: RowValues | None
    top_k: RowValues | None
    top_p: RowValues | None

    @staticmethod
    def select(rules: DrawRules, device: torch.device) -> RandomRows:
        """Those of a batch."""
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
    """See SamplingKernel."""

    def __init__(self) -> None:
        self._rules: DrawRules | None = None
        self._random: RandomRows | None = None

    def choose(self, logits: Tensor, rules: DrawRules | None, indices: Ids) -> Ids:
        """See SamplingKernel.choose."""
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
        """See SamplingKernel.logprobs."""
        rows = logits[torch.from_numpy(which).to(logits.device)]
        return compute_logprobs(rows, torch.from_numpy(selected).to(logits.device), num_top)

    def _select(self, rules: DrawRules, device: torch.device) -> RandomRows:
        if self._random is None or rules is not self._rules:
            self._rules, self._random = rules, RandomRows.select(rules, device)
        return self._random


def argmax(logits: Tensor) -> Ids:
    """The most likely token of each row, the first among equals."""
    if logits.device.type == "cpu":  # 12 times faster than torch 2.13's
        return np.asarray(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1).cpu().numpy()


def _draw(logits: Tensor, random: RandomRows, indices: Ids) -> Ids:
    """logits: [len(random.rows), vocab]."""
    if random.min_p or random.top_k or random.top_p:
        logits = logits.clone()
        _filter_rows(logits, random.min_p, filters.keep_min_p)
        _filter_rows(logits, random.top_k, filters.keep_top_k)
        _filter_rows(logits, random.top_p, filters.keep_top_p)
    numbers = torch.from_numpy(uniforms(random.seeds, indices)).to(logits.device)
    return filters.draw(logits, random.temperature, numbers).cpu().numpy()


def _filter_rows(logits: Tensor, selected: RowValues | None, keep: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Apply a filter to the rows that have its parameter."""
    if selected is None:
        return
    if selected.rows is None:
        keep(logits, selected.temperature, selected.values)
        return
    some = logits[selected.rows]
    keep(some, selected.temperature, selected.values)
    logits[selected.rows] = some

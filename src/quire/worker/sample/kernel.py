"""The interface of a sampling kernel: the choice of tokens, and log-probabilities.

`torch_kernel` implements it in torch, on any device; `kernels/native_sampling.py` calls the C++ library. Both treat
equal logits as equally good: a filter keeps or drops them together. Only a greedy choice, and the order of a list,
prefer one: that of the smaller id. Where two sums are equal but for rounding, the two kernels may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DrawRules:
    """The sampling parameters of a batch's rows; arrays of [n] elements each. The object is the same as long as they
    stay the same, so that kernels may cache what they derive from it."""

    temperature: npt.NDArray[np.float32]
    """0: greedy, with any other parameters."""
    min_p: npt.NDArray[np.float32]
    """0: off"""
    top_k: Ids
    """0: off"""
    top_p: npt.NDArray[np.float32]
    """1: off"""
    seeds: npt.NDArray[np.uint64]

    def take(self, rows: Ids) -> DrawRules:
        """Returns the parameters of `rows`, which may repeat."""
        return DrawRules(self.temperature[rows], self.min_p[rows], self.top_k[rows], self.top_p[rows], self.seeds[rows])


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one selected token per row, and of the most likely tokens."""

    token_ids: Ids
    """[n, 1 + k]: the selected token, then the k most likely, most likely first, the smaller id first among equals."""
    logprobs: npt.NDArray[np.float32]
    """[n, 1 + k]"""
    ranks: Ids
    """[n] rank of the selected token, 1 for the most likely; equals share the best rank."""
    log_totals: npt.NDArray[np.float64]
    """[n] number to subtract from a logit to get its log-probability."""


class SamplingKernel(Protocol):
    """Chooses tokens. Every row is treated as if it were alone. Logits are not changed."""

    def choose(self, logits: Tensor, rules: DrawRules | None, indices: Ids) -> Ids:
        """Returns one token per row, [n]. logits: [n, vocab] float32; indices: [n], the output index of each row's
        token.

        Without rules all rows are greedy. The others draw by inverse CDF, in the order of token ids, at the number that
        Philox makes of (seed, index), from the tokens that min_p, top_k and top_p leave, applied in this order to
        e^(logit / temperature). top_p leaves the smallest set of likeliest tokens whose probability reaches it. Rows
        without a finite largest logit give an arbitrary id inside the vocabulary.
        """
        ...

    def logprobs(self, logits: Tensor, which: Ids, selected: Ids, num_top: int) -> TokenLogprobs:
        """Returns log-probabilities of rows which[i] of `logits`. selected: [len(which)]; 0 <= num_top <= vocab."""
        ...

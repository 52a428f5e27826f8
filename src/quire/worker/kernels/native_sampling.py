"""Sampling by the native library: no sort of the vocabulary, and a row's bits never depend on other rows."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from quire.worker.kernels.library import Context, LogprobsArgs, SampleArgs
from quire.worker.sample.kernel import DrawRules, Ids, TokenLogprobs


class NativeSampling:
    """The choice of tokens, and log-probabilities: SamplingKernel."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._args = SampleArgs()
        self._rules: DrawRules | None = None

    def choose(self, logits: Tensor, rules: DrawRules | None, indices: Ids) -> Ids:
        logits = as_rows(logits)
        args = self._args
        if rules is not self._rules:
            self._set_rules(rules)
        token_ids = np.empty(logits.shape[0], np.int64)
        indices = np.ascontiguousarray(indices)
        args.rows, args.vocab = logits.shape
        args.logits, args.stride = logits.data_ptr(), logits.stride(0)
        args.indices, args.token_ids = indices.ctypes.data, token_ids.ctypes.data
        self._context.library.cdll.qk_sample(self._context.handle, byref(args))
        return token_ids

    def _set_rules(self, rules: DrawRules | None) -> None:
        args = self._args
        self._rules = rules
        if rules is None:
            args.temperature = None
            return
        args.temperature, args.min_p = rules.temperature.ctypes.data, rules.min_p.ctypes.data
        args.top_k, args.top_p = rules.top_k.ctypes.data, rules.top_p.ctypes.data
        args.seeds = rules.seeds.ctypes.data

    def logprobs(self, logits: Tensor, which: Ids, selected: Ids, num_top: int) -> TokenLogprobs:
        logits, n = as_rows(logits), len(which)
        which, selected = np.ascontiguousarray(which), np.ascontiguousarray(selected)
        result = TokenLogprobs(
            np.empty((n, 1 + num_top), np.int64),
            np.empty((n, 1 + num_top), np.float32),
            np.empty(n, np.int64),
            np.empty(n, np.float64),
        )
        args = LogprobsArgs(
            rows=n,
            vocab=logits.shape[1],
            num_top=num_top,
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            which=which.ctypes.data,
            selected=selected.ctypes.data,
            token_ids=result.token_ids.ctypes.data,
            logprobs=result.logprobs.ctypes.data,
            ranks=result.ranks.ctypes.data,
            log_totals=result.log_totals.ctypes.data,
        )
        self._context.library.cdll.qk_logprobs(self._context.handle, byref(args))
        return result


def as_rows(logits: Tensor) -> Tensor:
    """Returns logits, [n, vocab] float32, copied if the elements of a row are not adjacent."""
    assert logits.dtype == torch.float32
    return logits if logits.stride(1) == 1 else logits.contiguous()

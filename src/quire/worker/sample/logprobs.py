"""Log-probabilities: of the model's raw logits, before temperature, edits and filters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Of one selected token per row, and of others beside it."""

    token_ids: Tensor
    """[n, 1 + k] int64: the selected token, then the k most likely, most likely first."""
    logprobs: Tensor
    """[n, 1 + k] float32"""
    ranks: Tensor
    """[n] int64: rank of the selected token, 1 for the most likely; equals share the best rank."""


def compute_logprobs(logits: Tensor, selected: Tensor, num_top: int) -> TokenLogprobs:
    """logits: [n, vocab] float32; selected: [n] int64; num_top: k, or -1 for the whole vocabulary."""
    k = logits.shape[1] if num_top == -1 else min(num_top, logits.shape[1])
    chosen = logits.gather(1, selected[:, None])  # [n, 1]
    top = logits.topk(k, dim=-1)
    values = torch.cat([chosen, top.values], dim=1) - logits.logsumexp(dim=-1, keepdim=True)
    ranks = (logits > chosen).sum(dim=-1) + 1
    return TokenLogprobs(torch.cat([selected[:, None], top.indices], dim=1), values, ranks)


def logprobs_of(logits: Tensor, token_ids: list[int]) -> Tensor:
    """Log-probabilities [len(token_ids)] of one row's chosen tokens. logits: [vocab] float32."""
    return logits[torch.tensor(token_ids, device=logits.device)] - logits.logsumexp(dim=-1)

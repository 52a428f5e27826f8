"""Log-probabilities in torch: of the model's raw logits, before temperature, edits and filters."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.sample.kernel import TokenLogprobs


def compute_logprobs(logits: Tensor, selected: Tensor, num_top: int) -> TokenLogprobs:
    """logits: [n, vocab] float32; selected: [n] int64; num_top: at most the vocabulary."""
    chosen = logits.gather(1, selected[:, None])  # [n, 1]
    token_ids = torch.cat([selected[:, None], _rank(logits, num_top)], dim=1)
    log_totals = logits.logsumexp(dim=-1).double()
    values = (logits.gather(1, token_ids).double() - log_totals[:, None]).float()
    ranks = (logits > chosen).sum(dim=-1) + 1
    return TokenLogprobs(*(t.cpu().numpy() for t in (token_ids, values, ranks, log_totals)))


def _rank(logits: Tensor, k: int) -> Tensor:
    """The k most likely tokens of each row in order, the smaller id first among equals, where topk has no order."""
    bits = (logits + 0.0).view(torch.int32).long()  # no negative zeros
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers, in the order of the floats
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered * 2**32 + (2**32 - 1 - ids)).topk(k, dim=-1).indices

"""The filters of a distribution, and the draw from it, in torch.

Each takes float32 logits [n, vocab] with a temperature [n] float32, > 0, and a parameter per row, and treats every row
as if it were alone. Filters work in place: a filtered token gets -inf. Tokens as likely as the last one kept are kept,
too: no order among equals is invented. Equal are tokens of equal logits, before these are divided by the temperature.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TOP_P_CANDIDATES = 128
"""How many tokens top-p looks at before it sorts the whole vocabulary: most often enough, and much cheaper."""
LEAST_LOG_WEIGHT = -87.0
"""min_p below e^-87 means e^-87: about the smallest number float32 can tell from none."""


def keep_min_p(logits: Tensor, temperature: Tensor, min_p: Tensor) -> None:
    """Drop tokens less likely than min_p times the most likely one. min_p: [n] float32 in [0, 1]."""
    share = min_p.double().log().clamp(min=LEAST_LOG_WEIGHT)  # p / p_max >= min_p, in logarithms
    threshold = (logits.amax(dim=-1).double() + temperature.double() * share).float()
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)


def keep_top_k(logits: Tensor, temperature: Tensor, top_k: Tensor) -> None:
    """Keep the k most likely tokens. top_k: [n] int64, >= 1; more than the vocabulary keeps all."""
    k = top_k.clamp(max=logits.shape[1])
    best = logits.topk(int(k.max()), dim=-1).values
    threshold = best.gather(1, k[:, None] - 1)
    logits.masked_fill_(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, temperature: Tensor, top_p: Tensor) -> None:
    """Keep the smallest set of most likely tokens whose probability reaches top_p. top_p: [n] float32 in (0, 1]."""
    log_total = _scale(logits, temperature).logsumexp(dim=-1)
    best = logits.topk(min(TOP_P_CANDIDATES, logits.shape[1]), dim=-1).values
    threshold, is_reached = _last_kept(best, temperature, log_total, top_p)
    if best.shape[1] < logits.shape[1] and not is_reached.all():
        rest = ~is_reached
        of_rest = (t[rest] for t in (temperature, log_total, top_p))
        threshold[rest] = _last_kept(_sort_descending(logits[rest]), *of_rest)[0]
    logits.masked_fill_(logits < threshold, -torch.inf)


def _scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divided by the temperature, 0 for the largest of a row."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]


def _last_kept(ranked: Tensor, temperature: Tensor, log_total: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The logit among `ranked` [n, m], the largest of the row, at which the sum of probabilities reaches top_p: [n, 1];
    and whether it does: [n]. log_total: that of the row, scaled."""
    probs = (_scale(ranked, temperature) - log_total[:, None]).exp()
    mass = probs.cumsum(dim=-1, dtype=torch.float64)
    last = (mass < top_p.double()[:, None]).sum(dim=-1, keepdim=True)
    return ranked.gather(1, last.clamp(max=ranked.shape[1] - 1)), last[:, 0] < ranked.shape[1]


def _sort_descending(rows: Tensor) -> Tensor:
    if rows.device.type == "cpu":  # numpy sorts rows 3 to 4 times faster than torch 2.13 here
        return torch.from_numpy(np.sort(rows.numpy(), axis=-1)[:, ::-1].copy())
    return rows.sort(dim=-1, descending=True).values


def draw(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row by inverse CDF in token id order. uniforms: [n] float64 in [0, 1). Returns [n] int64.

    A token of probability zero is never drawn. Rows without any finite logit (a request that forbade every token)
    give an arbitrary id inside the vocabulary.
    """
    cdf = _scale(logits, temperature).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)  # [n, vocab]
    targets = uniforms[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)

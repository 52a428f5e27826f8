"""From logits to tokens.

The order is the one vLLM documents: raw log-probabilities; allowed tokens, bad words, min_tokens, logit bias,
penalties; then, of our own, the end of reasoning that has used up its budget; then greedy, or temperature, min-p,
top-k, top-p and the draw.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.wire.execution import LogprobsLists
from quire.worker.sample import edits
from quire.worker.sample.kernel import Ids, SamplingKernel
from quire.worker.sample.metadata import LogprobRow, PenalizedRows, SamplingMetadata


class SamplerOutput(NamedTuple):
    """One token per row, and the log-probabilities of the rows that wanted them."""

    token_ids: npt.NDArray[np.int64]
    logprobs: dict[int, LogprobsLists]
    """By row."""


def sample(
    logits: Tensor, metadata: SamplingMetadata, output_lens: npt.NDArray[np.int64], kernel: SamplingKernel
) -> SamplerOutput:
    """logits: [n, vocab] float32, edited in place; output_lens: [n] tokens each row has generated so far.

    What a row gets depends on nothing but its logits, its parameters, its history and its output length.
    """
    wanted = metadata.logprobs
    which = np.array([w.row for w in wanted], dtype=np.int64)
    raw, raw_rows = logits, which
    if metadata.edits_logits:
        if wanted:  # before anything changes them
            raw, raw_rows = logits[torch.from_numpy(which).to(logits.device)], np.arange(len(wanted))
        edit_logits(logits, metadata, output_lens)
    token_ids = kernel.choose(logits, metadata.rules, output_lens)
    if not wanted:
        return SamplerOutput(token_ids, {})
    return SamplerOutput(token_ids, _logprobs(raw, raw_rows, token_ids[which], wanted, kernel))


def edit_logits(logits: Tensor, metadata: SamplingMetadata, output_lens: npt.NDArray[np.int64]) -> None:
    """Apply, in place, what may change even the most likely token."""
    if metadata.allowed is not None:
        edits.allow_only(logits, metadata.allowed)
    banned = [(row, ids) for row, words, history in metadata.bad_words if (ids := history.banned_by(words))]
    if banned:
        edits.ban(logits, edits.TokenEntries.build(banned, logits.device))
    held_back = [(row, ids) for row, minimum, ids in metadata.min_tokens if output_lens[row] < minimum]
    if held_back:
        edits.ban(logits, edits.TokenEntries.build(held_back, logits.device))
    if metadata.bias is not None:
        edits.add_bias(logits, *metadata.bias)
    if metadata.penalized is not None:
        _penalize(logits, metadata.penalized)
    closed = [(limit.row, [limit.tokens.close]) for limit in metadata.thinking if limit.is_used_up]
    if closed:
        edits.force(logits, edits.TokenEntries.build(closed, logits.device))


def _penalize(logits: Tensor, penalized: PenalizedRows) -> None:
    tokens = [history.token_counts() for history in penalized.histories]
    lens = [len(ids) for ids, _ in tokens]
    if not any(lens):
        return
    entries = edits.TokenEntries.build(
        list(zip(penalized.rows, (ids for ids, _ in tokens), strict=True)), logits.device
    )
    counts = torch.from_numpy(np.concatenate([counts for _, counts in tokens])).to(logits.device)
    factors = torch.from_numpy(np.repeat(penalized.factors, lens, axis=0)).to(logits.device)  # [m, 3]
    edits.apply_penalties(logits, entries, counts, *factors.unbind(1))


def _logprobs(
    raw: Tensor, raw_rows: Ids, selected: Ids, wanted: list[LogprobRow], kernel: SamplingKernel
) -> dict[int, LogprobsLists]:
    """raw[raw_rows[i]]: the logits of wanted[i]. Column 0 is the sampled token; see LogprobRow for the others."""
    vocab = raw.shape[1]
    counts = [vocab if w.num_top == -1 else min(w.num_top, vocab) for w in wanted]
    ids, values, ranks, log_totals = kernel.logprobs(raw, raw_rows, selected, max(counts))
    id_lists, value_lists, rank_list = ids.tolist(), values.tolist(), ranks.tolist()
    result: dict[int, LogprobsLists] = {}
    for i, (want, count) in enumerate(zip(wanted, counts, strict=True)):
        row_ids, row_values = id_lists[i][: count + 1], value_lists[i][: count + 1]
        if want.token_ids:
            row_ids += want.token_ids
            chosen = raw[int(raw_rows[i])][torch.tensor(want.token_ids, device=raw.device)].double().cpu().numpy()
            row_values += (chosen - log_totals[i]).astype(np.float32).tolist()
        result[want.row] = LogprobsLists([row_ids], [row_values], [rank_list[i]])
    return result

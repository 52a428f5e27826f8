"""From logits to tokens.

The order is the one vLLM documents: raw log-probabilities; allowed tokens, bad words, min_tokens, logit bias,
penalties; then, of our own, the end of reasoning that has used up its budget; then greedy, or temperature, min-p,
top-k, top-p and the draw.

Edits work in place on float32 logits [n, vocab]. They name (row, token) pairs, so an edit costs as much as the tokens
it changes and not the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.wire.execution import LogprobsLists
from quire.worker.sample.kernel import Ids, SamplingKernel
from quire.worker.sample.metadata import LogprobRow, PenalizedRows, SamplingMetadata, TokenEntries


def allow_only(logits: Tensor, allowed: TokenEntries) -> None:
    """Drops all tokens without an entry from each row that has entries."""
    kept = logits[allowed]
    logits[allowed.rows] = -torch.inf
    logits[allowed] = kept


def ban(logits: Tensor, banned: TokenEntries) -> None:
    """Drops the tokens of the entries."""
    logits[banned] = -torch.inf


def force(logits: Tensor, forced: TokenEntries) -> None:
    """Drops all tokens but that of the entry from each row that has one, even if it was dropped before."""
    logits[forced.rows] = -torch.inf
    logits[forced] = 0.0


def add_bias(logits: Tensor, entries: TokenEntries, bias: Tensor) -> None:
    """Adds `bias` [m] to the logits of the entries."""
    logits[entries] += bias


def apply_penalties(
    logits: Tensor,
    entries: TokenEntries,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Penalizes the tokens of the entries: tokens of a request's prompt or output. All arguments [m] float32.

    First repetition (positive logits are divided, negative ones multiplied: N. S. Keskar et al., "CTRL", 2019, §4.1),
    then frequency times the number of occurrences in the output, then presence if there is one. An entry that only the
    prompt holds has output count 0.
    """
    values = logits[entries]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * output_counts
    values -= presence * (output_counts > 0)
    logits[entries] = values


def apply_grammar_bitmask(logits: Tensor, rows: Sequence[int], bitmask: npt.NDArray[np.int32]) -> None:
    """Drops the tokens that a grammar forbids.

    bitmask: [len(rows), ceil(vocab / 32)]; token t is allowed if bit t % 32 of word t // 32 is set.
    """
    bits = np.unpackbits(np.ascontiguousarray(bitmask, dtype="<i4").view(np.uint8), axis=1, bitorder="little")
    forbidden = torch.from_numpy(bits[:, : logits.shape[1]] == 0).to(logits.device)
    index = torch.tensor(list(rows), device=logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)


class SamplerOutput(NamedTuple):
    """One token per row, and the log-probabilities of the rows that asked for them."""

    token_ids: npt.NDArray[np.int64]
    logprobs: dict[int, LogprobsLists]
    """Log-probabilities by row."""


def sample(
    logits: Tensor, metadata: SamplingMetadata, output_lens: npt.NDArray[np.int64], kernel: SamplingKernel
) -> SamplerOutput:
    """Samples one token per row. logits: [n, vocab] float32, edited in place; output_lens: [n] tokens each row has so
    far.

    A row's token depends only on its logits, its parameters, its history and its output length.
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
    return SamplerOutput(token_ids, score_tokens(raw, raw_rows, token_ids[which], wanted, kernel))


def edit_logits(logits: Tensor, metadata: SamplingMetadata, output_lens: npt.NDArray[np.int64]) -> None:
    """Applies, in place, the edits that may change even the most likely token."""
    if metadata.allowed is not None:
        allow_only(logits, metadata.allowed)
    banned = [(row, ids) for row, words, history in metadata.bad_words if (ids := history.banned_by(words))]
    if banned:
        ban(logits, TokenEntries.build(banned, logits.device))
    held_back = [(row, ids) for row, minimum, ids in metadata.min_tokens if output_lens[row] < minimum]
    if held_back:
        ban(logits, TokenEntries.build(held_back, logits.device))
    if metadata.bias is not None:
        add_bias(logits, *metadata.bias)
    if metadata.penalized is not None:
        _penalize(logits, metadata.penalized)
    closed = [(limit.row, [limit.tokens.close]) for limit in metadata.thinking if limit.is_used_up]
    if closed:
        force(logits, TokenEntries.build(closed, logits.device))


def _penalize(logits: Tensor, penalized: PenalizedRows) -> None:
    tokens = [history.token_counts() for history in penalized.histories]
    lens = [len(ids) for ids, _ in tokens]
    if not any(lens):
        return
    entries = TokenEntries.build(list(zip(penalized.rows, (ids for ids, _ in tokens), strict=True)), logits.device)
    counts = torch.from_numpy(np.concatenate([counts for _, counts in tokens])).to(logits.device)
    factors = torch.from_numpy(np.repeat(penalized.factors, lens, axis=0)).to(logits.device)  # [m, 3]
    apply_penalties(logits, entries, counts, *factors.unbind(1))


def score_tokens(
    raw: Tensor, raw_rows: Ids, selected: Ids, wanted: Sequence[LogprobRow], kernel: SamplingKernel
) -> dict[int, LogprobsLists]:
    """Returns log-probabilities by row. raw[raw_rows[i]]: the logits that `selected[i]` was sampled from, for
    wanted[i]; several tokens of one row follow one another. Column 0 is the sampled token; for the others see
    LogprobRow."""
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
        lists = result.setdefault(want.row, LogprobsLists([], [], []))
        lists.logprob_token_ids.append(row_ids)
        lists.logprobs.append(row_values)
        lists.sampled_token_ranks.append(rank_list[i])
    return result

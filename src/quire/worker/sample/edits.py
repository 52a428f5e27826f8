"""Edits of single logits that requests ask for: whitelists, bans, biases, penalties, grammar masks.

Each works in place on float32 logits [n, vocab]. What is sparse stays sparse: an edit names (row, token) pairs, so its
cost is that of the tokens it touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class TokenEntries(NamedTuple):
    """(row, token) pairs, parallel [m] int64 tensors. No pair occurs twice."""

    rows: Tensor
    token_ids: Tensor

    @staticmethod
    def build(
        ids_by_row: Sequence[tuple[int, Sequence[int] | npt.NDArray[np.int32]]], device: torch.device
    ) -> TokenEntries:
        """From (row, its distinct tokens)."""
        rows = np.repeat([row for row, _ in ids_by_row], [len(ids) for _, ids in ids_by_row]).astype(np.int64)
        token_ids = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in ids_by_row])
        return TokenEntries(torch.from_numpy(rows).to(device), torch.from_numpy(token_ids).to(device))


def allow_only(logits: Tensor, allowed: TokenEntries) -> None:
    """In each row that has entries, drop all tokens but those."""
    kept = logits[allowed]
    logits[allowed.rows] = -torch.inf
    logits[allowed] = kept


def ban(logits: Tensor, banned: TokenEntries) -> None:
    """Drop these tokens."""
    logits[banned] = -torch.inf


def force(logits: Tensor, forced: TokenEntries) -> None:
    """In each row that has an entry, leave nothing but that, whatever was said of it before."""
    logits[forced.rows] = -torch.inf
    logits[forced] = 0.0


def add_bias(logits: Tensor, entries: TokenEntries, bias: Tensor) -> None:
    """Add `bias` [m] to the logits of the entries."""
    logits[entries] += bias


def apply_penalties(
    logits: Tensor,
    entries: TokenEntries,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Discourage the tokens of the entries: those a request's prompt or output holds. All arguments [m] float32.

    First repetition (positive logits are divided, negative ones multiplied: N. S. Keskar et al., "CTRL", 2019, §4.1,
    as everyone implements it), then frequency times the number of occurrences in the output, then presence if there is
    one. An entry that only the prompt holds has output count 0.
    """
    values = logits[entries]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * output_counts
    values -= presence * (output_counts > 0)
    logits[entries] = values


def apply_grammar_bitmask(logits: Tensor, rows: Sequence[int], bitmask: npt.NDArray[np.int32]) -> None:
    """Drop what a grammar forbids.

    bitmask: [len(rows), ceil(vocab / 32)]; token t is allowed if bit t % 32 of word t // 32 is set.
    """
    bits = np.unpackbits(np.ascontiguousarray(bitmask, dtype="<i4").view(np.uint8), axis=1, bitorder="little")
    forbidden = torch.from_numpy(bits[:, : logits.shape[1]] == 0).to(logits.device)
    index = torch.tensor(list(rows), device=logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)

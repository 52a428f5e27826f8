"""The interface of a drafter: it guesses the next tokens of requests, and the next step verifies them.

A draft is a hint. Whatever a drafter proposes, the tokens that a request gets are those it would get without: a draft
is kept only where it equals the token that is drawn at its position. A wrong draft costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class DraftRow(NamedTuple):
    """One request that may be drafted for. The arrays are views: use them at once."""

    req_id: str
    row: int
    """Its row of the `InputBatch`."""
    token_ids: npt.NDArray[np.int32]
    """Prompt and outputs, [n]."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values are in the cache."""
    max_drafts: int
    """Most drafts it can use, at least 1."""
    prediction: npt.NDArray[np.int32] | None = None
    """Tokens that its user expects in the output."""
    cache_salt: str | None = None
    """Drafts may come from the outputs of requests with the same salt only."""


class Proposal(NamedTuple):
    """Drafts for one request, in the order of its rows; no drafts is an empty proposal."""

    token_ids: list[int]
    confidences: list[int]
    """A bucket from 0 (a guess) to 15 (nearly certain) for each token; what a bucket is worth is measured."""
    from_prediction: bool = False
    """True if the drafts come from `DraftRow.prediction`."""


NO_PROPOSAL = Proposal([], [])


class Drafter(Protocol):
    """Proposes drafts. Owns whatever it remembers of requests; knows nothing of scheduling.

    It may raise: speculation is then switched off, and no token changes.
    """

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """Returns a proposal for each row, of at most `max_drafts` tokens."""
        ...

    def observe(self, req_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Learns from the new tokens of a request, of which the first `num_accepted` were drafts."""
        ...

    def forget(self, req_id: str) -> None:
        """Drops what it remembers of a request that has ended or was preempted. Unknown ids are ignored."""
        ...

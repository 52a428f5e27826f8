"""Drafts from the request's own text: what followed its last tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int64

import numpy as np
import numpy.typing as npt

from quire.worker.kernels.library import native_library
from quire.worker.spec_decode.drafter import NO_PROPOSAL, Drafter, DrafterContext, DraftRow, Proposal
from quire.worker.spec_decode.prediction import draft_of_prediction

LONGEST_MATCH = 15
"""Matches are compared up to this length, or `prompt_lookup_max`: it is the highest confidence."""


class NgramDrafter(Drafter):
    """Stateless: it looks through the row anew in each step.

    The best match is the longest, of at least `prompt_lookup_min` tokens; among equals the latest.
    """

    def __init__(self, context: DrafterContext) -> None:
        drafting = context.drafting
        self._shortest = drafting.prompt_lookup_min
        self._longest = max(drafting.prompt_lookup_max, LONGEST_MATCH)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [draft_of_prediction(row) or self._propose(row.token_ids, row.max_drafts) for row in rows]

    def _propose(self, token_ids: npt.NDArray[np.int32], max_drafts: int) -> Proposal:
        end, match_len = find_match(token_ids, self._shortest, self._longest)
        if not match_len:
            return NO_PROPOSAL
        # a text that repeats itself up to its end goes on repeating: the tokens after the match begin again
        followers = token_ids[end : end + max_drafts].tolist()
        if len(followers) < max_drafts:
            followers = (followers * max_drafts)[:max_drafts]
        return Proposal(followers, [min(match_len + i, LONGEST_MATCH) for i in range(max_drafts)])

    def observe(self, req_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        pass

    def forget(self, req_id: str) -> None:
        pass


def find_match(token_ids: npt.NDArray[np.int32], shortest: int, longest: int) -> tuple[int, int]:
    """Returns the end of the earlier tokens that equal most of the last ones, the latest of equals, and how many these
    are; (0, 0) if they are fewer than `shortest`. What exceeds `longest` tokens is not compared."""
    longest = min(longest, len(token_ids) - 1)
    if longest < max(shortest, 1):
        return 0, 0
    library = native_library()
    if library is None:
        end, length = _find_match(token_ids, longest)
    else:
        length = library.cdll.qk_find_match(token_ids.ctypes.data, len(token_ids), longest, byref(place := c_int64()))
        end = place.value
    return (end, length) if length >= max(shortest, 1) else (0, 0)


def _find_match(token_ids: npt.NDArray[np.int32], longest: int) -> tuple[int, int]:
    """Does in numpy what `qk_find_match` does: keeps the places where one token more agrees, until there are none."""
    last = len(token_ids) - 1
    ends, length = np.arange(1, last + 1), 0
    while length < longest:
        longer = ends[(ends > length) & (token_ids[ends - length - 1] == token_ids[last - length])]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return int(ends[-1]), length

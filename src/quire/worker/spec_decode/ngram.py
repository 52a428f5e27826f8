"""Drafts from the request's own text: what followed its last tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.worker.spec_decode.drafter import NO_PROPOSAL, Drafter, DrafterContext, DraftRow, Proposal
from quire.worker.spec_decode.prediction import draft_of_prediction

LONGEST_MATCH = 15
"""Matches are compared up to this length, or `prompt_lookup_max`: it is the highest confidence."""
FEW = 64
"""Candidates that are compared all at once."""
DENSE = 16
"""With more than one candidate in so many tokens all tokens are compared, instead of those before candidates."""


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
    n = len(token_ids)
    longest = min(longest, n - 1)
    if longest < max(shortest, 1):
        return 0, 0
    is_match = token_ids[:-1] == token_ids[-1]  # [i]: the `length` tokens before position length + i are the last ones
    length, count = 1, int(np.count_nonzero(is_match))
    while count > max(FEW, n // DENSE) and length < longest:
        longer = is_match[1:] & (token_ids[: n - length - 1] == token_ids[n - length - 1])
        num_longer = int(np.count_nonzero(longer))
        if not num_longer:
            break
        length, is_match, count = length + 1, longer, num_longer
    if not count or count > max(FEW, n // DENSE) or length == longest:
        return (n - 1 - int(is_match[::-1].argmax()), length) if count and length >= shortest else (0, 0)
    ends = np.flatnonzero(is_match) + length
    while length < longest and (length < shortest or len(ends) > FEW):
        longer_ends = ends[(token_ids[ends - length - 1] == token_ids[n - length - 1]) & (ends > length)]
        if not len(longer_ends):
            return (int(ends[-1]), length) if length >= shortest else (0, 0)
        length, ends = length + 1, longer_ends
    return _longest_match(token_ids, ends, length, longest)


def _longest_match(
    token_ids: npt.NDArray[np.int32], ends: npt.NDArray[np.int64], length: int, longest: int
) -> tuple[int, int]:
    """Returns the best of `ends`, the latest of equals, and how many tokens before it agree; `length` are known to."""
    back = np.arange(length + 1, longest + 1)
    positions = ends[:, None] - back
    is_equal = np.zeros((len(ends), len(back) + 1), np.bool_)
    np.logical_and(token_ids[positions] == token_ids[len(token_ids) - back], positions >= 0, out=is_equal[:, :-1])
    more = is_equal.argmin(axis=1)  # tokens until the first difference
    best = len(ends) - 1 - int(more[::-1].argmax())
    return int(ends[best]), length + int(more[best])

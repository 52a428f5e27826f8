"""Drafts from a request's prediction: the tokens that its user expects in the output."""

from __future__ import annotations

import numpy as np

from quire.worker.spec_decode.drafter import DraftRow, Proposal

SHORTEST_MATCH, LONGEST_MATCH = 2, 15
"""Output tokens that are to agree; the beginning of the output counts as one that agrees with the prediction's."""
FEW_OUTPUTS = 4
"""With so few outputs the prediction's start is drafted if nothing agrees: the model may begin in other words."""


def draft_of_prediction(row: DraftRow) -> Proposal | None:
    """Returns the tokens of the prediction after the longest match of the last outputs; None if there are none.

    Of matches of equal length the one nearest to the place in the output is taken.
    """
    prediction = row.prediction
    if prediction is None or not len(prediction):
        return None
    outputs = row.token_ids[row.num_prompt_tokens :]
    n = len(outputs)
    ends = np.arange(len(prediction) + 1)
    match_len = 0
    for back in range(1, min(n, LONGEST_MATCH) + 1):
        inside = ends[ends >= back]
        longer = inside[prediction[inside - back] == outputs[n - back]]
        if not len(longer):
            break
        ends, match_len = longer, back
    if match_len == n <= LONGEST_MATCH and n in ends:  # all outputs so far are its beginning
        ends, match_len = np.array([n]), n + 1
    if match_len < SHORTEST_MATCH:
        if n > FEW_OUTPUTS:
            return None
        ends, match_len = np.array([0]), 0
    end = int(ends[np.abs(ends - n).argmin()])
    drafts = prediction[end : end + row.max_drafts].tolist()
    confidences = [min(match_len + i, LONGEST_MATCH) if match_len else 0 for i in range(len(drafts))]
    return Proposal(drafts, confidences, from_prediction=True) if drafts else None

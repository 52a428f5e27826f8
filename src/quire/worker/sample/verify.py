"""Verification of drafts: the token of every position is drawn as without drafts, and a draft is kept if it equals it.

The rows of logits of a request are its *run*: the row after its last certain token, then a row after each draft. Row j
of a run counts only if the drafts before it were right. Its bits, and with them its token, are then those of a step
without drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.wire.execution import LogprobsLists
from quire.worker.sample.kernel import Ids, SamplingKernel
from quire.worker.sample.metadata import SamplingMetadata
from quire.worker.sample.sampler import edit_logits, score_tokens

NO_DRAFT = -1
"""Stands in `Runs.drafts` where no draft follows: equal to no token."""


class Runs(NamedTuple):
    """The runs of the requests that sample in a step. Arrays of one element per request, [m], but for `drafts`."""

    firsts: Ids
    """First row of each run."""
    lens: Ids
    """Rows of each run: 1 + its drafts."""
    drafts: Ids
    """[num_rows] the draft at the position that each row predicts; NO_DRAFT in the last row of a run."""


class VerifiedRuns(NamedTuple):
    """The tokens that a step yields."""

    token_ids: list[list[int]]
    """At least one for each request."""
    logprobs: dict[int, LogprobsLists]
    """A row per token, by request: those that asked for them."""


def accept(token_ids: Ids, runs: Runs) -> Ids:
    """Returns [m] the number of tokens of each run that count: those up to the first that differs from the draft."""
    differs = np.flatnonzero(token_ids != runs.drafts)  # ascending; the last row of each run is among them
    first_different: Ids = differs[np.searchsorted(differs, runs.firsts)]
    return first_different - runs.firsts + 1


def verify(
    logits: Tensor, metadata: SamplingMetadata, output_lens: Ids, runs: Runs, kernel: SamplingKernel
) -> VerifiedRuns:
    """Samples the tokens of runs. logits: [num_rows, vocab] float32, edited in place; output_lens: [m] tokens each
    request has so far.

    Requests whose logits are edited go on position by position, because an edit may depend on the token before.
    Histories get all tokens of a run but the last one.
    """
    firsts, lens, _ = runs
    owners = np.repeat(np.arange(len(lens)), lens)  # [num_rows]
    indices = output_lens[owners] + np.arange(len(owners)) - firsts[owners]  # [num_rows] output index of each row
    wanted = {w.row: w for w in metadata.logprobs}
    scored = np.flatnonzero(np.isin(owners, list(wanted)))
    raw, raw_rows = logits, scored
    if metadata.edits_logits:
        if wanted:  # before anything changes them
            raw, raw_rows = logits[scored], np.arange(len(scored))
        edit_logits(logits, metadata.move_edits(firsts), indices)
    rules = None if metadata.rules is None else metadata.rules.take(owners)
    token_ids = kernel.choose(logits, rules, indices)
    if metadata.edits_logits:
        _go_on(logits, metadata, indices, runs, token_ids, kernel)
    lens = accept(token_ids, runs)
    logprobs: dict[int, LogprobsLists] = {}
    if wanted:
        kept = scored < (firsts + lens)[owners[scored]]
        rows = [wanted[request] for request in owners[scored[kept]].tolist()]
        logprobs = score_tokens(raw, raw_rows[kept], token_ids[scored[kept]], rows, kernel)
    ids = token_ids.tolist()
    spans = zip(firsts.tolist(), lens.tolist(), strict=True)
    return VerifiedRuns([ids[first : first + n] for first, n in spans], logprobs)


def _go_on(
    logits: Tensor, metadata: SamplingMetadata, indices: Ids, runs: Runs, token_ids: Ids, kernel: SamplingKernel
) -> None:
    """Samples again, into `token_ids`, the rows after the first of the runs whose logits are edited: row after row, as
    long as drafts are right."""
    alive = metadata.edited
    rows = runs.firsts[alive]
    while True:
        right = token_ids[rows] == runs.drafts[rows]
        alive, rows = alive[right], rows[right] + 1
        if not len(alive):
            return
        for request, token_id in zip(alive.tolist(), token_ids[rows - 1].tolist(), strict=True):
            if request in metadata.histories:
                metadata.histories[request].append(token_id)
        places = np.full_like(runs.firsts, -1)
        places[alive] = rows
        edit_logits(logits, metadata.move_edits(places), indices)
        rules = None if metadata.rules is None else metadata.rules.take(alive)
        token_ids[rows] = kernel.choose(logits[rows], rules, indices[rows])

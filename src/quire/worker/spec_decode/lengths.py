"""Chooses how many drafts pay: those that give the most tokens per second, by measured times and acceptance.

Nothing here changes a token, so decisions may follow the clock. A draft is worth the chance that it and all before it
are right; its price is a row of the next step. Where drafts do not pay there are none, but for a few probes.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.worker.spec_decode.costs import Costs, RunningMedian
from quire.worker.spec_decode.drafter import DraftRow, Lengths, Proposal

HALF_LIFE = 256
"""Trials after which one counts half."""
FADE = 0.5 ** (1 / HALF_LIFE)
MARGIN = 0.03
"""Drafts must beat no drafts by this share."""
PROBE_SHARE, PROBE_LEN = 0.01, 2
"""Share of the time of steps that may go into probes, and drafts of a probe."""
MOST_SAVED = 4
"""Steps whose time is saved for probes at most."""
NUM_CONFIDENCES = 16


class AcceptanceRate:
    """Share of drafts that were right, fading; begins as one of two."""

    def __init__(self) -> None:
        self._accepted = self._trials = 0.0

    def observe(self, is_accepted: bool) -> None:
        """Adds a trial."""
        self._accepted = self._accepted * FADE + is_accepted
        self._trials = self._trials * FADE + 1

    @property
    def value(self) -> float:
        """The expected share."""
        return self.beginning_as(0.5)

    def beginning_as(self, share: float) -> float:
        """Returns the expected share, if `share` was expected before the first trials."""
        return (self._accepted + 2 * share) / (self._trials + 2)


class AdaptiveLengths(Lengths):
    """Maximizes the tokens per second of the next step.

    With `by_depth` drafting takes longer the more drafts there are, as with models: then `limit` chooses a depth for
    all rows before anything is drafted.
    """

    def __init__(self, by_depth: bool = False) -> None:
        self.costs = Costs()
        self._by_depth = by_depth
        self._by_confidence = [AcceptanceRate() for _ in range(NUM_CONFIDENCES)]
        self._by_position: list[AcceptanceRate] = []
        self._drafting = RunningMedian()
        """Seconds of a call; with `by_depth`, of a draft step."""
        self._num_reqs = 0
        """Requests that the next step decodes."""
        self._depth = 1
        self._budget = 0.0
        """Seconds that probes may take."""
        self._turn = 0

    # -- what was measured --------------------------------------------------------------------------------------------

    def observe_step(self, num_rows: int, seconds: float) -> None:
        self.costs.observe(num_rows, seconds)
        most = max(MOST_SAVED * seconds, 2 * PROBE_LEN * self._drafting.value if self._by_depth else 0.0)
        self._budget = min(self._budget + PROBE_SHARE * seconds, max(most, self._budget))

    def observe_drafting(self, num_rows: int, seconds: float, is_steady: bool = True) -> None:
        seconds /= self._depth
        # one that read prompts says at most that others take no longer
        if num_rows and (is_steady or not self._by_depth or seconds < self._drafting.value):
            self._drafting.observe(seconds)

    def observe_drafts(self, confidences: Sequence[int], num_accepted: int) -> None:
        for position, confidence in enumerate(confidences[: num_accepted + 1]):
            self._by_confidence[confidence].observe(position < num_accepted)
            if position == len(self._by_position):
                self._by_position.append(AcceptanceRate())
            self._by_position[position].observe(position < num_accepted)

    # -- what follows from it -----------------------------------------------------------------------------------------

    def limit(self, rows: Sequence[DraftRow]) -> Sequence[DraftRow]:
        self._num_reqs, self._depth = len(rows), 1
        if not rows or not self._by_depth:
            return rows
        chances, chance, rate = [], 1.0, 0.5
        for position in range(max(row.max_drafts for row in rows)):
            if position < len(self._by_position):
                rate = self._by_position[position].beginning_as(rate)
            chance *= rate
            chances.append(chance)
        self._depth = self._choose_depth(rows, chances)
        if self._depth:
            return [row._replace(max_drafts=min(row.max_drafts, self._depth)) for row in rows]
        self._depth = PROBE_LEN
        if not self._can_probe(0, PROBE_LEN * self._drafting.value):
            return []
        self._turn += 1
        row = rows[self._turn % len(rows)]
        return [row._replace(max_drafts=min(row.max_drafts, PROBE_LEN))]

    def cut(self, rows: Sequence[DraftRow], proposals: Sequence[Proposal]) -> list[int]:
        if not self.costs.is_known:
            return [len(proposal.token_ids) for proposal in proposals]
        worths = [
            (-chance, position, i)
            for i, proposal in enumerate(proposals)
            for position, chance in enumerate(self._chances(proposal))
        ]
        worths.sort()
        drafting = self._drafting.value * self._depth
        kept = self._best_prefix([-worth for worth, _, _ in worths], drafting)
        counts = [0] * len(proposals)
        for _, _, i in worths[:kept]:
            counts[i] += 1
        self._probe(proposals, counts, drafting if self._by_depth and not kept else 0.0)
        return counts

    def _chances(self, proposal: Proposal) -> list[float]:
        """Returns the chance of each draft that it and all before it are right."""
        chances, chance = [], 1.0
        for confidence in proposal.confidences:
            chance *= self._by_confidence[confidence].value
            chances.append(chance)
        return chances

    def _best_prefix(self, chances: Sequence[float], drafting: float) -> int:
        """Returns how many of the drafts pay, from the best on. The time of drafting is spent in any case."""
        reqs, tokens = self._num_reqs, float(self._num_reqs)
        best, best_rate = 0, (1 + MARGIN) * tokens / (self.costs.seconds(reqs) + drafting)
        for n, chance in enumerate(chances, 1):
            tokens += chance
            rate = tokens / (self.costs.seconds(reqs + n) + drafting)
            if rate > best_rate:
                best, best_rate = n, rate
        return best

    def _choose_depth(self, rows: Sequence[DraftRow], chances: Sequence[float]) -> int:
        """Returns how many draft steps pay for all rows."""
        if not self.costs.is_known:
            return len(chances)
        reqs, tokens = len(rows), float(len(rows))
        best, best_rate, num_drafts = 0, (1 + MARGIN) * tokens / self.costs.seconds(reqs), 0
        for depth, chance in enumerate(chances, 1):
            deep = sum(row.max_drafts >= depth for row in rows)
            tokens, num_drafts = tokens + deep * chance, num_drafts + deep
            rate = tokens / (self.costs.seconds(reqs + num_drafts) + depth * self._drafting.value)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def _probe(self, proposals: Sequence[Proposal], counts: list[int], drafting: float) -> None:
        """Gives a few drafts to one of the rows that got none, in turn, if there is time for it."""
        idle = [i for i, count in enumerate(counts) if not count and proposals[i].token_ids]
        if not idle or not self._can_probe(sum(counts), drafting):
            return
        self._turn += len(idle) > 1
        chosen = idle[self._turn % len(idle)]
        counts[chosen] = min(PROBE_LEN, len(proposals[chosen].token_ids))
        self._budget -= self._probe_seconds(sum(counts) - counts[chosen], drafting)

    def _can_probe(self, num_drafts: int, drafting: float) -> bool:
        return self.costs.is_known and self._budget >= self._probe_seconds(num_drafts, drafting)

    def _probe_seconds(self, num_drafts: int, drafting: float) -> float:
        """Returns what a probe costs beside `num_drafts` drafts: at least what measurements cannot tell apart."""
        rows = self._num_reqs + num_drafts
        plain = self.costs.seconds(rows)
        return max(self.costs.seconds(rows + PROBE_LEN) - plain, MARGIN * plain) + drafting

"""The drafts of single requests: what the engine core reports of them, counted and shown."""

from __future__ import annotations

from quire.outputs import CompletionOutput, RequestSpecDecodeMetrics
from quire.wire.stats import SpecDecodeMetrics


class DraftCounts:
    """Counts the drafts of one request, which the engine core reports with the outputs of the steps that verified them.

    Figures of single requests are shown with the level "summary" or "detailed", tokens of a prediction always.
    """

    __slots__ = (
        "_level",
        "_per_step",
        "histogram",
        "num_accepted_of_prediction",
        "num_draft_tokens",
        "num_of_prediction",
    )

    def __init__(self, num_spec_tokens: int, level: str = "none") -> None:
        """`num_spec_tokens` is the most drafts in a step."""
        self._level = level
        self.histogram = [0] * (num_spec_tokens + 1)
        """Number of steps by accepted drafts."""
        self.num_draft_tokens = 0
        self.num_of_prediction = self.num_accepted_of_prediction = 0
        """Tokens drafted from the prediction, and those among them that are in the output."""
        self._per_step: list[tuple[int, int]] = []
        """(Accepted, verified) drafts of each step, if they are shown."""

    def new(self) -> DraftCounts:
        """Returns counts of the same kind that are 0."""
        return DraftCounts(len(self.histogram) - 1, self._level)

    def add(self, step: SpecDecodeMetrics, num_tokens: int) -> None:
        """Counts a step, of whose tokens the first `num_tokens` are in the output: a stop string drops the others."""
        num_drafts, num_accepted = step.num_draft_tokens, step.num_accepted_tokens
        self.histogram[num_accepted] += 1
        self.num_draft_tokens += num_drafts
        if step.from_prediction:
            self.num_of_prediction += num_drafts
            self.num_accepted_of_prediction += min(num_accepted, num_tokens)
        if self._level == "detailed":
            self._per_step.append((num_accepted, num_drafts))

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that the core has kept."""
        return sum(length * number for length, number in enumerate(self.histogram))

    def show_in(self, completion: CompletionOutput) -> None:
        """Writes the counts into the last output of the request."""
        completion.num_accepted_prediction_tokens = self.num_accepted_of_prediction
        completion.num_rejected_prediction_tokens = self.num_of_prediction - self.num_accepted_of_prediction
        if self._level == "none":
            return
        num_steps, num_accepted = sum(self.histogram), self.num_accepted_tokens
        completion.spec_decode_metrics = metrics = RequestSpecDecodeMetrics(
            mean_acceptance_length=1 + num_accepted / max(num_steps, 1),
            draft_acceptance_rate=num_accepted / max(self.num_draft_tokens, 1),
            acceptance_histogram=self.histogram,
            num_spec_steps=num_steps,
            num_accepted_draft_tokens=num_accepted,
            num_draft_tokens=self.num_draft_tokens,
            num_spec_tokens=len(self.histogram) - 1,
        )
        if self._level == "detailed":
            metrics.per_step_accepted = [accepted for accepted, _ in self._per_step]
            metrics.per_step_drafted = [drafted for _, drafted in self._per_step]

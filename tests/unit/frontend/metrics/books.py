"""The books of one API process, kept by hand: what an engine's requests would have it count."""

from __future__ import annotations

from quire.frontend.metrics.collect.events import FinishedRequestStats, FirstToken, IterationStats, RequestOwner
from quire.frontend.metrics.collect.facts import AdapterLoad, FrontendFacts
from quire.frontend.metrics.collect.ledger import Receipt, RequestLedger
from quire.frontend.metrics.publish.prometheus import MetricsSetup, PrometheusStatLogger
from quire.frontend.metrics.publish.snapshot import Family, MetricsSnapshot, ProcessReport, Series
from quire.wire.engine_core import FinishReason
from quire.wire.stats import PrefillStats, SchedulerStats


class Books:
    """Every operation does what the frontend does with ledger and statistics, so that the laws hold after each."""

    def __init__(self, name: str = "1") -> None:
        self.name = name
        self.now = 1000.0
        self.adapters = AdapterLoad()
        self.ledger = RequestLedger()
        self.metrics = PrometheusStatLogger(MetricsSetup(model_name="m"), self.get_facts, lambda: self.now)
        self._undecided: list[Receipt] = []
        self._tokens: list[int] = []
        """Number of tokens of each live request."""

    def receive(self) -> None:
        self._undecided.append(self.ledger.receive())

    def accept(self) -> None:
        if self._undecided:
            self._undecided.pop().accept_one()
            self._tokens.append(0)

    def reject(self) -> None:
        if self._undecided:
            self._undecided.pop().reject(ValueError())

    def yield_token(self) -> None:
        """The oldest live request gets one; its first one comes with its prompt of 4 tokens, of which 1 was cached."""
        if not self._tokens:
            return
        stats = IterationStats(self.now, num_generation_tokens=1)
        if self._tokens[0]:
            stats.add_waits(0.25, 1)
        else:
            stats.first_tokens.append(FirstToken(0.5))
            stats.prompt_tokens = PrefillStats(4, 3, 1)
        self._tokens[0] += 1
        self.ledger.num_delivered_tokens += 1
        self.metrics.record(None, stats)

    def finish(self) -> None:
        """The oldest live request ends."""
        if not self._tokens:
            return
        num_tokens = self._tokens.pop(0)
        finished = FinishedRequestStats(
            request_id="a",
            finish_reason=FinishReason.STOP,
            e2e_latency=2.0,
            num_prompt_tokens=4,
            num_generation_tokens=num_tokens,
            max_tokens_param=None,
            queued_time=0.25,
            prefill_time=0.25 if num_tokens else None,
            decode_time=0.25 if num_tokens else None,
            inference_time=0.5,
            mean_time_per_output_token=0.0,
            num_cached_tokens=1,
            num_preemptions=0,
            is_corrupted=False,
            owner=RequestOwner("a"),
        )
        self.ledger.finish(FinishReason.STOP)
        self.metrics.record(None, IterationStats(self.now, finished_requests=[finished]))

    def note_step(self, num_running: int) -> None:
        """The core sends its statistics."""
        self.metrics.record(SchedulerStats(num_running_reqs=num_running, num_used_blocks=4, num_free_blocks=6), None)

    def get_facts(self) -> FrontendFacts:
        waiting = self._tokens.count(0)
        return FrontendFacts(
            time=self.now,
            ledger=self.ledger.plus(RequestLedger()),
            num_live={"waiting": waiting, "running": len(self._tokens) - waiting},
            num_queued_tokens=4 * waiting,
            adapters=self.adapters,
            oldest_arrival=self.now - 1.0 if self._tokens else None,
        )

    def take(self) -> ProcessReport:
        """Returns what its process would report."""
        memory = Family("memory", "gauge", "", ("process",), series=[Series((self.name,), 5.0)])
        return self.metrics.report(MetricsSnapshot([memory]))


OPERATIONS = (Books.receive, Books.accept, Books.reject, Books.yield_token, Books.finish)

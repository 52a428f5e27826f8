"""What one process of a server tells of itself at one moment, and several processes' words as one.

A report has three parts, each with its own rule of merging:

* `counted`: counters and histograms add up; a gauge there speaks of the engine core, so whoever heard of it last is
  right. The core tells its statistics to one process only (its client 0), so nothing of the core is counted twice.
* `facts`: `merge_facts` has a rule for each. What is computed of them (`catalog`) is computed once, of all of them.
* `process`: memory, time, garbage collections, labelled with the process. They are never added, and end with it.

Merging is commutative and associative but for the rounding of sums of seconds; the laws of the ledger (promise P12) are
equations between sums, so they hold for a merged report whenever they hold for each part of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from quire.frontend.metrics.collect.facts import FrontendFacts, close_facts, merge_facts
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot, merge_snapshots


class ProcessReport(msgspec.Struct, array_like=True, gc=False):
    """Made in one go by the thread that counts."""

    counted: MetricsSnapshot
    """The rows that events are counted in."""
    facts: FrontendFacts
    process: MetricsSnapshot
    """Families with the label `process`; of a merged report, those of every process that lives."""

    def close(self, *, is_lost: bool) -> ProcessReport:
        """What stays of it when its process is gone; `is_lost` if that ended without saying so."""
        return ProcessReport(self.counted, close_facts(self.facts, is_lost=is_lost), MetricsSnapshot([]))

    def note_late(self) -> ProcessReport:
        """The same as the word of a process that does not answer now."""
        return msgspec.structs.replace(self, facts=msgspec.structs.replace(self.facts, num_processes={"late": 1}))


def merge_reports(reports: Sequence[ProcessReport]) -> ProcessReport:
    """Several processes of one server as one; at least one. Raises ValueError where they are of different versions."""
    return ProcessReport(
        merge_snapshots(report.counted for report in reports),
        merge_facts([report.facts for report in reports]),
        merge_snapshots(report.process for report in reports),
    )


class ReportSource(ABC):
    """Who knows the reports of all processes of a server."""

    @abstractmethod
    async def gather(self) -> ProcessReport:
        """All of them as one, of this moment. Raises ServerError if that cannot be had."""

"""Metrics of a server of several processes: the parent gathers the reports of all, for whichever process is scraped.

An API process that is scraped calls `metrics` of its parent. The parent calls `report` of every process, and merges the
answers with its own report and with the counts of processes that have exited. It also does so once a second. The parent
thus has everything that a scrape has shown, and no counter goes back when a process is killed: its counts of at most
the last second are lost, and its live requests become `quire_requests_lost_total`. A process that hangs delays one
scrape by `timeout_s`, and none after that until it answers: its last report is used.

The core sends its statistics to the parent only, so `report` carries the load of the engine to the other processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import msgspec

from quire.config.engine import EngineConfig
from quire.errors import EngineDeadError, ServerError
from quire.frontend.client.base import AsyncEngineCoreClient
from quire.frontend.fleet.peer_link import PeerLink
from quire.frontend.http.errors import UnavailableError
from quire.frontend.metrics.collect.facts import Load
from quire.frontend.metrics.collect.ledger import RequestLedger
from quire.frontend.metrics.frontend_stats import FrontendStats, LiveRequest
from quire.frontend.metrics.publish.snapshot import ProcessReport, merge_reports
from quire.logger import init_logger

logger = init_logger(__name__)


class EngineWatch:
    """Counts the core's statistics for a process that owns a core and serves no requests itself.

    As client 0 of the core it receives statistics and no outputs. `stats` is the source of a `ServerMetrics`. Belongs
    to one event loop.
    """

    def __init__(self, config: EngineConfig, client: AsyncEngineCoreClient, *, log_stats: bool) -> None:
        self._client = client
        self.stats = FrontendStats(
            config,
            client.ready_response,
            _NoRequests(),
            ledger=RequestLedger(),
            log_stats=log_stats,
            engines=client.engine_responses,
        )
        self.stats.attach(client)

    async def run(self) -> EngineDeadError:
        """Counts until the core is gone for good. Returns the reason."""
        while True:
            try:
                outputs = await self._client.get_output_async()
            except EngineDeadError as e:
                return e
            self.stats.close_batch(outputs, None)


class _NoRequests:
    """The live requests of a process that has none."""

    @property
    def request_states(self) -> Mapping[str, LiveRequest]:
        return {}

    @property
    def resting_sessions(self) -> Iterable[str]:
        return ()


REPORT_INTERVAL_S = 1.0
"""Time between two rounds that no scrape has asked for: the most a killed process loses."""
ANSWER_TIMEOUT_S = 0.5
"""Time for which a round waits for the slowest process."""
GATHER_TIMEOUT_S = 2.0 + ANSWER_TIMEOUT_S

encode_report = msgspec.msgpack.Encoder().encode
_decode_report = msgspec.msgpack.Decoder(ProcessReport).decode


class FleetMetrics:
    """Gathers the reports of all processes, and keeps the counts of processes that have exited. Belongs to one event
    loop.

    `take` returns the parent's own report; `gather` raises the ServerError that it raises. `get_load` returns the load
    of the engine.
    """

    def __init__(
        self, take: Callable[[], ProcessReport], get_load: Callable[[], Load], *, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._take = take
        self._get_load = get_load
        self.timeout_s = timeout_s
        """Time for which a round waits for processes that do not answer."""
        self._members: dict[int, _Member] = {}
        self._departed: ProcessReport | None = None
        """Counts of all processes that have exited, merged."""
        self._round: asyncio.Task[ProcessReport] | None = None
        self._next_round: asyncio.Task[ProcessReport] | None = None

    @property
    def num_processes(self) -> int:
        """Number of processes that have joined and not exited."""
        return len(self._members)

    async def run(self) -> None:
        """Gathers once a second, for ever. Errors are reported by scrapes."""
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            with suppress(ServerError):
                await self.gather()

    def join(self, index: int, link: PeerLink) -> None:
        """Adds process `index`, which answers calls from now on."""
        self._members[index] = _Member(index, link)

    def note_report(self, index: int, report: bytes | None, *, is_final: bool) -> None:
        """Stores a report that process `index` has sent unasked: its first, or its last before it exits. None if it has
        stopped counting."""
        member = self._members[index]
        member.has_ended = is_final
        if report is not None:
            member.report = _decode_report(report)

    def note_gone(self, index: int) -> None:
        """Removes process `index`, which has exited, and keeps its counts."""
        member = self._members.pop(index, None)
        if member is None:
            return
        if not member.has_ended:
            logger.warning("API process %d is gone; what it counted up to its last report is kept", index)
        if member.report is not None:
            closed = member.report.close(is_lost=not member.has_ended)
            self._departed = closed if self._departed is None else merge_reports([self._departed, closed])

    async def gather(self) -> ProcessReport:
        """Returns the merged report of all processes. Each part was taken after this call, or is marked as late.

        Calls made while a round runs share the next one, so no process is asked twice at a time. Raises ServerError if
        a process has stopped counting.
        """
        if self._next_round is None:
            self._next_round = asyncio.create_task(self._run_round(self._round))
            self._next_round.add_done_callback(_retrieve_error)
        return await asyncio.shield(self._next_round)

    async def _run_round(self, before: asyncio.Task[ProcessReport] | None) -> ProcessReport:
        if before is not None and not before.done():
            await asyncio.wait({before})
        self._round, self._next_round = self._next_round, None
        load = self._get_load()
        questions = [member.ask(load) for member in self._members.values() if not member.is_asked]
        if questions:
            await asyncio.wait(questions, timeout=self.timeout_s)
        reports = [self._departed, *(member.get_report() for member in self._members.values()), self._take()]
        return merge_reports([report for report in reports if report is not None])


class _Member:
    """One process that has joined."""

    def __init__(self, index: int, link: PeerLink) -> None:
        self.report: ProcessReport | None = None
        """Its last report."""
        self.has_ended = False
        """True after its final report."""
        self._index = index
        self._link = link
        self._question: asyncio.Task[ProcessReport] | None = None
        """The latest question."""

    @property
    def is_asked(self) -> bool:
        """True while the answer to the latest question is outstanding."""
        return self._question is not None and not self._question.done()

    def ask(self, load: Load) -> asyncio.Task[ProcessReport]:
        """Asks for a report. The task ends when the process has answered or exited."""
        self._question = asyncio.create_task(self._ask(load))
        self._question.add_done_callback(_retrieve_error)
        return self._question

    async def _ask(self, load: Load) -> ProcessReport:
        self.report = report = _decode_report(await self._link.call("report", load))
        return report

    def get_report(self) -> ProcessReport | None:
        """Returns the last report, marked as late if the latest question has no answer; None before the first report.

        Raises ServerError if the process has stopped counting.
        """
        question = self._question
        error = question.exception() if question is not None and question.done() else None
        if error is not None and not isinstance(error, UnavailableError):
            raise ServerError(f"API process {self._index}: {error}")
        is_late = self.is_asked or error is not None
        return self.report.note_late() if self.report is not None and is_late else self.report


async def gather_from_parent(link: PeerLink, timeout_s: float = GATHER_TIMEOUT_S) -> ProcessReport:
    """Returns the merged report of all processes, to an API process.

    Raises ServerError if the parent does not answer.
    """
    try:
        return _decode_report(await asyncio.wait_for(link.call("metrics"), timeout_s))
    except UnavailableError:
        raise ServerError("the process that gathers the metrics of this server is gone") from None
    except TimeoutError:
        raise ServerError(
            f"the process that gathers the metrics of this server did not answer in {timeout_s:g} s"
        ) from None


def _retrieve_error(task: asyncio.Task[ProcessReport]) -> None:
    """Marks the error of a task as seen, so that asyncio does not log it if no scrape waits for the task."""
    if not task.cancelled():
        task.exception()

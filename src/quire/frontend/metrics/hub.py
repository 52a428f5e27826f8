"""One `/metrics` for a server of several processes: the hub in the process that starts the others.

::

    # in the parent, which has the client 0 of the core           # in API process 1
    metrics = ServerMetrics(stats, "0")                            metrics = ServerMetrics(engine.pipeline.stats, "1")
    hub = MetricsHub(path, metrics.take,                           client = HubClient(path, "1", metrics.take,
                     get_load=stats.get_load)                                         on_load=stats.note_load)
    await hub.start()      # then start the others                 await client.connect()     # before it serves
    metrics.source = hub   # if it serves /metrics, too            metrics.source = client
    ...                                                            await metrics.write("text")
    await hub.close()      # after the others have ended           await client.close()       # after its last request

`path` is a name in the private `SocketDirectory`; without statistics there is no hub. Both ends belong to the event
loop that counts (`stats`), so every report is made between two turns of it: in one report all laws hold.

The core tells its statistics (`SchedulerStats`) to its client 0 only. A parent that serves no requests has to take them
all the same: `EngineWatch` (frontend/fleet/engine_watch.py) does.

Every process tells the hub how it stands when somebody scrapes any of them, once a second, and at its end. Whatever was
shown to anybody the hub knows and keeps, so no counter goes back when a process is killed: what it counted since its
last report (at most a second) is lost, its live requests become `quire_requests_lost_total`. A process that hangs
delays one scrape by `timeout_s`, and none after that until it has answered: it is shown as it was.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from quire.errors import ServerError
from quire.frontend.metrics.collect.facts import Load
from quire.frontend.metrics.hub_messages import (
    TO_HUB,
    Answer,
    Ask,
    FromHub,
    Hello,
    LoadNotice,
    Question,
    Report,
    encode_message,
    read_message,
)
from quire.frontend.metrics.publish.snapshot import ProcessReport, ReportSource, merge_reports
from quire.logger import init_logger
from quire.wire.serial import WireError

logger = init_logger(__name__)

ANSWER_TIMEOUT_S = 0.5
"""How long a scrape waits for the slowest process."""


class MetricsHub(ReportSource):
    """Gathers the reports of all processes, and keeps what those have counted that are gone.

    `take` is the report of the process it lives in, whose word on the engine core counts; `get_load` says how busy that
    is, which every process is told once a second. What `take` raises (ServerError) the askers are told.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        take: Callable[[], ProcessReport],
        *,
        get_load: Callable[[], Load] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._path = Path(path)
        self._take = take
        self._get_load = get_load
        self.timeout_s = timeout_s
        """How long a round waits for those that do not answer."""
        self._server: asyncio.Server | None = None
        self._processes: set[_Process] = set()
        self._departed: ProcessReport | None = None
        """All that are gone, as one."""
        self._round: asyncio.Task[ProcessReport] | None = None
        self._next_round: asyncio.Task[ProcessReport] | None = None
        self._num_rounds = 0
        self._answers: set[asyncio.Task[None]] = set()

    @property
    def num_processes(self) -> int:
        """Processes that are connected now."""
        return len(self._processes)

    async def start(self) -> None:
        """Listen. Raises OSError where the socket cannot be made."""
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def close(self) -> None:
        """No more reports are taken in. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for process in list(self._processes):
            process.writer.close()
        for task in [*self._answers, self._round, self._next_round]:
            if task is not None:
                task.cancel()
        self._path.unlink(missing_ok=True)

    async def gather(self) -> ProcessReport:
        """All processes as one, each as it stood after this was called (or, late, before).

        Those who ask while others are being answered share the next round: however many ask, no process is asked more
        than one question at a time.
        """
        if self._next_round is None:
            self._next_round = asyncio.create_task(self._run_round(self._round))
            self._next_round.add_done_callback(_note_result)
        return await asyncio.shield(self._next_round)

    async def _run_round(self, before: asyncio.Task[ProcessReport] | None) -> ProcessReport:
        if before is not None and not before.done():
            await asyncio.wait({before})
        self._round, self._next_round = self._next_round, None
        self._num_rounds += 1
        number = self._num_rounds
        waits = [process.ask(number) for process in self._processes if process.asked is None]
        if waits:
            await asyncio.wait(waits, timeout=self.timeout_s)
        reports = [process.report_of_round(number) for process in self._processes]
        reports.append(self._departed)
        return merge_reports([report for report in (*reports, self._take()) if report is not None])

    # -- one connection -------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process = _Process(writer)
        try:
            await self._listen(process, reader)
        except WireError as e:
            logger.error("the metrics of process %s are not taken in any more: %s", process.name, e)
        finally:
            self._processes.discard(process)
            self._note_end(process)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _listen(self, process: _Process, reader: asyncio.StreamReader) -> None:
        while (message := await read_message(reader, TO_HUB)) is not None:
            match message:
                case Hello():
                    process.name = message.process
                    self._processes.add(process)
                case Report():
                    process.note_report(message)
                    if not message.question and not message.is_final and self._get_load is not None:
                        process.send(LoadNotice(self._get_load()))
                case Ask():
                    task = asyncio.create_task(self._answer(process, message.number))
                    self._answers.add(task)
                    task.add_done_callback(self._answers.discard)

    async def _answer(self, process: _Process, number: int) -> None:
        try:
            answer = Answer(number, await self.gather())
        except Exception as e:
            if not isinstance(e, ServerError):
                logger.exception("the metrics of all processes could not be gathered")
            answer = Answer(number, None, str(e))
        process.send(answer)

    def _note_end(self, process: _Process) -> None:
        """Its books are closed: what it counted stays."""
        if not process.has_ended:
            logger.warning("API process %s is gone; what it counted up to its last report is kept", process.name)
        closed = process.close()
        if closed is not None:
            self._departed = closed if self._departed is None else merge_reports([self._departed, closed])


class _Process:
    """The other end of one connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.name = "?"
        self.writer = writer
        self.asked: tuple[int, asyncio.Future[None]] | None = None
        """The question it has not answered yet."""
        self.has_ended = False
        """It has said that nothing will follow."""
        self._report: ProcessReport | None = None
        self._answered = 0
        """The last question it has answered."""
        self._error = ""

    def send(self, message: FromHub) -> None:
        """Without waiting: what may be under way to one process is bounded."""
        if not self.writer.is_closing():
            self.writer.write(encode_message(message))

    def ask(self, number: int) -> asyncio.Future[None]:
        """Ends when it has answered, or is gone."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked = number, future
        self.send(Question(number))
        return future

    def note_report(self, message: Report) -> None:
        """It has told how it stands."""
        self._error = message.error
        self._report = message.report or self._report
        self.has_ended = message.is_final
        if self.asked is not None and message.question == self.asked[0]:
            self._answered = message.question
            self._end_question()

    def _end_question(self) -> None:
        if self.asked is not None:
            future = self.asked[1]
            self.asked = None
            if not future.done():
                future.set_result(None)

    def report_of_round(self, number: int) -> ProcessReport | None:
        """What is known of it now; None if it has told nothing yet. Raises ServerError if it has stopped counting."""
        if self._error:
            raise ServerError(f"API process {self.name}: {self._error}")
        if self._report is None or self._answered == number:
            return self._report
        return self._report.note_late()

    def close(self) -> ProcessReport | None:
        """It is gone: what stays of it."""
        self._end_question()
        return None if self._report is None else self._report.close(is_lost=not self.has_ended)


def _note_result(task: asyncio.Task[ProcessReport]) -> None:
    """An error that nobody waits for any more is no news."""
    if not task.cancelled():
        task.exception()

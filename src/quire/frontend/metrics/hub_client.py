"""An API process' end of the connection to the `MetricsHub`: answers it, reports to it, asks it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

from quire.errors import ServerError
from quire.frontend.metrics.collect.facts import Load
from quire.frontend.metrics.hub import ANSWER_TIMEOUT_S
from quire.frontend.metrics.hub_messages import (
    FROM_HUB,
    Answer,
    Ask,
    Hello,
    LoadNotice,
    Question,
    Report,
    ToHub,
    encode_message,
    read_message,
)
from quire.frontend.metrics.publish.snapshot import ProcessReport, ReportSource
from quire.logger import init_logger
from quire.wire.serial import WireError

logger = init_logger(__name__)

REPORT_INTERVAL_S = 1.0
"""Between two reports that nobody has asked for: what is lost at most of a process that is killed."""
GATHER_TIMEOUT_S = 2.0 + ANSWER_TIMEOUT_S
CONNECT_TIMEOUT_S = 60.0
"""For a hub whose process is starting, too."""
_CONNECT_INTERVAL_S = 0.05


class HubClient(ReportSource):
    """Belongs to the event loop that counts. `take` is called on it, and may raise ServerError if nothing is counted
    any more; `on_load` is told once a second how busy the engine is."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        process: str,
        take: Callable[[], ProcessReport],
        *,
        on_load: Callable[[Load], None] | None = None,
        report_interval_s: float = REPORT_INTERVAL_S,
        gather_timeout_s: float = GATHER_TIMEOUT_S,
    ) -> None:
        self._path = path
        self._process = process
        self._take = take
        self._on_load = on_load
        self._report_interval_s = report_interval_s
        self._gather_timeout_s = gather_timeout_s
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._num_asked = 0
        self._asked: dict[int, asyncio.Future[ProcessReport]] = {}

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Waits for the hub. Raises OSError if none listens there in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_CONNECT_INTERVAL_S)
        self._send(Hello(self._process))
        self._report(0)
        self._tasks = [asyncio.create_task(self._listen(reader)), asyncio.create_task(self._report_regularly())]

    async def gather(self) -> ProcessReport:
        """All processes of the server as one. Raises ServerError if the hub does not answer."""
        if self._writer is None or self._writer.is_closing():
            raise ServerError("the process that gathers the metrics of this server is gone")
        self._num_asked += 1
        number = self._num_asked
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number))
        try:
            return await asyncio.wait_for(future, self._gather_timeout_s)
        except TimeoutError:
            raise ServerError(
                f"the process that gathers the metrics of this server did not answer in {self._gather_timeout_s:g} s"
            ) from None
        finally:
            del self._asked[number]

    async def close(self) -> None:
        """Report for the last time, and leave. Idempotent."""
        if self._writer is None:
            return
        self._tasks[1].cancel()
        self._report(0, is_final=True)
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        self._tasks[0].cancel()
        self._writer = None

    def _send(self, message: ToHub) -> None:
        """Without waiting. A hub that does not read is not sent more than it has room for (`_report_regularly`)."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_message(message))

    def _report(self, question: int, *, is_final: bool = False) -> None:
        try:
            self._send(Report(question, self._take(), is_final=is_final))
        except Exception as e:
            if not isinstance(e, ServerError):
                logger.exception("the metrics of this process could not be reported")
            self._send(Report(question, None, str(e) or type(e).__name__, is_final))

    async def _report_regularly(self) -> None:
        while self._writer is not None and not self._writer.is_closing():
            await asyncio.sleep(self._report_interval_s)
            self._report(0)
            with suppress(ConnectionError):
                await self._writer.drain()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while (message := await read_message(reader, FROM_HUB)) is not None:
                match message:
                    case Question():
                        self._report(message.number)
                    case Answer():
                        self._take_answer(message)
                    case LoadNotice():
                        if self._on_load is not None:
                            self._on_load(message.load)
        except WireError:
            logger.exception("the metrics hub sent what it should not")
        if self._writer is not None:
            self._writer.close()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ServerError("the process that gathers the metrics of this server is gone"))

    def _take_answer(self, answer: Answer) -> None:
        future = self._asked.get(answer.number)
        if future is None or future.done():
            return
        if answer.report is None:
            future.set_exception(ServerError(answer.error))
        else:
            future.set_result(answer.report)

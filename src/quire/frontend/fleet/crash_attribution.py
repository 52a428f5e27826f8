"""Crash attribution after the death of a core that several API processes share: their suspects are tried alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.frontend.client.shared_links import DeathReport, OwnerLink, Suspect
from quire.logger import init_logger
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.serial import Frame, MsgpackDecoder, MsgpackEncoder, WireError

logger = init_logger(__name__)

MAX_SUSPECT_BYTES = 1 << 28
"""Limit of the suspects of one process, encoded; further ones are not tried. A message may have twice as many."""

EncodedSuspect = tuple[list[bytes], int, int]


class CrashAttribution:
    """Collects the suspects of all API processes after each death of the core, and has them tried.

    Belongs to one event loop. `ask_all` calls all API processes and returns, by number, the answers that come in time;
    `post` calls a function on the thread of `owner`.
    """

    def __init__(
        self,
        owner: OwnerLink,
        post: Callable[[Callable[[], None]], object],
        ask_all: Callable[..., Awaitable[Mapping[int, Any]]],
        *,
        engine: int = 0,
        on_gone: Callable[[str, int], object] = lambda reason, engine: None,
    ) -> None:
        """`on_gone` is called with the reason why there will be no core of this engine any more."""
        self._engine = engine
        self._on_gone = on_gone
        self._owner = owner
        self._post = post
        self._ask_all = ask_all
        self._reports: asyncio.Queue[DeathReport] = asyncio.Queue()

    async def run(self) -> None:
        """Handles deaths until it is cancelled."""
        loop = asyncio.get_running_loop()

        def note(report: DeathReport) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the processes with it
                loop.call_soon_threadsafe(self._reports.put_nowait, report)

        def note_end(reason: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_gone, reason, self._engine)

        self._owner.on_end = note_end
        self._owner.on_report = note
        try:
            while True:
                await self._attribute(await self._reports.get())
        finally:
            self._owner.on_report = self._owner.on_end = None

    async def _attribute(self, report: DeathReport) -> None:
        suspects: list[Suspect] = []
        try:
            suspects = await self._collect(report)
        except Exception:
            logger.exception("no request is tried after the death of engine core %d", report.incarnation)
        finally:
            self._post(lambda: self._owner.try_suspects(suspects))

    async def _collect(self, report: DeathReport) -> list[Suspect]:
        if report.verdict is not None:  # carried out before the request can be sent again
            await self._ask_all("convict", self._engine, *report.verdict)
        cause, *facts, _ = report.death  # the end of its worker is counted here
        answers = await self._ask_all("core_died", self._engine, report.incarnation, cause, *facts)
        if not any(answers.values()):
            return []
        return await asyncio.to_thread(_decode, answers)


def encode_suspects(suspects: Iterable[Suspect]) -> list[EncodedSuspect]:
    """Returns the suspects of a process in the form of its answer."""
    encoder = MsgpackEncoder()
    encoded: list[EncodedSuspect] = []
    num_bytes = 0
    for suspect in suspects:
        frames = [bytes(frame) for frame in encoder.encode(suspect.request)]
        num_bytes += sum(map(len, frames))
        if num_bytes > MAX_SUSPECT_BYTES:
            logger.warning("more requests are suspected than can be tried: %d are", len(encoded))
            break
        encoded.append((frames, suspect.num_deaths, suspect.num_acquittals))
    return encoded


def decode_suspects(encoded: Iterable[Sequence[Any]]) -> list[Suspect]:
    """Returns the suspects of an answer. Raises WireError."""
    decoder = MsgpackDecoder(EngineCoreRequest)

    def decode(frames: list[Frame], num_deaths: int, num_acquittals: int) -> Suspect:
        return Suspect(decoder.decode(frames), num_deaths, num_acquittals)

    return [decode(*suspect) for suspect in encoded]


def _decode(answers: Mapping[int, Any]) -> list[Suspect]:
    suspects = []
    for index, encoded in answers.items():
        try:
            suspects += decode_suspects(encoded)
        except (WireError, TypeError, ValueError) as e:
            logger.error("the suspects of API process %d go on untried: %s", index, e)
    return suspects

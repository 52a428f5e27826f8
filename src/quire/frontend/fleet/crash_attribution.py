"""What follows the death of a core that several API processes share: their suspects are heard and tried."""

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
"""Of the suspects of one process, encoded; further ones go on untried. A message may have twice as many."""

EncodedSuspect = tuple[list[bytes], int, int]


class CrashAttribution:
    """Belongs to one event loop. `ask_all` calls all API processes: what those say, by number, who answer in time;
    `post` has the thread of `owner` call something."""

    def __init__(
        self,
        owner: OwnerLink,
        post: Callable[[Callable[[], None]], object],
        ask_all: Callable[..., Awaitable[Mapping[int, Any]]],
    ) -> None:
        self._owner = owner
        self._post = post
        self._ask_all = ask_all
        self._reports: asyncio.Queue[DeathReport] = asyncio.Queue()

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()

        def note(report: DeathReport) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: so have those we would ask
                loop.call_soon_threadsafe(self._reports.put_nowait, report)

        self._owner.on_report = note
        try:
            while True:
                await self._hold(await self._reports.get())
        finally:
            self._owner.on_report = None

    async def _hold(self, report: DeathReport) -> None:
        suspects: list[Suspect] = []
        try:
            suspects = await self._hear(report)
        except Exception:
            logger.exception("nobody is tried after the death of engine core %d", report.incarnation)
        finally:
            self._post(lambda: self._owner.try_suspects(suspects))

    async def _hear(self, report: DeathReport) -> list[Suspect]:
        if report.verdict is not None:  # it must be carried out before its request can be sent again
            await self._ask_all("convict", *report.verdict)
        answers = await self._ask_all("core_died", report.incarnation, *report.death)
        if not any(answers.values()):
            return []
        return await asyncio.to_thread(_decode, answers)


def encode_suspects(suspects: Iterable[Suspect]) -> list[EncodedSuspect]:
    """What a process answers when it is told that the core has died."""
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
    """Back again. Raises WireError."""
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

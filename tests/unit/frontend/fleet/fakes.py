"""API processes without a process: their parent's view of them, and the calls they receive."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from quire.frontend.fleet.peer_link import PeerLink
from quire.wire.peers import ApiLaunch, PeerMessage


class FakeProcess:
    """Stands in for `ApiProcess`. Its other end is spoken with by `join`, or by hand. Signals end it, as one that is
    starting, until it has joined."""

    made: list[FakeProcess]
    """All of a test, in order."""

    def __init__(self, launch: ApiLaunch) -> None:
        self.index = launch.index
        self.connection, self.theirs = socket.socketpair()
        self.signals: list[int] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        """Calls that it has received."""
        self.answers: dict[str, Any] = {}
        """Its answer to each call: a result, an error to raise, or an event to wait for."""
        self.link: PeerLink | None = None
        self._code: int | None = None
        self._has_ended = asyncio.Event()
        self.made.append(self)

    # -- as its parent sees it ----------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if self.link is None or number == 9:
            self.end(-number)

    def kill(self) -> int:
        self.signal(9)
        return -9

    async def wait_end(self, timeout_s: float) -> int:
        await self._has_ended.wait()
        assert self._code is not None
        return self._code

    # -- the process --------------------------------------------------------------------------------------------------

    async def join(self) -> PeerLink:
        """Joins: it receives calls from now on."""
        self.link = link = PeerLink(self._handle)
        await link.connect(self.theirs)
        self._reading = asyncio.create_task(link.run())
        await link.call("join")
        return link

    async def serve(self) -> PeerLink:
        link = await self.join()
        await link.call("ready")
        return link

    def end(self, code: int) -> None:
        """Exits."""
        if self._code is None:
            self._code = code
            self._has_ended.set()
            if self.link is None:
                self.theirs.close()
            else:
                self.link.close()

    async def _handle(self, call: PeerMessage) -> Any:
        self.calls.append((call.method, call.args))
        answer = self.answers.get(call.method)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return None
        return answer

"""Calls that an API process answers for the other processes of its server and for the parent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire.errors import NotFoundError
from quire.frontend.client.link import Verdict
from quire.frontend.client.mp import AsyncMPClient
from quire.frontend.client.shared_links import MemberLink
from quire.frontend.fleet.crash_attribution import EncodedSuspect, encode_suspects
from quire.frontend.fleet.metrics import encode_report
from quire.frontend.http.server import StopRequests
from quire.frontend.http.state import ServerState
from quire.frontend.metrics.collect.facts import Load
from quire.frontend.openai.responses.store import ServerResponses
from quire.frontend.supervision.quarantine import CoreDeath, DeathCause
from quire.wire.peers import PeerMessage


class PeerServices:
    """The table of calls. Arguments are those that the callers, in this package and in `responses/`, send."""

    def __init__(self, state: ServerState, client: AsyncMPClient, stop: StopRequests) -> None:
        self._state = state
        self._client = client
        self._stop = stop
        responses = state.part(ServerResponses).local
        self._table: dict[str, Callable[..., Awaitable[Any]]] = {
            "abort": self._abort,
            "watch": self._watch,
            "report": self._report_metrics,
            "core_died": self._report_death,
            "convict": self._convict,
            "core_gone": self._note_core_gone,
            "stop": self._end,
            "show_response": responses.show,
            "cancel_response": responses.cancel,
            "delete_response": responses.delete,
            "response_events": responses.events_from,
            "conversation": responses.conversation,
        }

    async def handle(self, call: PeerMessage) -> Any:
        """Carries out a call. Raises NotFoundError for an unknown one."""
        method = self._table.get(call.method)
        if method is None:
            raise NotFoundError(f"an API process has no call {call.method!r}")
        return await method(*call.args)

    async def _abort(self, request_ids: list[str]) -> None:
        await self._state.engine.abort(request_ids)

    async def _watch(self, request_ids: list[str], after: int) -> tuple[Any, Any]:
        return self._state.watch.look_here(request_ids, after)

    async def _report_metrics(self, load: Any) -> bytes:
        self._state.engine.pipeline.stats.note_load(msgspec.convert(load, Load))
        return encode_report(self._state.metrics.take())

    async def _note_core_gone(self, reason: str) -> None:
        self._client.note_gone(reason)

    async def _report_death(
        self, incarnation: int, cause: DeathCause, description: str, request_ids: list[str] | None, was_asked: bool
    ) -> list[EncodedSuspect]:
        death = CoreDeath(cause, description, None if request_ids is None else tuple(request_ids), was_asked)
        link = self._link
        suspects = await asyncio.wrap_future(self._client.ask_link(lambda: link.report_death(incarnation, death)))
        return await asyncio.to_thread(encode_suspects, suspects) if suspects else []

    async def _convict(self, request_id: str, message: str) -> None:
        link, verdict = self._link, Verdict(request_id, message)
        await asyncio.wrap_future(self._client.ask_link(lambda: link.convict(verdict)))

    @property
    def _link(self) -> MemberLink:
        link = self._client.link
        assert isinstance(link, MemberLink)  # made with addresses of a member
        return link

    async def _end(self, is_hurried: bool) -> None:
        (self._stop.hurry if is_hurried else self._stop.ask)()

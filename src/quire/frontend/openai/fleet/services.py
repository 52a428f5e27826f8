"""What an API process does for the others of its server, and for the parent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from quire.errors import NotFoundError
from quire.frontend.client.async_mp import AsyncMPClient
from quire.frontend.openai.state import ServerState
from quire.wire.api_process import PeerMessage


class PeerServices:
    """The table of calls. Arguments are what the callers, in this package and in `responses/`, send."""

    def __init__(self, state: ServerState, client: AsyncMPClient) -> None:
        self._state = state
        self._client = client
        shelf = state.shelf.local
        self._table: dict[str, Callable[..., Awaitable[Any]]] = {
            "abort": self._abort,
            "watch": self._watch,
            "core_gone": self._note_core_gone,
            "show_response": shelf.show,
            "cancel_response": shelf.cancel,
            "delete_response": shelf.delete,
            "response_events": shelf.events_from,
            "conversation": shelf.conversation,
        }

    async def handle(self, call: PeerMessage) -> Any:
        """Carry out a call. Raises NotFoundError for one that is none."""
        method = self._table.get(call.method)
        if method is None:
            raise NotFoundError(f"an API process has no call {call.method!r}")
        return await method(*call.args)

    async def _abort(self, request_ids: list[str]) -> None:
        await self._state.engine.abort(request_ids)

    async def _watch(self, request_ids: list[str], after: int) -> tuple[Any, Any]:
        return self._state.watch.look_here(request_ids, after)

    async def _note_core_gone(self, reason: str) -> None:
        self._client.note_gone(reason)

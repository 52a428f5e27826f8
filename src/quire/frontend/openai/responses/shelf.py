"""Stored responses by their ids, wherever in the server they are kept.

A response stays in the process that made it; where there are several, its id names that one.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from quire.errors import ClientError, ValidationError
from quire.frontend.fleet.peer_link import Membership
from quire.frontend.openai.responses.store import ResponseStore, StoredResponse

EVENTS_WAIT_S = 10.0
"""How long another process waits for the next event before it is asked again."""
_HOME = re.compile(r"resp_([0-9]{1,3})_")


def make_response_id(member: Membership) -> str:
    """An id that nobody guesses, and that tells the process where there are several."""
    home = "" if member.is_alone else f"{member.index}_"
    return f"resp_{home}{uuid.uuid4().hex}"


class ResponseShelf(ABC):
    """What may be done with a stored response of `owner`. Raises NotFoundError for what is not kept, or another's."""

    @abstractmethod
    async def show(self, owner: bytes, response_id: str) -> bytes:
        """It as JSON, as it is now."""

    @abstractmethod
    async def cancel(self, owner: bytes, response_id: str) -> bytes:
        """End one in the background where it is: it as JSON. Raises ValidationError for another one."""

    @abstractmethod
    async def delete(self, owner: bytes, response_id: str) -> None:
        """Forget it; one that is under way is cancelled."""

    @abstractmethod
    async def conversation(self, owner: bytes, response_id: str) -> bytes:
        """What was said up to and with its answer, a JSON list of messages. Raises ValidationError if there is none."""

    @abstractmethod
    async def follow(self, owner: bytes, response_id: str, start: int) -> AsyncGenerator[bytes, None]:
        """Its events from number `start` on, as they come, up to the last one. Raises, before it gives a generator,
        ValidationError for one whose events are not kept."""


class LocalShelf(ResponseShelf):
    """Those of this process."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def show(self, owner: bytes, response_id: str) -> bytes:
        return self._store.get(owner, response_id).as_json()

    async def cancel(self, owner: bytes, response_id: str) -> bytes:
        stored = self._store.get(owner, response_id)
        if not stored.is_background:
            raise ValidationError(
                "only a response with background: true can be cancelled; close the connection of another one"
            )
        await _end(stored)
        return stored.as_json()

    async def delete(self, owner: bytes, response_id: str) -> None:
        await _end(self._store.delete(owner, response_id))

    async def conversation(self, owner: bytes, response_id: str) -> bytes:
        return self._store.get(owner, response_id).get_conversation()

    async def follow(self, owner: bytes, response_id: str, start: int) -> AsyncGenerator[bytes, None]:
        return self._get_streamed(owner, response_id).follow(start)

    async def events_from(self, owner: bytes, response_id: str, start: int, wait_s: float) -> tuple[list[bytes], bool]:
        """For another process: events from number `start` on, as soon as there are some, and whether they are the last;
        after `wait_s` perhaps none. Raises as `follow`."""
        stored = self._get_streamed(owner, response_id)
        await stored.wait_events(start, wait_s)
        return (stored.events or [])[start:], stored.describe is None

    def _get_streamed(self, owner: bytes, response_id: str) -> StoredResponse:
        stored = self._store.get(owner, response_id)
        if stored.events is None:
            raise ValidationError(
                "only the events of a response that was created with background: true and stream: true are kept; "
                "leave stream out",
                param="stream",
            )
        return stored


class FleetShelf(ResponseShelf):
    """Those of all processes."""

    def __init__(self, local: LocalShelf, member: Membership) -> None:
        self.local = local
        self._member = member

    def _home(self, response_id: str) -> int | None:
        """The other process that keeps it; None if it is, or would be, this one."""
        found = _HOME.match(response_id)
        index = 0 if found is None else int(found[1])
        return index if 1 <= index <= self._member.num_processes and index != self._member.index else None

    async def show(self, owner: bytes, response_id: str) -> bytes:
        home = self._home(response_id)
        if home is None:
            return await self.local.show(owner, response_id)
        return bytes(await self._member.peers.call(home, "show_response", owner, response_id))

    async def cancel(self, owner: bytes, response_id: str) -> bytes:
        home = self._home(response_id)
        if home is None:
            return await self.local.cancel(owner, response_id)
        return bytes(await self._member.peers.call(home, "cancel_response", owner, response_id))

    async def delete(self, owner: bytes, response_id: str) -> None:
        home = self._home(response_id)
        if home is None:
            await self.local.delete(owner, response_id)
        else:
            await self._member.peers.call(home, "delete_response", owner, response_id)

    async def conversation(self, owner: bytes, response_id: str) -> bytes:
        home = self._home(response_id)
        if home is None:
            return await self.local.conversation(owner, response_id)
        return bytes(await self._member.peers.call(home, "conversation", owner, response_id))

    async def follow(self, owner: bytes, response_id: str, start: int) -> AsyncGenerator[bytes, None]:
        home = self._home(response_id)
        if home is None:
            return await self.local.follow(owner, response_id, start)

        async def ask(position: int, wait_s: float) -> tuple[list[bytes], bool]:
            events, is_over = await self._member.peers.call(
                home, "response_events", owner, response_id, position, wait_s
            )
            return events, is_over

        async def generate(events: list[bytes], is_over: bool) -> AsyncGenerator[bytes, None]:
            position = start
            while True:
                for event in events:
                    yield event
                position += len(events)
                if is_over:
                    return
                events, is_over = await ask(position, EVENTS_WAIT_S)

        return generate(*await ask(start, 0.0))


async def _end(stored: StoredResponse) -> None:
    """Whatever it still does."""
    if stored.task is not None:
        task = stored.task
        task.cancel()
        await asyncio.wait({task})


def blame(error: ClientError, param: str) -> ClientError:
    """The error with the name of the field that brought the id."""
    error.param = error.param or param
    return error

"""Stored responses: in memory, bounded in number and bytes, each visible only to the key that made it.

Above a limit the store drops the oldest finished response of the owner that has most, so that one owner cannot displace
another's responses. A response that still runs in the background is never dropped. A response stays in the process that
made it; where a server has several, its id names that process.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec

from quire.errors import NotFoundError, OverloadedError, ValidationError
from quire.frontend.http.membership import Membership

OVERHEAD = 1024
"""Bytes that are counted for an entry beside its content."""
EVENTS_WAIT_S = 10.0
"""Time for which another process waits for the next event before it asks again."""
_HOME = re.compile(r"resp_([0-9]{1,3})_")


class StoredResponse:
    """One response. While it runs `describe` returns its state; `body` and `conversation` are set at its end."""

    def __init__(self, owner: bytes, response_id: str) -> None:
        self.owner = owner
        self.response_id = response_id
        self.is_background = False
        self.body = b""
        """The response as JSON, once it has ended."""
        self.conversation = b""
        """Messages up to and with the answer, as JSON; empty if the response cannot be continued."""
        self.events: list[bytes] | None = None
        """Events of a background stream, by sequence number; None for other responses."""
        self.describe: Callable[[], dict[str, Any]] | None = None
        """Returns the current state of a running response; None once it has ended."""
        self.task: asyncio.Task[None] | None = None
        """Task of a background response."""
        self._news = asyncio.Event()

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return OVERHEAD + len(self.body) + len(self.conversation) + sum(map(len, self.events or ()))

    def as_json(self) -> bytes:
        """Returns the response in its current state."""
        return self.body if self.describe is None else msgspec.json.encode(self.describe())

    def get_conversation(self) -> bytes:
        """Returns the conversation. Raises ValidationError if the response cannot be continued."""
        if not self.conversation:
            raise ValidationError(
                f"the response {self.response_id} has not come to an answer, so nothing can follow it; wait for it, or "
                "ask again"
            )
        return self.conversation

    def note_news(self) -> None:
        """Wakes the readers: there is another event, or the end."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait_events(self, start: int, wait_s: float) -> None:
        """Waits until there is an event of number `start`, or the end, or the time is up."""
        assert self.events is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(self.events) <= start and self.describe is not None:
                    await self._news.wait()

    async def follow(self, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yields the events from number `start` on, as they come, up to the last one."""
        assert self.events is not None
        while True:
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self.describe is None:
                return
            await self._news.wait()


class ResponseStore:
    """Holds all stored responses. Belongs to the event loop's thread."""

    def __init__(self, max_num: int, max_bytes: int) -> None:
        self.max_num = max_num
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._running: dict[tuple[bytes, str], StoredResponse] = {}
        self._finished: dict[bytes, dict[str, StoredResponse]] = {}
        """Finished responses of each owner, oldest first."""
        self._bytes_of: dict[bytes, int] = {}
        """Bytes of each owner's finished responses."""
        self._bytes_of_running: dict[str, int] = {}

    @property
    def num_responses(self) -> int:
        """Number of stored responses."""
        return len(self._running) + sum(map(len, self._finished.values()))

    def get(self, owner: bytes, response_id: str) -> StoredResponse:
        """Returns a response. Raises NotFoundError if it is not stored, or belongs to another owner."""
        found = self._running.get((owner, response_id)) or self._finished.get(owner, {}).get(response_id)
        if found is None:
            raise NotFoundError(
                f"there is no response {response_id[:100]!r}: it was not stored (store: false, or it did not end), was "
                "dropped for newer ones (--max-stored-responses, --max-stored-response-bytes), or is not this key's"
            )
        return found

    def begin(self, response: StoredResponse) -> None:
        """Adds a response that runs in the background. Raises OverloadedError if running ones take all places."""
        if not self._make_room(1, OVERHEAD):
            raise OverloadedError(
                f"{len(self._running)} responses are under way in the background, and no more can be kept "
                f"(--max-stored-responses {self.max_num}); try again later",
                param="background",
            )
        self._running[response.owner, response.response_id] = response
        self._bytes_of_running[response.response_id] = OVERHEAD
        self.num_bytes += OVERHEAD

    def grow(self, response: StoredResponse, num_bytes: int) -> bool:
        """Counts more bytes of a running response. Returns False if there is no room."""
        if response.response_id not in self._bytes_of_running:
            return True  # deleted meanwhile
        if not self._make_room(0, num_bytes):
            return False
        self._bytes_of_running[response.response_id] += num_bytes
        self.num_bytes += num_bytes
        return True

    def finish(self, response: StoredResponse) -> bool:
        """Moves an ended response to the finished ones, which may be dropped. Returns False if it is too large."""
        if self._running.pop((response.owner, response.response_id), None) is None:
            return True
        self.num_bytes -= self._bytes_of_running.pop(response.response_id)
        return self.put(response)

    def put(self, response: StoredResponse) -> bool:
        """Stores a response that has ended. Returns False if it is too large, or there is no room."""
        owner, size = response.owner, response.size
        if size > self.max_bytes or not self._make_room(1, size):
            return False
        self._finished.setdefault(owner, {})[response.response_id] = response
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size
        self.num_bytes += size
        return True

    def delete(self, owner: bytes, response_id: str) -> StoredResponse:
        """Removes a response and returns it. Raises NotFoundError."""
        response = self.get(owner, response_id)
        if self._running.pop((owner, response_id), None) is not None:
            self.num_bytes -= self._bytes_of_running.pop(response_id)
        else:
            self._drop(response)
        return response

    def _make_room(self, num: int, num_bytes: int) -> bool:
        while (too_many := self.num_responses + num > self.max_num) or self.num_bytes + num_bytes > self.max_bytes:
            if not self._finished:
                return False
            sizes = {o: len(kept) for o, kept in self._finished.items()} if too_many else self._bytes_of
            self._drop(next(iter(self._finished[max(sizes, key=lambda owner: sizes[owner])].values())))
        return True

    def _drop(self, response: StoredResponse) -> None:
        owner, size = response.owner, response.size
        kept = self._finished[owner]
        del kept[response.response_id]
        self._bytes_of[owner] -= size
        self.num_bytes -= size
        if not kept:
            del self._finished[owner], self._bytes_of[owner]


class LocalResponses:
    """Operations on the stored responses of this process. Each raises NotFoundError for a response that `owner` does
    not have."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    async def show(self, owner: bytes, response_id: str) -> bytes:
        """Returns the response in its current state, as JSON."""
        return self.store.get(owner, response_id).as_json()

    async def cancel(self, owner: bytes, response_id: str) -> bytes:
        """Cancels a background response and returns it as JSON. Raises ValidationError for another one."""
        stored = self.store.get(owner, response_id)
        if not stored.is_background:
            raise ValidationError(
                "only a response with background: true can be cancelled; close the connection of another one"
            )
        await _end(stored)
        return stored.as_json()

    async def delete(self, owner: bytes, response_id: str) -> bytes:
        """Deletes a response, after cancelling it if it is under way."""
        await _end(self.store.delete(owner, response_id))
        return b""

    async def conversation(self, owner: bytes, response_id: str) -> bytes:
        """Returns the conversation up to and with the answer, a JSON list of messages. Raises ValidationError if the
        response has come to no answer."""
        return self.store.get(owner, response_id).get_conversation()

    async def follow(self, owner: bytes, response_id: str, start: int) -> AsyncGenerator[bytes, None]:
        """Returns an iterator over the events from number `start` on, up to the last one. Raises ValidationError for a
        response whose events are not stored."""
        return self._get_streamed(owner, response_id).follow(start)

    async def events_from(self, owner: bytes, response_id: str, start: int, wait_s: float) -> tuple[list[bytes], bool]:
        """Returns (events from number `start` on, whether they are the last), for another process. Waits up to `wait_s`
        for the first of them. Raises as `follow`."""
        stored = self._get_streamed(owner, response_id)
        await stored.wait_events(start, wait_s)
        return (stored.events or [])[start:], stored.describe is None

    def _get_streamed(self, owner: bytes, response_id: str) -> StoredResponse:
        stored = self.store.get(owner, response_id)
        if stored.events is None:
            raise ValidationError(
                "only the events of a response that was created with background: true and stream: true are kept; "
                "leave stream out",
                param="stream",
            )
        return stored


async def _end(stored: StoredResponse) -> None:
    if stored.task is not None:
        task = stored.task
        task.cancel()
        await asyncio.wait({task})


OPERATIONS: Mapping[str, Callable[[LocalResponses, bytes, str], Awaitable[bytes]]] = {
    "show_response": LocalResponses.show,
    "cancel_response": LocalResponses.cancel,
    "delete_response": LocalResponses.delete,
    "conversation": LocalResponses.conversation,
}
"""Operations on one response, by their names between the processes."""


class ServerResponses:
    """The same operations on the stored responses of all processes of the server."""

    def __init__(self, local: LocalResponses, member: Membership) -> None:
        self.local = local
        self._member = member

    def make_id(self) -> str:
        """Returns an id that cannot be guessed. It names this process where there are several."""
        home = "" if self._member.is_alone else f"{self._member.index}_"
        return f"resp_{home}{uuid.uuid4().hex}"

    def _home(self, response_id: str) -> int | None:
        """Returns the index of the other process that stores the response; None for this one."""
        found = _HOME.match(response_id)
        index = 0 if found is None else int(found[1])
        return index if 1 <= index <= self._member.num_processes and index != self._member.index else None

    async def call(self, operation: str, owner: bytes, response_id: str) -> bytes:
        """Returns the result of one of `OPERATIONS`, in the process that stores the response."""
        home = self._home(response_id)
        if home is None:
            return bytes(await OPERATIONS[operation](self.local, owner, response_id))
        return bytes(await self._member.peers.call(home, operation, owner, response_id))

    async def follow(self, owner: bytes, response_id: str, start: int) -> AsyncGenerator[bytes, None]:
        """Returns an iterator over the events from number `start` on."""
        home = self._home(response_id)
        if home is None:
            return await self.local.follow(owner, response_id, start)

        async def ask(position: int, wait_s: float) -> tuple[list[bytes], bool]:
            call = self._member.peers.call
            events, is_over = await call(home, "response_events", owner, response_id, position, wait_s)
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

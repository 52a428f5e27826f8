"""Responses that may be asked for again, or gone on from: in memory, bounded in number and bytes, each its key's own.

What is too much drops the oldest finished response of the owner who has most, so that nobody can push out what others
keep. A response that still runs in the background has its place, and is never dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from quire.errors import NotFoundError, OverloadedError, ValidationError

OVERHEAD = 1024
"""Bytes an entry is taken to need beside what it holds."""


class StoredResponse:
    """One response. While it runs it is told by `describe`, and what it has come to is not known yet."""

    def __init__(self, owner: bytes, response_id: str) -> None:
        self.owner = owner
        self.response_id = response_id
        self.is_background = False
        self.body = b""
        """The response, as JSON, once it has ended."""
        self.conversation = b""
        """Messages up to and with its answer, as JSON; empty where nothing can follow it."""
        self.events: list[bytes] | None = None
        """Of a stream in the background; the index is the sequence number."""
        self.describe: Callable[[], dict[str, Any]] | None = None
        """What it is now, while it runs."""
        self.task: asyncio.Task[None] | None = None
        """What it runs in, of one in the background."""
        self._news = asyncio.Event()

    @property
    def size(self) -> int:
        """In bytes, about."""
        return OVERHEAD + len(self.body) + len(self.conversation) + sum(map(len, self.events or ()))

    def as_json(self) -> bytes:
        """The response as it is now."""
        return self.body if self.describe is None else msgspec.json.encode(self.describe())

    def get_conversation(self) -> bytes:
        """The conversation, to go on with. Raises ValidationError if it cannot."""
        if not self.conversation:
            raise ValidationError(
                f"the response {self.response_id} has not come to an answer, so nothing can follow it; wait for it, or "
                "ask again"
            )
        return self.conversation

    def note_news(self) -> None:
        """There is another event, or the end."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait_events(self, start: int, wait_s: float) -> None:
        """Until there is an event of number `start`, there will be none, or the time is up."""
        assert self.events is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(self.events) <= start and self.describe is not None:
                    await self._news.wait()

    async def follow(self, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Events from number `start` on, as they come, up to the last one."""
        assert self.events is not None
        while True:
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self.describe is None:
                return
            await self._news.wait()


class ResponseStore:
    """Knows all responses that are kept. Belongs to the event loop's thread."""

    def __init__(self, max_num: int, max_bytes: int) -> None:
        self.max_num = max_num
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._running: dict[tuple[bytes, str], StoredResponse] = {}
        self._finished: dict[bytes, dict[str, StoredResponse]] = {}
        """Of each owner, oldest first."""
        self._bytes_of: dict[bytes, int] = {}
        """Of each owner's finished ones."""
        self._bytes_of_running: dict[str, int] = {}

    @property
    def num_responses(self) -> int:
        """How many there are."""
        return len(self._running) + sum(map(len, self._finished.values()))

    def get(self, owner: bytes, response_id: str) -> StoredResponse:
        """Raises NotFoundError for what is not kept, or another's."""
        found = self._running.get((owner, response_id)) or self._finished.get(owner, {}).get(response_id)
        if found is None:
            raise NotFoundError(
                f"there is no response {response_id[:100]!r}: it was not stored (store: false, or it did not end), was "
                "dropped for newer ones (--max-stored-responses, --max-stored-response-bytes), or is not this key's"
            )
        return found

    def begin(self, response: StoredResponse) -> None:
        """A response that will run in the background. Raises OverloadedError where all places are taken by such."""
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
        """More of a running one is kept; False if there is no room for it."""
        if response.response_id not in self._bytes_of_running:
            return True  # deleted: it is nobody's any more
        if not self._make_room(0, num_bytes):
            return False
        self._bytes_of_running[response.response_id] += num_bytes
        self.num_bytes += num_bytes
        return True

    def finish(self, response: StoredResponse) -> bool:
        """A running one has ended; it may be dropped from now on. False if it is too large to be kept."""
        if self._running.pop((response.owner, response.response_id), None) is None:
            return True
        self.num_bytes -= self._bytes_of_running.pop(response.response_id)
        return self.put(response)

    def put(self, response: StoredResponse) -> bool:
        """Keep a response that has ended. False if it is too large, or nothing is kept."""
        owner, size = response.owner, response.size
        if size > self.max_bytes or not self._make_room(1, size):
            return False
        self._finished.setdefault(owner, {})[response.response_id] = response
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size
        self.num_bytes += size
        return True

    def delete(self, owner: bytes, response_id: str) -> StoredResponse:
        """Forget a response. Raises NotFoundError."""
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

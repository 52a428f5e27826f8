"""Responses that are worked on while nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from quire.errors import OverloadedError
from quire.frontend.http.errors import note_error
from quire.frontend.http.state import Lifecycle
from quire.frontend.openai.responses.store import ResponseStore, StoredResponse
from quire.frontend.openai.responses.writer import ResponseWriter
from quire.frontend.openai.submission import Submission


class BackgroundRun:
    """One response under way. It counts as load, is kept by the store, and ends with its task, however that ends."""

    def __init__(
        self,
        stored: StoredResponse,
        store: ResponseStore,
        lifecycle: Lifecycle,
        writer: ResponseWriter,
        submission: Submission,
        messages: list[dict[str, Any]],
    ) -> None:
        """`messages` is the conversation that is answered. The store knows `stored` already."""
        self._stored = stored
        self._store = store
        self._lifecycle = lifecycle
        self._writer = writer
        self._submission = submission
        self._messages = messages

    async def start(self) -> None:
        """Begin; back as soon as a cancellation would be noticed."""
        self._stored.task = asyncio.create_task(self._run())
        await asyncio.sleep(0)

    async def _run(self) -> None:
        self._lifecycle.begin_request()
        try:
            try:
                async with contextlib.aclosing(self._writer.events(self._submission)) as chunks:
                    async for events in chunks:
                        self._keep(events)
            except asyncio.CancelledError:
                self._writer.cancel()
                self._append(self._writer.last_event())
            except Exception as e:
                note_error(e, self._writer.response_id)
                self._append(self._writer.failure(e))
            self._finish()
            await self._submission.close()
        finally:
            self._lifecycle.end_request()

    def _keep(self, events: bytes) -> None:
        self._append(events)
        if self._stored.events is None or self._writer.status != "in_progress":
            return  # nothing is kept, or nothing follows
        if not self._store.grow(self._stored, len(events)):
            raise OverloadedError(
                "the events of this response are more than can be kept now (--max-stored-response-bytes); ask without "
                "stream, or without background"
            )

    def _append(self, events: bytes) -> None:
        if self._stored.events is not None:
            self._stored.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
            self._stored.note_news()

    def _finish(self) -> None:
        stored, writer = self._stored, self._writer
        stored.body = msgspec.json.encode(writer.snapshot())
        if writer.status in ("completed", "incomplete"):
            stored.conversation = msgspec.json.encode([*self._messages, writer.message()])
        stored.describe = stored.task = None
        self._store.finish(stored)
        stored.note_news()

"""One request to an ASGI application by hand: message by message, with a client that may stop reading or leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Message


class Call:
    """A POST under way. `sent` are the application's messages so far."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        self.sent: list[Message] = []
        self.reads = asyncio.Event()
        """While it is clear, the application's sends do not come back: a full socket."""
        self.reads.set()
        self._news = asyncio.Event()
        self._left = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("localhost", 80),
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self._news.set()
        await self.reads.wait()

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def wait_for(self, text: bytes) -> None:
        """Waits until the application has sent `text`."""
        while text not in self.text:
            self._news.clear()
            await self._news.wait()

    @property
    def text(self) -> bytes:
        return b"".join(m["body"] for m in self.sent if m["type"] == "http.response.body")

    @property
    def status(self) -> int | None:
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), None)

    @property
    def is_complete(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False

"""One HTTP request as handlers read it."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from quire.errors import ClientError, ValidationError
from quire.frontend.http.bodies import Body, BodyReader, RequestBody
from quire.frontend.http.errors import HttpError
from quire.frontend.http.state import ServerState
from quire.frontend.text.tokenizer import LONG_TEXT_CHARS

Result = TypeVar("Result")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
DEFAULT_SEED = "quire.seed"
"""Key of the ASGI scope that a caller in this process sets: the seed of a request that samples and has none. There are
no other clients to protect, so its bodies may hold any number of values."""
MIN_VALUES = 1 << 18
VALUES_PER_CONTEXT_TOKEN = 4
"""Values a body may hold, counted by its commas. The parser takes about 100 ns for each and blocks the event loop."""
OBJECT_VALUES = 4
"""Parsing one JSON object costs about as much as so many plain values."""


class Exchange:
    """One HTTP request: its id, headers, query and body."""

    def __init__(self, request: Request, state: ServerState) -> None:
        self.request = request
        self.state = state
        given = request.headers.get("x-request-id", "")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.size = 0
        """Bytes of the body, and of the stored conversation it continues."""
        self._content: bytes | None = None
        self._body: RequestBody | None = None

    @property
    def owner(self) -> bytes:
        """Digest of the API key that the request has shown; empty where the server has no keys."""
        return self.state.gatekeeper.owner_of(self.request)

    def query_switch(self, name: str, default: bool) -> bool:
        """Returns a boolean parameter of the query. Raises ValidationError."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        if text.lower() not in _SWITCHES:
            raise ValidationError(f"{name} must be true or false, got {text[:60]!r}", param=name)
        return _SWITCHES[text.lower()]

    # -- the body -----------------------------------------------------------------------------------------------------

    async def read(self, reader: BodyReader[Body]) -> Body:
        """Returns the checked body. Raises HttpError or ValidationError."""
        content = await self.read_bytes()
        limit = max(MIN_VALUES, VALUES_PER_CONTEXT_TOKEN * self.state.max_model_len)
        if len(content) <= limit or DEFAULT_SEED in self.request.scope:
            body = reader.read(content)
        else:
            await asyncio.sleep(0)  # each step on a large body takes milliseconds: others may go on between two
            if content.count(b",") + OBJECT_VALUES * content.count(b"{") > limit:
                raise HttpError(413, f"the body holds more than {limit} values (or commas); send less at once")
            await asyncio.sleep(0)
            body = reader.read(content)
            await asyncio.sleep(0)
        self._body = body
        return body

    async def read_bytes(self) -> bytes:
        """Returns the body as it came. May be called again. Raises HttpError: 408, 413, 415."""
        if self._content is not None:
            return self._content
        headers, config = self.request.headers, self.state.config
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise HttpError(415, "the body must be JSON, sent with the header Content-Type: application/json")
        limit = config.max_request_bytes
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(config.body_timeout_s):
                async for part in self.request.stream():
                    size += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(part)
        except TimeoutError:
            raise HttpError(
                408, f"the body did not arrive within {config.body_timeout_s:g} s (--body-timeout-s)", close=True
            ) from None
        self.size = size
        self._content = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._content

    async def convert(self, work: Callable[[], Result]) -> Result:
        """Returns the result of `work`, which reads all text of the request: on the text thread if it is long."""
        return work() if self.size <= LONG_TEXT_CHARS else await self.state.engine.text_thread.run(work)

    # -- the answer ---------------------------------------------------------------------------------------------------

    def with_own_names(self, error: BaseException) -> BaseException:
        """Returns the error with the field's name as the body spells it."""
        if isinstance(error, ClientError) and error.param is not None:
            names = {} if self._body is None else self._body.own_names
            error.param = names.get(error.param, error.param)
        return error

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns the result of `work`. Cancels it and raises ClientDisconnect if the client disconnects first."""
        task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(self.request.receive))
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientDisconnect
        finally:
            watcher.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than {limit} bytes (--max-request-bytes)", close=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

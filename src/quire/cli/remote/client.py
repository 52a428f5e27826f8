"""Requests to one server: connections that are used again, answers whole or in events, failures in words."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import msgspec

from quire import __version__, envs
from quire.cli.command_line import nearest
from quire.cli.remote.address import ServerAddress
from quire.cli.remote.connection import BodySink, HttpConnection, WholeBody
from quire.cli.remote.events import Chunk, EventReader
from quire.cli.remote.failures import RemoteError, connection_error, lost_connection, status_error
from quire.errors import ConfigError, NotFoundError

CONNECT_LIMIT_S = 10.0
QUESTION_LIMIT_S = 60.0
"""Longest wait for an answer that takes no computing."""


class ModelCard(msgspec.Struct):
    """A row of /v1/models. Servers that tell `max_model_len` speak vLLM's extensions of OpenAI's API."""

    id: str
    max_model_len: int | None = None
    owned_by: str | None = None


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


def given_api_key(given: str | None) -> str | None:
    """The key to show: `given`, else the environment's."""
    key = given or envs.API_KEY.get() or os.environ.get("OPENAI_API_KEY") or None
    if key is not None and (not key.isascii() or not key.isprintable()):
        raise ConfigError("the API key holds characters that a header cannot: non-ASCII or control characters")
    return key


class HttpClient:
    """Belongs to the event loop of its first request. Proxies named in the environment are not used."""

    def __init__(self, address: ServerAddress, api_key: str | None = None) -> None:
        self.address = address
        self._idle: list[HttpConnection] = []
        self._head_tail = f"Host: {address.host_header}\r\nUser-Agent: quire/{__version__}\r\nAccept: */*\r\n" + (
            f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        )

    async def get(self, path: str, limit_s: float = QUESTION_LIMIT_S) -> Any:
        """The JSON at `path`. Raises RemoteError, RefusedError."""
        return await self._ask("GET", path, b"", limit_s)

    async def post(self, path: str, body: Mapping[str, Any], limit_s: float = QUESTION_LIMIT_S) -> Any:
        """What `path` answers to `body`. Raises RemoteError, RefusedError."""
        return await self._ask("POST", path, msgspec.json.encode(body), limit_s)

    async def stream(self, path: str, body: bytes, on_chunk: Callable[[Chunk], None]) -> None:
        """POST `body` and hand each event of the answer to `on_chunk` as it arrives.

        Raises RemoteError, RefusedError; cancelled, it hangs up, which aborts the request.
        """
        reader = EventReader(on_chunk, self.address)
        await self._exchange(self._request("POST", path, body), reader)
        if not reader.is_complete:
            raise lost_connection(self.address, has_begun=True)

    async def models(self) -> list[ModelCard]:
        """What is served. Raises RemoteError, RefusedError."""
        try:
            return msgspec.convert(await self.get("/v1/models"), _ModelList).data
        except msgspec.ValidationError as e:
            raise RemoteError(f"{self.address}/v1/models is no list of models: {e}", "not a model list") from None

    async def find_model(self, name: str | None) -> ModelCard:
        """The model of that name, or the first. Raises NotFoundError, RemoteError, RefusedError."""
        cards = await self.models()
        names = [card.id for card in cards]
        if not cards:
            raise NotFoundError(f"{self.address} serves no model", param="model")
        for card in cards:
            if name in (None, card.id):
                return card
        hint = nearest(str(name), names, "--model names one of them")
        raise NotFoundError(
            f"{self.address} does not serve {name!r} but {', '.join(names[:10])}; {hint}", param="model", value=name
        )

    def close(self) -> None:
        """End the connections that wait."""
        while self._idle:
            self._idle.pop().close()

    # -- exchanges ------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, body: bytes, limit_s: float) -> Any:
        whole = WholeBody()
        try:
            async with asyncio.timeout(limit_s):
                await self._exchange(self._request(method, path, body), whole)
        except TimeoutError:
            raise RemoteError(f"{self.address}{path} has not answered within {limit_s:g} s", "timeout") from None
        try:
            return msgspec.json.decode(bytes(whole.content))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RemoteError(
                f"{self.address}{path} does not answer with JSON; is it the right --url?", "not JSON"
            ) from None

    async def _exchange(self, request: bytes, sink: BodySink) -> None:
        """One exchange whose body goes to `sink` if its status is 200. A connection that had died idle is replaced."""
        answer = _Answer(sink)
        while True:
            connection = self._take_idle() or await self._connect()
            try:
                status = await connection.exchange(request, answer.choose)
            except RemoteError as e:
                if connection.num_exchanges > 1 and not connection.has_received and e.kind == "no answer":
                    continue
                raise
            if connection.is_idle:
                self._idle.append(connection)
            if status != 200:
                raise status_error(status, bytes(answer.refusal.content), self.address, answer.location)
            return

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle:  # it may have ended meanwhile
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        loop, address = asyncio.get_running_loop(), self.address
        tls, name = (self._tls_context, address.host) if address.is_tls else (None, None)
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                _, connection = await loop.create_connection(
                    lambda: HttpConnection(address), address.host, address.port, ssl=tls, server_hostname=name
                )
        except OSError as e:  # TimeoutError and ssl.SSLError are among them
            raise connection_error(e, address) from None
        return connection

    @cached_property
    def _tls_context(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        what = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        return f"{method} {self.address.path}{path} HTTP/1.1\r\n{self._head_tail}{what}\r\n".encode() + body


class _Answer:
    """Where an answer goes: to `sink`, or, where it is a refusal, into `refusal`."""

    def __init__(self, sink: BodySink) -> None:
        self._sink = sink
        self.refusal = WholeBody()
        self.location = ""

    def choose(self, status: int, headers: dict[bytes, bytes]) -> BodySink:
        """For `HttpConnection.exchange`."""
        self.location = headers.get(b"location", b"").decode(errors="replace")
        return self._sink if status == 200 else self.refusal

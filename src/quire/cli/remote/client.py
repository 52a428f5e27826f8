"""Requests to a server: answers as JSON or as the events of a stream, failures in words.

aiohttp speaks HTTP. `HttpClient` belongs to an event loop; `RemoteServer` serves programs that have none: its streams
run on a thread, and their chunks are waited for here. Ctrl-C ends the waiting and closes what is under way, which
aborts it on the server.
"""

from __future__ import annotations

import asyncio
import queue
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec

from quire import __version__
from quire.cli.command_line import Arguments
from quire.cli.remote.protocol import (
    Chunk,
    EventReader,
    ModelCard,
    RemoteError,
    ServerAddress,
    connection_error,
    given_api_key,
    lost_connection,
    status_error,
)
from quire.errors import NotFoundError, nearest

T = TypeVar("T")
CONNECT_LIMIT_S = 10.0
QUESTION_LIMIT_S = 60.0
"""Longest wait for an answer that takes no computing."""
IDLE_LIMIT_S = 60.0
"""Idle time after which a connection is closed here; servers close them earlier (uvicorn after 5 s)."""
MAX_WHOLE_BODY = 64 << 20
"""Largest size in bytes of an answer that is kept in memory."""
CTRL_C_POLL_S = 0.2
"""Longest single wait of the main thread: a signal that comes just before a wait begins does not end that wait."""


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


class HttpClient:
    """Belongs to the event loop of its first request. Proxies named in the environment are not used."""

    def __init__(self, address: ServerAddress, api_key: str | None = None) -> None:
        self.address = address
        self._headers = {"User-Agent": f"quire/{__version__}", "Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, limit_s: float = QUESTION_LIMIT_S) -> Any:
        """Returns the JSON at `path`. Raises RemoteError, RefusedError."""
        return await self._ask("GET", path, None, limit_s)

    async def get_text(self, path: str, limit_s: float = QUESTION_LIMIT_S) -> str:
        """Returns the text at `path`. Raises RemoteError, RefusedError."""
        return (await self._fetch("GET", path, None, limit_s)).decode("utf-8", errors="replace")

    async def post(self, path: str, body: Mapping[str, Any], limit_s: float = QUESTION_LIMIT_S) -> Any:
        """Returns the JSON that `path` answers to `body`. Raises RemoteError, RefusedError."""
        return await self._ask("POST", path, msgspec.json.encode(body), limit_s)

    async def stream(self, path: str, body: bytes, on_chunk: Callable[[Chunk], None]) -> None:
        """Posts `body` and passes each event of the answer to `on_chunk` as it arrives.

        Raises RemoteError, RefusedError. When cancelled, it closes the connection, which aborts the request.
        """
        reader = EventReader(on_chunk, self.address)
        async with self._exchange("POST", path, body) as content:
            while data := await content.readany():
                reader.feed(data)
        if not reader.is_complete:
            raise lost_connection(self.address, has_begun=True)

    async def models(self) -> list[ModelCard]:
        """Returns the models that are served. Raises RemoteError, RefusedError."""
        try:
            return msgspec.convert(await self.get("/v1/models"), _ModelList).data
        except msgspec.ValidationError as e:
            raise RemoteError(f"{self.address}/v1/models is not a list of models: {e}", "not a model list") from None

    async def find_model(self, name: str | None) -> ModelCard:
        """Returns the model of that name, or the first. Raises NotFoundError, RemoteError, RefusedError."""
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

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()

    async def _fetch(self, method: str, path: str, body: bytes | None, limit_s: float) -> bytes:
        try:
            async with asyncio.timeout(limit_s), self._exchange(method, path, body) as content:
                return await _read_whole(content)
        except TimeoutError:
            raise RemoteError(f"{self.address}{path} has not answered within {limit_s:g} s", "timeout") from None

    async def _ask(self, method: str, path: str, body: bytes | None, limit_s: float) -> Any:
        whole = await self._fetch(method, path, body, limit_s)
        try:
            return msgspec.json.decode(whole)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RemoteError(
                f"{self.address}{path} does not answer with JSON; is it the right --url?", "not JSON"
            ) from None

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: bytes | None) -> AsyncIterator[aiohttp.StreamReader]:
        """Yields the body of an answer with status 200. Raises RemoteError, and RefusedError for other statuses."""
        has_begun = False
        try:
            async with await self._request(method, path, body) as response:
                has_begun = True
                if response.status != 200:
                    refusal = await _read_whole(response.content)
                    raise status_error(response.status, refusal, self.address, response.headers.get("Location", ""))
                yield response.content
        except aiohttp.ClientConnectorCertificateError as e:
            raise connection_error(e.certificate_error, self.address) from None
        except aiohttp.ClientConnectorError as e:
            raise connection_error(e.os_error, self.address) from None
        except aiohttp.ConnectionTimeoutError as e:
            raise connection_error(e, self.address) from None
        except aiohttp.ClientResponseError as e:
            raise RemoteError(
                f"the program at {self.address} does not speak HTTP/1.1: {' '.join(e.message.split())}", "not HTTP"
            ) from None
        except (aiohttp.ClientError, ConnectionError):
            raise lost_connection(self.address, has_begun=has_begun) from None

    async def _request(self, method: str, path: str, body: bytes | None) -> aiohttp.ClientResponse:
        """Returns the head of an answer. A connection that the server has closed while it was idle is replaced."""
        if self._session is None:
            self._session = self._open_session()
        while True:
            reuses: list[None] = []
            try:
                return await self._session.request(
                    method, f"{self.address}{path}", data=body, allow_redirects=False, trace_request_ctx=reuses
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not reuses:
                    raise

    def _open_session(self) -> aiohttp.ClientSession:
        tls = ssl.create_default_context() if self.address.is_tls else True
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_LIMIT_S, ssl=tls),
            headers=self._headers,
            skip_auto_headers=("Accept-Encoding",),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S),
            trace_configs=[trace],
        )


async def _note_reuse(session: aiohttp.ClientSession, context: Any, params: object) -> None:
    context.trace_request_ctx.append(None)


async def _read_whole(content: aiohttp.StreamReader) -> bytes:
    whole = bytearray()
    while data := await content.readany():
        whole += data
        if len(whole) > MAX_WHOLE_BODY:
            raise RemoteError(f"the answer is longer than {MAX_WHOLE_BODY >> 20} MiB", "answer too long")
    return bytes(whole)


@dataclass(frozen=True)
class Arrival:
    """A chunk of stream `key` that arrived at `now` (time.perf_counter); with None, the stream's end or `error`."""

    key: int
    now: float
    chunk: Chunk | None
    error: Exception | None = None


class RemoteServer:
    """A server, called from one thread. A context manager: it closes the streams that are left at its end."""

    def __init__(self, address: ServerAddress, api_key: str | None = None) -> None:
        self.address = address
        self._client = HttpClient(address, api_key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-remote", daemon=True)
        self._thread.start()
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._num_streams = 0

    @staticmethod
    def of(args: Arguments) -> RemoteServer:
        """Returns the server that --url and --api-key name. Raises ConfigError."""
        return RemoteServer(ServerAddress.parse(args["url"]), given_api_key(args["api_key"]))

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def find_model(self, name: str | None) -> ModelCard:
        """Calls `HttpClient.find_model`."""
        return self._ask(self._client.find_model(name))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Calls `HttpClient.post`."""
        return self._ask(self._client.post(path, body))

    def start(self, path: str, body: Mapping[str, Any]) -> int:
        """Begins a stream; its arrivals have the key that is returned."""
        self._num_streams += 1
        key = self._num_streams
        data = msgspec.json.encode(body)

        async def begin() -> None:
            self._streams[key] = asyncio.create_task(self._stream(key, path, data))

        self._ask(begin())
        return key

    def arrivals(self, *keys: int) -> Iterator[Arrival]:
        """Yields what arrives on these streams until all have ended. Late arrivals of other streams are dropped."""
        left = set(keys)
        while left:
            try:
                arrival = self._arrivals.get(timeout=CTRL_C_POLL_S)
            except queue.Empty:
                continue
            if arrival.key in left:
                if arrival.chunk is None:
                    left.remove(arrival.key)
                yield arrival

    def stop(self, *keys: int) -> None:
        """Closes these streams, if they are under way."""

        async def cancel() -> None:
            tasks = [task for key in keys if (task := self._streams.get(key)) is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._ask(cancel())

    def close(self) -> None:
        """Closes everything and ends the thread."""
        if self._thread.is_alive():
            self.stop(*list(self._streams))
            self._ask(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def _stream(self, key: int, path: str, body: bytes) -> None:
        def on_chunk(chunk: Chunk) -> None:
            self._arrivals.put(Arrival(key, time.perf_counter(), chunk))

        error: Exception | None = None
        try:
            await self._client.stream(path, body, on_chunk)
        except Exception as e:  # any error has to reach the thread that waits
            error = e
        finally:
            del self._streams[key]
        self._arrivals.put(Arrival(key, time.perf_counter(), None, error))

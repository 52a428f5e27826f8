"""A server of OpenAI's API on the loopback interface with prepared answers: remote commands are tested on it."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """The answer to it: a JSON value, or the events of a stream."""

    value: Any = None
    status: int = 200
    events: AsyncIterator[Any] | None = None
    is_done: bool = True
    """True: a stream ends with [DONE]."""
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """Instead of all that; the connection ends after it."""


Handler = Callable[[Request], Awaitable[Reply]]
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "quire", "max_model_len": 2048}]}


@dataclass
class FakeServer:
    """`answer(body)` yields the texts of an answer, one chunk each; a dict is an event as it stands."""

    answer: Callable[[dict[str, Any]], AsyncIterator[Any]] | None = None
    routes: dict[str, Handler] = field(default_factory=dict)
    """Answers by path, in place of the usual ones."""
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    num_connections: int = 0
    num_hung_up: int = 0
    """Streams whose reader left."""
    hung_up: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def bodies(self, path: str) -> list[Any]:
        """Returns the bodies of the requests to `path`."""
        return [r.body for r in self.requests if r.path == path]

    # -- HTTP -----------------------------------------------------------------------------------------------------

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while (request := await self._read(reader, writer)) is not None:
                self.requests.append(request)
                reply = await self.routes.get(request.path, self._usual)(request)
                if not await self._write(reader, writer, reply):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled: the test is over
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
        try:
            first = await reader.readexactly(1)
            if first == b"\x16":  # a TLS handshake
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return None
            head = (first + await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except asyncio.IncompleteReadError:
            return None
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        return Request(method, path, headers, json.loads(data) if data else None)

    async def _write(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply) -> bool:
        if reply.raw is not None:
            writer.write(reply.raw)
            return False
        if reply.events is None:
            data = json.dumps(reply.value).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **reply.headers}
            head = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
            writer.write(f"HTTP/1.1 {reply.status} Whatever\r\n{head}\r\n".encode() + data)
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        gone = asyncio.ensure_future(reader.read(1))
        try:
            return await self._write_events(writer, reply, gone) and not gone.done()
        except ConnectionError:  # a write may notice it before the read does
            self._note_hung_up()
            return False
        finally:
            gone.cancel()
            await asyncio.wait([gone])

    async def _write_events(self, writer: asyncio.StreamWriter, reply: Reply, gone: asyncio.Future[bytes]) -> bool:
        assert reply.events is not None
        events = aiter(reply.events)
        while True:
            nearest = asyncio.ensure_future(anext(events, None))  # type: ignore[arg-type]
            await asyncio.wait([nearest, gone], return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not nearest.done():
                nearest.cancel()
                self._note_hung_up()
                return False
            event = await nearest
            if event is None:
                break
            self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
            await writer.drain()
        if reply.is_done:
            self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _note_hung_up(self) -> None:
        self.num_hung_up += 1
        self.hung_up.set()

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    # -- what is usual --------------------------------------------------------------------------------------------

    async def _usual(self, request: Request) -> Reply:
        if request.path == "/v1/models":
            return Reply(MODELS)
        if request.path == "/tokenize":
            text = request.body.get("prompt") or " ".join(m["content"] for m in request.body["messages"])
            return Reply({"count": len(text.split()), "tokens": [len(w) + 300 for w in text.split()]})
        if request.path in ("/v1/completions", "/v1/chat/completions"):
            return Reply(events=self._stream(request.path.endswith("/chat/completions"), request.body))
        return Reply({"error": {"message": f"there is no route {request.path}"}}, 404)

    async def _stream(self, is_chat: bool, body: dict[str, Any]) -> AsyncIterator[Any]:
        count = 0
        if is_chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        async for piece in (self.answer or full_length)(body):
            if isinstance(piece, dict):
                yield piece
                continue
            count += 1
            what = {"delta": {"content": piece}} if is_chat else {"text": piece, "token_ids": [count]}
            yield {"choices": [{"index": 0, **what, "finish_reason": None}]}
        end = {"delta": {}} if is_chat else {"text": ""}
        reason = "length" if count == body.get("max_tokens") else "stop"
        yield {"choices": [{"index": 0, **end, "finish_reason": reason}]}
        usage = {"prompt_tokens": 5, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 2}}
        yield {"choices": [], "usage": usage}


async def full_length(body: dict[str, Any]) -> AsyncIterator[Any]:
    """Returns as many words as the request asks for."""
    for i in range(body.get("max_tokens") or 2):
        yield f"w{i} "


def saying(*pieces: Any) -> Callable[[dict[str, Any]], AsyncIterator[Any]]:
    """An answer of these pieces, whatever is asked."""

    async def answer(body: dict[str, Any]) -> AsyncIterator[Any]:
        for piece in pieces:
            yield piece

    return answer


def always(reply: Reply) -> Handler:
    """The same reply to everyone."""

    async def handle(request: Request) -> Reply:
        return reply

    return handle


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """`server` on a free port, on a thread of its own."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        listener = await asyncio.start_server(server.connect, "127.0.0.1", 0, ssl=server.tls)
        scheme = "https" if server.tls else "http"
        server.url = f"{scheme}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listener.close()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    def run() -> None:
        try:
            loop.run_until_complete(main())
        finally:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()

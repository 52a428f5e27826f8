"""A proxy in front of engines that prefill and engines that decode.

    python examples/disaggregated/proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 [--port 8000]

Each may be given several times. A request goes to one engine that prefills, with one token to generate, and then with
the `kv_transfer_params` of its answer to one that decodes: those with the fewest requests under way. Where the first
fails, the second computes everything: no request fails because of it. Where the second cannot be reached, another that
decodes is tried. It does the same for any server that speaks vLLM's protocol for NIXL.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

APART = ("/v1/completions", "/v1/chat/completions")
"""Routes whose prompts are computed elsewhere. All other requests go to an engine that decodes."""
PREFILL_S = 600.0
CONNECT_S = 5.0
MAX_BODY_BYTES = 64 << 20
PASSED_ON = ("authorization", "content-type", "x-request-id", "traceparent", "tracestate")
"""Headers of a request that the engines get, too."""
KEPT = ("content-type", "x-request-id", "retry-after")
"""Headers of an engine's answer that the client gets."""
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Engines:
    """Engines of one kind, and how many requests each of them has."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.loads = {url.rstrip("/"): 0 for url in urls}

    @asynccontextmanager
    async def chosen(self, tried: Collection[str] = ()) -> AsyncIterator[str]:
        """Yields the address of the engine with the fewest requests, not one of `tried`, and counts one more for so
        long."""
        url = min((url for url in self.loads if url not in tried), key=self.loads.__getitem__)
        num_requests = self.loads.pop(url)
        self.loads[url] = num_requests + 1  # behind the others with as many
        try:
            yield url
        finally:
            self.loads[url] -= 1


class Proxy:
    """Sends requests on. `session` is there between `open` and its end."""

    def __init__(self, prefill: Engines, decode: Engines) -> None:
        self.prefill, self.decode = prefill, decode
        self.session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(self, app: Starlette) -> AsyncIterator[None]:
        """Keeps connections to the engines."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self.session:
            yield

    async def handle(self, request: Request) -> Response:
        """Answers a request."""
        data = await request.body()
        if len(data) > MAX_BODY_BYTES:
            return _error(413, f"the body has {len(data)} bytes; at most {MAX_BODY_BYTES} are passed on")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers.setdefault("x-request-id", uuid.uuid4().hex)  # both engines log the same id
        if request.url.path in APART and request.method == "POST":
            body = _read_object(data)
            if body is not None:  # otherwise the engine says what is wrong with it
                body.pop("kv_transfer_params", None)  # a client does not choose where blocks come from
                transfer = await self._compute_prompt(request.url.path, body, headers)
                if transfer is not None:
                    body["kv_transfer_params"] = transfer
                data = json.dumps(body).encode()
        return await self._pass_on(request, data, headers)

    async def _compute_prompt(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        """Has the prompt computed. Returns where its blocks are; None: nowhere."""
        asked = dict(body) | {"stream": False, "max_tokens": 1, "kv_transfer_params": ASK}
        asked.pop("stream_options", None)
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        if asked.get("min_tokens"):
            asked["min_tokens"] = 1
        assert self.session is not None
        async with self.prefill.chosen() as url:
            timeout = aiohttp.ClientTimeout(total=PREFILL_S, sock_connect=CONNECT_S)
            try:
                async with self.session.post(url + path, json=asked, headers=headers, timeout=timeout) as answer:
                    result = await answer.json() if answer.status == 200 else {}
            except (aiohttp.ClientError, TimeoutError, ValueError) as e:
                print(f"{url} computed no prompt: {type(e).__name__}: {e}", flush=True)
                return None
        return result.get("kv_transfer_params") if isinstance(result, dict) else None

    async def _pass_on(self, request: Request, data: bytes, headers: Mapping[str, str]) -> Response:
        """Sends a request to an engine that decodes, and its answer back as it comes."""
        assert self.session is not None
        tried: list[str] = []
        while True:
            async with AsyncExitStack() as stack:
                url = await stack.enter_async_context(self.decode.chosen(tried))
                tried.append(url)
                target = url + request.url.path + (f"?{request.url.query}" if request.url.query else "")
                sent = self.session.request(request.method, target, data=data or None, headers=headers)
                try:
                    answer = await stack.enter_async_context(sent)
                    return PassedOn(answer, stack.pop_all())
                except (aiohttp.ClientError, TimeoutError) as e:
                    print(f"{url} does not answer: {type(e).__name__}: {e}", flush=True)
                    may_have_begun = not isinstance(e, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
                    if may_have_begun or len(tried) == len(self.decode.loads):
                        return _error(502, f"{url} does not answer: {type(e).__name__}")


class PassedOn(StreamingResponse):
    """An engine's answer. Its connection is closed at the end, and if the client leaves, which aborts the request."""

    def __init__(self, answer: aiohttp.ClientResponse, stack: AsyncExitStack) -> None:
        kept = {name: answer.headers[name] for name in KEPT if name in answer.headers}
        super().__init__(answer.content.iter_any(), answer.status, kept)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


def _read_object(data: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "ProxyError", "param": None, "code": status}}, status)


def make_app(prefill: Sequence[str], decode: Sequence[str]) -> Starlette:
    """Returns the proxy as an application."""
    proxy = Proxy(Engines(prefill), Engines(decode))
    route = Route("/{path:path}", proxy.handle, methods=["GET", "POST", "DELETE"])
    return Starlette(routes=[route], lifespan=proxy.open)


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL of an engine; give one as http://127.0.0.1:8100")
    return text.rstrip("/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", action="append", required=True, type=_url, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, type=_url, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    if not 0 < args.port <= 0xFFFF:
        parser.error(f"--port {args.port} is not one of 1 to 65535")
    uvicorn.run(make_app(args.prefill, args.decode), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()

"""Rows of a batch through the routes of `quire serve`: its application in this process, without sockets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import msgspec

from quire.cli.batch_files import InputRow, row_id
from quire.config.server import ServerConfig
from quire.errors import EngineDeadError, ValidationError, nearest
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.endpoint import DEFAULT_SEED, Endpoint
from quire.frontend.http.errors import error_body
from quire.frontend.http.state import ServerState
from quire.frontend.openai.app import add_parts, build_app, load_adapters

IGNORED_FIELDS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields of OpenAI's without an effect on an answer, which not every body declares."""
UNLIMITED: dict[str, Any] = {
    "max_request_bytes": sys.maxsize,
    "max_prompts_per_request": sys.maxsize,
    "max_stored_responses": 0,
    "trust_request_chat_template": True,
    "enable_prompt_tokens_details": True,
    "disable_uvicorn_access_log": True,
}
"""Settings of a server whose only client is the user who started it."""


class RowServer:
    """Answers rows of a batch by the server's routes. The url of a row is a route that runs the model and takes a
    body."""

    def __init__(self, engine: AsyncLLM, **settings: Any) -> None:
        """`settings` are fields of `ServerConfig`. Raises ConfigError for those that do not fit the model."""
        model = engine.model_config
        state = add_parts(ServerState(engine, ServerConfig(**UNLIMITED, **settings)))
        state.model_names = tuple(dict.fromkeys([*model.names, model.model]))
        self._engine, self._seed, self._state = engine, model.seed, state
        self._app = build_app(state)
        self._routes = {
            endpoint.path: (endpoint, frozenset(endpoint.body.kind.__struct_encode_fields__))
            for endpoint in self._app.state.endpoints
            if endpoint.is_work and endpoint.body is not None
        }
        """The endpoint of each url and the fields of its body."""
        self._urls = [url for url, (endpoint, _) in self._routes.items() if endpoint.is_for(state.supported_tasks)]

    async def run(self, rows: Iterator[InputRow], window: int, write: Callable[[str, dict[str, Any]], None]) -> None:
        """Answers all rows, `window` at a time, and calls `write` with the key of each and its result. Raises
        EngineDeadError once the engine is gone for good, and the error of an adapter that cannot be served."""
        await load_adapters(self._state)

        death: EngineDeadError | None = None

        async def answer_some() -> None:
            nonlocal death
            try:
                for row in rows:
                    write(row.key, await self._answer(row))
            except EngineDeadError as e:  # the others end, too; answers that came before are written
                death = e

        await asyncio.gather(*(answer_some() for _ in range(window)))
        if death is not None:
            raise death

    async def _answer(self, row: InputRow) -> dict[str, Any]:
        """Returns the result in OpenAI's form."""
        request_id, custom_id = uuid.uuid4().hex, row.content.get("custom_id")
        try:
            endpoint, body = self._read(row)
            status, answer = await self._post(endpoint, body, request_id, _row_seed(self._seed, row.key))
        except ValidationError as e:
            status, answer = e.status_code, json.dumps(error_body(e)).encode()
        if status >= 500:
            await self._engine.check_health()  # a row that a dead engine failed has no answer yet
        is_named = isinstance(custom_id, str)
        return {
            "id": f"batch_req_{request_id[:16]}" if is_named else row_id(row.line_number),
            "custom_id": custom_id if is_named else None,
            "response": {"status_code": status, "request_id": request_id, "body": msgspec.Raw(answer)},
            "error": None if status < 400 else _error(status, json.loads(answer)["error"]),
        }

    def _read(self, row: InputRow) -> tuple[Endpoint, bytes]:
        """Returns the endpoint of a row and its body. Raises ValidationError that names the field."""
        if row.error is not None:
            raise row.error
        content = row.content
        custom_id, url, body = content.get("custom_id"), content.get("url"), content.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise ValidationError(f"line {row.line_number} has no custom_id, or it is not text", param="custom_id")
        if content.get("method", "POST") != "POST":
            raise ValidationError(f"method {content['method']!r} is not POST", param="method")
        if not isinstance(url, str) or url not in self._routes:
            raise ValidationError(f"url {url!r} is not one of {', '.join(self._urls)}", param="url")
        if not isinstance(body, dict):
            raise ValidationError(f"body must be an object, got {type(body).__name__}", param="body")
        endpoint, fields = self._routes[url]
        for name in body:
            if name not in fields and name not in IGNORED_FIELDS:
                raise ValidationError(
                    f"{name} is not a field of requests to {url}; {nearest(name, fields, 'remove it')}", param=name
                )
        for name in ("stream", "background"):
            if body.get(name) not in (None, False):
                raise ValidationError(f"{name} is not supported in a batch, which waits; leave it out", param=name)
        if "stream" in fields:
            body = {**body, "stream": False}  # Ollama's bodies stream otherwise
        return endpoint, json.dumps(body).encode()

    async def _post(self, endpoint: Endpoint, body: bytes, request_id: str, seed: int) -> tuple[int, bytes]:
        """Returns status and body of an endpoint's answer (ASGI)."""
        status, parts, request = 0, list[bytes](), [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if request:
                return request.pop()
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # never: the client stays

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        scope = {
            "type": "http",
            "app": self._app,
            "method": "POST",
            "path": endpoint.path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
            DEFAULT_SEED: seed,
        }
        await endpoint(scope, receive, send)
        return status, b"".join(parts)


def _row_seed(seed: int, custom_id: str) -> int:
    """Returns the seed of a row without one.

    It depends on the row alone, so that a resumed batch draws the same tokens.
    """
    digest = hashlib.sha256(f"{seed}/{custom_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) >> 1


def _error(status: int, error: Any) -> dict[str, Any]:
    """Returns a row's error in OpenAI's shape from that of any API."""
    given = error if isinstance(error, dict) else {"message": error}
    return {"message": None, "type": None, "param": None, **given, "code": status}

"""Ollama's API, so that its clients work by changing the URL: /api/chat, /api/generate, /api/embed and the lists.

Answers are streamed as lines of JSON. There is one model: it is served under its own name, with or without the tag
":latest", and is neither fetched nor removed through these routes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.responses import Response

from quire.frontend.adapters import AdapterRegistry
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.http.errors import ollama_error
from quire.frontend.http.state import ServerState, hash_model
from quire.frontend.http.streaming import encode_json
from quire.frontend.openai.chat.blocks import BlockEvent, BlockReader, arguments_of
from quire.frontend.openai.chat.format import ChatFormat
from quire.frontend.openai.chat.output import ChatParser, PlainText
from quire.frontend.openai.pooling_work import pool_texts
from quire.frontend.openai.protocol.ollama import (
    DEFAULT_TAG,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    ShowBody,
)
from quire.frontend.openai.rendering import submit_chats
from quire.frontend.openai.routes.completions import submit_completion
from quire.frontend.openai.submission import Submission, stream_response
from quire.outputs import RequestOutput

API_VERSION = "0.12.0"
"""The version of Ollama whose API this is: clients refuse servers that are too old for them."""
CHAT = BodyReader(OllamaChatBody)
GENERATE = BodyReader(OllamaGenerateBody)
EMBED = BodyReader(OllamaEmbedBody)
EMBEDDINGS = BodyReader(OllamaEmbeddingsBody)
SHOW = BodyReader(ShowBody)
NDJSON = b"application/x-ndjson"
_NS = 1_000_000_000
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

Piece = dict[str, Any]
"""Part of an answer: some of `content`, `thinking` and `tool_calls`."""


async def chat(exchange: Exchange) -> Response:
    """Answers a conversation, in Ollama's form."""
    body = await exchange.read(CHAT)
    body.model = await check_model(exchange, body.model)
    if not body.messages:
        return json_response(_loaded(body.model, {"message": {"role": "assistant", "content": ""}}))
    start = time.monotonic()
    conversation = await exchange.convert(body.as_chat)
    prepared, submission = await submit_chats(exchange, [conversation], exchange.request_id)
    parser = prepared.plan.make_parser(prepared.prompt.text)
    return await _answer(exchange, submission, AnswerWriter(body.model, parser, start, is_chat=True), body.stream)


async def generate(exchange: Exchange) -> Response:
    """Answers a prompt or continues a text, in Ollama's form."""
    body = await exchange.read(GENERATE)
    body.model = await check_model(exchange, body.model)
    if not body.prompt:
        return json_response(_loaded(body.model, {"response": ""}))
    start, parser = time.monotonic(), PlainText()
    writer = partial(AnswerWriter, body.model, start=start, is_chat=False)
    tokenizer = exchange.state.engine.tokenizer
    if body.raw or tokenizer is None or not tokenizer.chat_templates:
        text = body.as_completion()
        *_, submission = await submit_completion(exchange, text, exchange.request_id, default_limit=None)
        return await _answer(exchange, submission, writer(parser=parser), body.stream)
    prepared, submission = await submit_chats(exchange, [body.as_chat()], exchange.request_id)
    return await _answer(
        exchange, submission, writer(parser=prepared.plan.make_parser(prepared.prompt.text)), body.stream
    )


async def _answer(exchange: Exchange, submission: Submission, writer: AnswerWriter, stream: bool | None) -> Response:
    if stream is not False:
        return stream_response(
            exchange,
            writer.lines(submission),
            submission,
            encode_error=lambda error: _line(ollama_error(error)),
            shape_error=ollama_error,
            media_type=NDJSON,
        )
    async with submission:
        (output,) = await exchange.unless_gone(submission.final_outputs())
        return json_response(writer.whole(output))


class AnswerWriter:
    """Writes the answer to one request: whole, or as lines."""

    def __init__(self, model: str, parser: ChatParser, start: float, *, is_chat: bool) -> None:
        """`start` is the time.monotonic() at which the request was read."""
        self._model = model
        self._reader = BlockReader(parser)
        self._is_chat = is_chat
        self._start = start
        self._first: float | None = None

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Returns the answer as one object."""
        pieces = self._read(output)
        calls = [call for piece in pieces for call in piece.get("tool_calls", ())]
        text, thinking = ("".join(p.get(field, "") for p in pieces) for field in ("content", "thinking"))
        more: Piece = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        return self._object({"content": text, **more}) | self._ending(output)

    async def lines(self, submission: Submission) -> AsyncGenerator[bytes, None]:
        """Yields the answer line by line."""
        async for _, output in submission.outputs():
            for piece in self._read(output):
                yield _line(self._object(piece) | {"done": False})
            if output.finished:
                yield _line(self._object({}) | self._ending(output))

    def _read(self, output: RequestOutput) -> list[Piece]:
        """Returns the pieces of an output. A call is one piece, at its end."""
        if self._first is None:
            self._first = time.monotonic()
        return [piece for event in self._reader.read(output) if (piece := _piece(event)) is not None]

    def _object(self, piece: Piece) -> dict[str, Any]:
        head = {"model": self._model, "created_at": _now()}
        if self._is_chat:
            return head | {"message": {"role": "assistant", "content": "", **piece}}
        piece = dict(piece)
        return head | {"response": piece.pop("content", ""), **piece}

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        now = time.monotonic()
        first = now if self._first is None else self._first
        return {
            "done": True,
            "done_reason": "length" if output.outputs[0].finish_reason == "length" else "stop",
            "total_duration": int((now - self._start) * _NS),
            "load_duration": 0,
            "prompt_eval_count": self._reader.num_prompt_tokens,
            "prompt_eval_duration": int((first - self._start) * _NS),
            "eval_count": self._reader.num_output_tokens,
            "eval_duration": int((now - first) * _NS),
        }


def _piece(event: BlockEvent) -> Piece | None:
    """Returns what a line shows of an event; None for nothing."""
    block = event.block
    if block.kind == "call" and event.step == "close":
        call = {"function": {"name": block.name, "arguments": arguments_of(block.text)}}
        return {"tool_calls": [call]}
    if block.kind == "call" or event.step != "grow":
        return None
    return {"content" if block.kind == "text" else "thinking": event.text}


async def embed(exchange: Exchange) -> Response:
    """Embeds texts, in Ollama's form."""
    body = await exchange.read(EMBED)
    model, start = await check_model(exchange, body.model), time.monotonic()
    vectors, num_tokens = await _embed(exchange, body) if body.texts else ([], 0)
    return json_response(
        {
            "model": model,
            "embeddings": vectors,
            "total_duration": int((time.monotonic() - start) * _NS),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }
    )


async def embeddings(exchange: Exchange) -> Response:
    """Embeds one text, in Ollama's older form."""
    body = await exchange.read(EMBEDDINGS)
    await check_model(exchange, body.model)
    vectors, _ = await _embed(exchange, OllamaEmbedBody(model=body.model, input=body.prompt))
    return json_response({"embedding": vectors[0]})


async def _embed(exchange: Exchange, body: OllamaEmbedBody) -> tuple[list[Any], int]:
    """Returns (the embeddings of a body's texts, the number of their tokens)."""
    asked = body.as_embedding()
    outputs = await pool_texts(exchange, asked, body.texts, asked.params("embed"))
    return [output.outputs.data.tolist() for output in outputs], sum(len(output.prompt_token_ids) for output in outputs)


async def list_models(exchange: Exchange) -> Response:
    """Lists the served model by each of its names, and its adapters."""
    state = exchange.state
    cards = [_card(state, name) for name in state.model_names]
    for name, parent in state.part(AdapterRegistry).list():
        details = cards[0]["details"] | {"parent_model": parent or state.model_name}
        cards.append(cards[0] | {"name": name, "model": name, "details": details})
    return json_response({"models": cards})


async def list_running(exchange: Exchange) -> Response:
    """Lists the served model, which is always loaded."""
    state = exchange.state
    loaded = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": state.max_model_len}
    return json_response({"models": [_card(state, name) | loaded for name in state.model_names]})


async def show(exchange: Exchange) -> Response:
    """Describes the served model: its format, size and capabilities."""
    body, state = await exchange.read(SHOW), exchange.state
    await check_model(exchange, body.model or body.name or "")
    hf, kind = state.engine.model_config.hf_config, _family(state)
    tokenizer, form = state.engine.tokenizer, state.part(ChatFormat)
    capabilities = {
        "completion": "generate" in state.supported_tasks,
        "embedding": "embed" in state.supported_tasks,
        "tools": form.tool_spec is not None,
        "thinking": form.reasoning_spec is not None,
    }
    sizes = {"context_length": state.max_model_len, "embedding_length": hf.hidden_size}
    more = {"block_count": hf.num_hidden_layers, "attention.head_count": hf.num_attention_heads}
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "template": (tokenizer.chat_templates.get("default") or "") if tokenizer is not None else "",
            "details": _details(state),
            "model_info": {
                "general.architecture": kind,
                **{f"{kind}.{name}": value for name, value in {**sizes, **more}.items()},
            },
            "capabilities": [name for name, has in capabilities.items() if has],
            "modified_at": _made(state),
        }
    )


async def show_version(exchange: Exchange) -> Response:
    """Returns the version of Ollama whose API this is."""
    return json_response({"version": API_VERSION})


async def refuse(exchange: Exchange) -> Response:
    """Refuses: models are neither fetched, made nor removed through this API."""
    path = exchange.request.url.path
    words = f"{path} is not offered: the server serves the model that it was started with (quire serve MODEL)"
    return json_response({"error": words}, 501)


async def check_model(exchange: Exchange, name: str) -> str:
    """Returns the model's name for the answer: as it was asked for. Raises NotFoundError."""
    state = exchange.state
    await exchange.find_model(name if name in state.model_names else name.removesuffix(DEFAULT_TAG))
    return name or state.model_name


def _card(state: ServerState, name: str) -> dict[str, Any]:
    model = state.engine.model_config
    files = sorted(model.model_dir.glob("*.safetensors")) if model.model_dir is not None else []
    return {
        "name": name,
        "model": name,
        "modified_at": _made(state),
        "size": sum(file.stat().st_size for file in files),
        "digest": hashlib.sha256(hash_model(model).encode()).hexdigest(),
        "details": _details(state),
    }


def _details(state: ServerState) -> Mapping[str, Any]:
    model = state.engine.model_config
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": _family(state),
        "families": [_family(state)],
        "parameter_size": "",
        "quantization_level": model.quantization or _TYPES.get(model.hf_config.dtype or "", ""),
    }


def _family(state: ServerState) -> str:
    return str(state.engine.model_config.hf_config.get("model_type", "unknown"))


def _loaded(model: str, empty: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to a request without text, which asks only to load the model."""
    return {"model": model, "created_at": _now(), **empty, "done": True, "done_reason": "load"}


def _made(state: ServerState) -> str:
    return datetime.fromtimestamp(state.member.created, UTC).isoformat().replace("+00:00", "Z")


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _line(value: dict[str, Any]) -> bytes:
    return encode_json(value) + b"\n"


def _work(path: str, handler: Any, body: BodyReader[Any], task: str) -> Endpoint:
    return Endpoint(
        path=path, handler=handler, access=Access.KEY, body=body, task=task, is_work=True, shape_error=ollama_error
    )


def _refused(path: str, method: str = "POST") -> Endpoint:
    return Endpoint(path=path, handler=refuse, access=Access.KEY, methods=(method,), shape_error=ollama_error)


ENDPOINTS = (
    _work("/api/chat", chat, CHAT, "generate"),
    _work("/api/generate", generate, GENERATE, "generate"),
    _work("/api/embed", embed, EMBED, "embed"),
    _work("/api/embeddings", embeddings, EMBEDDINGS, "embed"),
    Endpoint(path="/api/tags", handler=list_models, access=Access.KEY, methods=("GET",), shape_error=ollama_error),
    Endpoint(path="/api/ps", handler=list_running, access=Access.KEY, methods=("GET",), shape_error=ollama_error),
    Endpoint(path="/api/show", handler=show, access=Access.KEY, body=SHOW, shape_error=ollama_error),
    Endpoint(path="/api/version", handler=show_version, access=Access.KEY, methods=("GET",), shape_error=ollama_error),
    *(_refused(f"/api/{verb}") for verb in ("pull", "push", "create", "copy")),
    _refused("/api/delete", "DELETE"),
)

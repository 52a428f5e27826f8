"""The render routes: a request as token ids and sampling parameters, without generating anything.

For routers that look for cached prefixes, and for servers that take token ids; only with --enable-scale-out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from quire.errors import ValidationError
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.http.errors import ErrorShape, HttpError, anthropic_error, error_body
from quire.frontend.new_request import ParsedPrompt
from quire.frontend.openai.protocol.chat import ChatBody
from quire.frontend.openai.protocol.response_items import messages_of, with_instructions
from quire.frontend.openai.protocol.sampling import GenerationBody
from quire.frontend.openai.rendering import plan_chats, render_chats
from quire.frontend.openai.routes.chat import CHAT
from quire.frontend.openai.routes.completions import COMPLETION, plan_completion, tokenize_prompts
from quire.frontend.openai.routes.messages import MESSAGES
from quire.frontend.openai.routes.responses import RESPONSES
from quire.sampling_params import SamplingParams

_OUR_OWN = frozenset({"skip_clone", "eos_token_id", "bad_words_token_ids"})
"""Parameters that the frontend sets for the engine."""
Renderer = Callable[[Exchange], Awaitable[Any]]


async def render_completion(exchange: Exchange) -> list[dict[str, Any]]:
    """Returns the engine requests of a body of /v1/completions, one for each prompt."""
    body = await exchange.read(COMPLETION)
    model = await exchange.find_model(body.model)
    request_id = f"cmpl-{body.request_id or exchange.request_id}"
    texts, params = await plan_completion(exchange, body)
    prompts = await tokenize_prompts(exchange, body, texts, params)
    write = partial(_request, exchange, body, model, params=params)
    return [write(f"{request_id}-{index}", prompt) for index, prompt in enumerate(prompts)]


async def render_chat_completion(exchange: Exchange) -> dict[str, Any]:
    """Returns the engine request of a body of /v1/chat/completions."""
    body = await exchange.read(CHAT)
    return await _render_chat(exchange, body, f"chatcmpl-{body.request_id or exchange.request_id}")


async def render_message(exchange: Exchange) -> dict[str, Any]:
    """Returns the engine request of a body of /v1/messages."""
    chat = await exchange.convert((await exchange.read(MESSAGES)).as_chat)
    return await _render_chat(exchange, chat, f"msg_{exchange.request_id}")


async def render_response(exchange: Exchange) -> dict[str, Any]:
    """Returns the engine request of a body of /v1/responses, without stored responses."""
    body = await exchange.read(RESPONSES)
    if body.previous_response_id is not None:
        raise ValidationError(
            "rendering knows no stored responses; send the whole conversation as input", param="previous_response_id"
        )
    messages = await exchange.convert(lambda: messages_of(body.input))
    chat = body.as_chat(with_instructions(body.instructions, messages))
    return await _render_chat(exchange, chat, f"resp_{exchange.request_id}")


async def _render_chat(exchange: Exchange, body: ChatBody, request_id: str) -> dict[str, Any]:
    model = await exchange.find_model(body.model)
    params, plan = await plan_chats(exchange, [body])
    chat = await render_chats(exchange, [body], params, plan)
    return _request(exchange, body, model, request_id, chat.prompt, params=chat.params)


def _request(
    exchange: Exchange,
    body: GenerationBody,
    model: str,
    request_id: str,
    prompt: ParsedPrompt,
    *,
    params: SamplingParams,
) -> dict[str, Any]:
    """Returns a request in vLLM's form of tokens in, tokens out."""
    token_ids = prompt.token_ids or []
    sampling = {name: getattr(params, name) for name in SamplingParams.__struct_fields__ if name not in _OUR_OWN}
    if params.max_tokens is None:
        sampling["max_tokens"] = exchange.state.max_model_len - len(token_ids)
    return {
        "request_id": request_id,
        "token_ids": token_ids,
        "features": None,
        "sampling_params": msgspec.to_builtins(sampling),
        "model": model,
        "stream": bool(body.stream),
        "stream_options": msgspec.to_builtins(body.stream_options),
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "kv_transfer_params": None,
    }


def _row(path: str, render: Renderer, body: BodyReader[Any], shape_error: ErrorShape = error_body) -> Endpoint:
    async def handler(exchange: Exchange) -> Response:
        if not exchange.state.config.enable_scale_out:
            raise HttpError(403, f"{path} is off; start the server with --enable-scale-out")
        return json_response(await render(exchange))

    handler.__name__ = render.__name__
    handler.__doc__ = render.__doc__
    return Endpoint(path=path, handler=handler, access=Access.KEY, body=body, task="generate", shape_error=shape_error)


ENDPOINTS = (
    _row("/v1/completions/render", render_completion, COMPLETION),
    _row("/v1/chat/completions/render", render_chat_completion, CHAT),
    _row("/v1/messages/render", render_message, MESSAGES, anthropic_error),
    _row("/v1/responses/render", render_response, RESPONSES),
)

"""The render routes: what a request would ask the engine for, as token ids and sampling parameters.

Nothing is generated. For routers that look for cached prefixes, and for servers that take token ids from others; with
--enable-scale-out only.
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
from quire.frontend.http.endpoint import Endpoint, RequestContext, json_response
from quire.frontend.http.errors import ErrorShape, HttpError, error_body
from quire.frontend.new_request import TokensPrompt
from quire.frontend.openai.chat.request import prepare_chats
from quire.frontend.openai.protocol.chat import ChatBody
from quire.frontend.openai.protocol.response_items import messages_of, with_instructions
from quire.frontend.openai.protocol.sampling import GenerationBody
from quire.frontend.openai.rendering import PromptRenderer
from quire.frontend.openai.routes.chat import CHAT
from quire.frontend.openai.routes.completions import COMPLETION, prepare_completion
from quire.frontend.openai.routes.messages import MESSAGES, error_object
from quire.frontend.openai.routes.responses import RESPONSES
from quire.sampling_params import SamplingParams

_OUR_OWN = frozenset({"skip_clone", "eos_token_id", "bad_words_token_ids"})
"""Parameters that the frontend sets for the engine."""
Renderer = Callable[[RequestContext], Awaitable[Any]]


async def render_completion(context: RequestContext) -> list[dict[str, Any]]:
    """What /v1/completions would generate from: one request for each prompt."""
    body = await context.read(COMPLETION)
    model = context.state.check_model(body.model)
    request_id = f"cmpl-{body.request_id or context.request_id}"
    prompts, params = await prepare_completion(context, body, reserves=False)
    write = partial(_request, context, body, model, params=params)
    return [write(f"{request_id}-{index}", prompt) for index, prompt in enumerate(prompts)]


async def render_chat_completion(context: RequestContext) -> dict[str, Any]:
    """What /v1/chat/completions would generate from."""
    body = await context.read(CHAT)
    return await _render_chat(context, body, f"chatcmpl-{body.request_id or context.request_id}")


async def render_message(context: RequestContext) -> dict[str, Any]:
    """What /v1/messages would generate from."""
    chat = await context.work_on_body((await context.read(MESSAGES)).as_chat)
    return await _render_chat(context, chat, f"msg_{context.request_id}")


async def render_response(context: RequestContext) -> dict[str, Any]:
    """What /v1/responses would generate from. It knows no stored responses."""
    body = await context.read(RESPONSES)
    if body.previous_response_id is not None:
        raise ValidationError(
            "rendering knows no stored responses; send the whole conversation as input", param="previous_response_id"
        )
    messages = await context.state.part(PromptRenderer).run_sized(body.input, lambda: messages_of(body.input))
    chat = body.as_chat(with_instructions(body.instructions, messages))
    return await _render_chat(context, chat, f"resp_{context.request_id}")


async def _render_chat(context: RequestContext, body: ChatBody, request_id: str) -> dict[str, Any]:
    model = context.state.check_model(body.model)
    chat = await prepare_chats(context, [body], reserves=False)
    return _request(context, body, model, request_id, chat.prompt, params=chat.params)


def _request(
    context: RequestContext,
    body: GenerationBody,
    model: str,
    request_id: str,
    prompt: TokensPrompt,
    *,
    params: SamplingParams,
) -> dict[str, Any]:
    """A request in vLLM's form of tokens in, tokens out."""
    token_ids = prompt["prompt_token_ids"]
    sampling = {name: getattr(params, name) for name in SamplingParams.__struct_fields__ if name not in _OUR_OWN}
    if params.max_tokens is None:
        sampling["max_tokens"] = context.state.max_model_len - len(token_ids)
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
    async def handler(context: RequestContext) -> Response:
        if not context.state.config.enable_scale_out:
            raise HttpError(403, f"{path} is off; start the server with --enable-scale-out")
        return json_response(await render(context))

    handler.__name__ = render.__name__
    handler.__doc__ = render.__doc__
    return Endpoint(path=path, handler=handler, access=Access.KEY, body=body, task="generate", shape_error=shape_error)


ENDPOINTS = (
    _row("/v1/completions/render", render_completion, COMPLETION),
    _row("/v1/chat/completions/render", render_chat_completion, CHAT),
    _row("/v1/messages/render", render_message, MESSAGES, error_object),
    _row("/v1/responses/render", render_response, RESPONSES),
)

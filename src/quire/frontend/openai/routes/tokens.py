"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from quire.errors import ValidationError
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader, Name, Object, RequestBody, Text, TokenIds
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.openai.protocol.chat import Messages, Tools, check_template_variables, tools_for_template
from quire.frontend.openai.rendering import PromptRenderer
from quire.frontend.text.tokenizer import Tokenizer


class TokenizeBody(RequestBody, kw_only=True):
    """Body of /tokenize: a text or a conversation, one of `prompt` and `messages`."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    """Tools offered in the conversation."""
    add_special_tokens: bool | None = None
    """Default: true for a text, false for a conversation, whose template writes them."""
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: Object | None = None
    media_io_kwargs: Object | None = None
    mm_processor_kwargs: Object | None = None

    EXAMPLE = {"prompt": "A quire is a gathering of pages."}  # noqa: RUF012
    NEUTRAL = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}  # noqa: RUF012

    def check_form(self) -> None:
        """Raises ValidationError unless exactly one of the two is set."""
        if (self.prompt is None) == (self.messages is None):
            raise ValidationError("give either prompt or messages", param="prompt")


class DetokenizeBody(RequestBody, kw_only=True):
    """Body of /detokenize: token ids."""

    model: Name | None = None
    tokens: TokenIds

    EXAMPLE = {"tokens": [100, 101, 102]}  # noqa: RUF012


TOKENIZE = BodyReader(TokenizeBody)
DETOKENIZE = BodyReader(DetokenizeBody)
LONG_LIST = 4096
"""Number of ids above which decoding runs on the text thread."""


async def tokenize(exchange: Exchange) -> Response:
    """Returns the token ids of a text, or of a conversation as the model would see it."""
    body = await exchange.read(TOKENIZE)
    body.check_form()
    state = exchange.state
    await exchange.find_model(body.model)
    tokenizer = await state.engine.get_tokenizer()
    renderer, messages, text = state.part(PromptRenderer), body.messages, body.prompt or ""
    adds_special = messages is None if body.add_special_tokens is None else body.add_special_tokens

    def read() -> list[int]:
        prompt = text
        if messages is not None:
            prompt = renderer.render_chat(
                messages,
                chat_template=body.chat_template,
                tools=tools_for_template(body.tools) if body.tools else None,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                variables=check_template_variables(body.chat_template_kwargs),
                adapter=exchange.adapter,
            )
        return renderer.read_prompt(prompt, {"add_special_tokens": adds_special}).token_ids or []

    ids = await exchange.convert(read)
    answer = {"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        answer["token_strs"] = tokenizer.convert_ids_to_tokens(ids)
    return json_response(answer)


async def detokenize(exchange: Exchange) -> Response:
    """Returns the text of token ids."""
    body = await exchange.read(DETOKENIZE)
    state = exchange.state
    await exchange.find_model(body.model)
    tokenizer = await state.engine.get_tokenizer()
    unknown = max(body.tokens, default=0)
    if unknown >= len(tokenizer):
        raise ValidationError(
            f"tokens holds id {unknown}, outside the vocabulary [0, {len(tokenizer)})", param="tokens", value=unknown
        )
    if len(body.tokens) > LONG_LIST:
        return json_response({"prompt": await state.engine.text_thread.run(lambda: tokenizer.decode(body.tokens))})
    return json_response({"prompt": tokenizer.decode(body.tokens)})


async def tokenizer_info(exchange: Exchange) -> Response:
    """Returns the tokenizer's configuration; served with --enable-tokenizer-info-endpoint."""
    return json_response(describe(await exchange.state.engine.get_tokenizer(), exchange.state.max_model_len))


def describe(tokenizer: Tokenizer, max_model_len: int) -> dict[str, Any]:
    """Returns a tokenizer in the form of its configuration files, without paths."""
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "backend": "tokenizers",
        **tokenizer.special_tokens_map,
        "model_max_length": max_model_len,
        "chat_template": tokenizer.chat_template,
        "added_tokens_decoder": {str(i): content for i, content in sorted(tokenizer.added_token_ids.items())},
    }


ENDPOINTS = (
    Endpoint(path="/tokenize", handler=tokenize, access=Access.KEY, body=TOKENIZE),
    Endpoint(path="/detokenize", handler=detokenize, access=Access.KEY, body=DETOKENIZE),
    Endpoint(
        path="/tokenizer_info",
        handler=tokenizer_info,
        access=Access.KEY,
        methods=("GET",),
        is_enabled=lambda config: config.enable_tokenizer_info_endpoint,
    ),
)

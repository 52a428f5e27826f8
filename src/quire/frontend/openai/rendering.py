"""Rendering: from a request's text or messages to token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from quire.config.server import ServerConfig
from quire.errors import ConfigError, ValidationError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.new_request import ParsedPrompt
from quire.frontend.openai.protocol.chat import ChatBody
from quire.frontend.openai.protocol.completion import CompletionBody
from quire.frontend.text.chat_template import ContentFormat


class PromptRenderer:
    """Renders conversations and tokenizes prompts. Both may take long: call them in `Exchange.convert`."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig) -> None:
        """Raises ConfigError for variables of the chat template that are no JSON object."""
        self._processor = engine.pipeline.input_processor
        self._tokenizer = engine.tokenizer
        self._content_format = cast("ContentFormat", config.chat_template_content_format)
        self._trusts_templates = config.trust_request_chat_template
        self._variables = _parse_variables(config.default_chat_template_kwargs)
        self._thread = engine.pipeline.text_thread

    def read_prompt(
        self,
        prompt: str | Sequence[int],
        options: Mapping[str, Any],
        *,
        cache_salt: str | None = None,
        max_tokens: int | None = 0,
    ) -> ParsedPrompt:
        """Returns a prompt with its token ids. `options` are `tokenization_kwargs`.

        Unless `max_tokens` is 0 it must leave room for so many tokens (None: for one). Raises ValidationError.
        """
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, list(prompt))
        parsed = self._processor.read_prompt(ParsedPrompt(text, ids, cache_salt), options)
        if max_tokens != 0:
            self._processor.validate_room(len(parsed.token_ids or ()), max_tokens)
        return parsed

    def tokenization(self, body: ChatBody | CompletionBody, max_tokens: int | None) -> dict[str, Any]:
        """Returns the `tokenization_kwargs` of a body. A prompt that is cut to -1 leaves room for `max_tokens`."""
        options: dict[str, Any] = {"add_special_tokens": body.add_special_tokens}
        keep = body.truncate_prompt_tokens
        if keep is not None:
            room = self._processor.max_model_len - (max_tokens or 1)
            options["truncate_prompt_tokens"] = max(1, room) if keep == -1 else keep
        if body.truncation_side is not None:
            options["truncation_side"] = body.truncation_side
        return options

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt text of a conversation. Raises ValidationError."""
        if self._tokenizer is None:
            raise ValidationError(
                "a conversation needs the tokenizer, and the engine was started with --skip-tokenizer-init; use "
                "/v1/completions with token ids",
                param="messages",
            )
        if chat_template is not None and not self._trusts_templates:
            raise ValidationError(
                "chat_template is refused: a template is a program; start the server with "
                "--trust-request-chat-template to run what requests bring",
                param="chat_template",
            )
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=self._content_format,
            tokenize=False,
            documents=documents,
            **{**self._variables, **(variables or {})},
        )
        assert isinstance(text, str)
        return text

    def find_token(self, text: str) -> int | None:
        """Returns the id of the token that is written `text`; None if there is none."""
        return None if self._tokenizer is None else self._tokenizer.convert_tokens_to_ids([text])[0]

    async def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a text; 0 without a tokenizer."""
        tokenizer = self._tokenizer
        return 0 if tokenizer is None else await self._thread.run(len(text), lambda: len(tokenizer.encode(text, False)))


def _parse_variables(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"--default-chat-template-kwargs {text!r} is not a JSON object")
    return value

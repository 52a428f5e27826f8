"""From a request's text or messages to token ids, without holding up the event loop.

Short texts are handled at once; anything long goes to a thread, one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from quire.config.server import ServerConfig
from quire.errors import ConfigError, PromptTooLongError, ValidationError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.new_request import PromptType, TokensPrompt
from quire.frontend.openai.protocol.sampling import GenerationBody
from quire.frontend.text.chat_template import ContentFormat
from quire.frontend.text.tokenizer import LONG_TEXT_CHARS

Result = TypeVar("Result")


class PromptRenderer:
    """Renders conversations and tokenizes prompts."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig) -> None:
        self._processor = engine.pipeline.input_processor
        self._tokenizer = engine.tokenizer
        self._content_format = cast("ContentFormat", config.chat_template_content_format)
        self._trusts_templates = config.trust_request_chat_template
        self._variables = _parse_variables(config.default_chat_template_kwargs)
        self._thread = engine.pipeline.text_thread

    async def tokenize(
        self, prompt: str | Sequence[int], options: Mapping[str, Any], *, cache_salt: str | None = None
    ) -> TokensPrompt:
        """Ids (and text) of one prompt. `options` are `tokenization_kwargs`. Raises ValidationError."""
        (tokens,) = await self.tokenize_all([prompt], options, cache_salt=cache_salt)
        return tokens

    async def tokenize_all(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: Mapping[str, Any],
        *,
        cache_salt: str | None = None,
        max_tokens: int | None = 0,
    ) -> list[TokensPrompt]:
        """The same of several, each of which must leave room for `max_tokens`, where that is not 0.

        The first that is refused refuses them all.
        """
        salt = {} if cache_salt is None else {"cache_salt": cache_salt}

        def tokenize_one(prompt: str | Sequence[int]) -> TokensPrompt:
            key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            tokens = self._processor.tokenize(cast("PromptType", {key: prompt, **salt}), options)
            if max_tokens != 0:
                self.check_room(len(tokens["prompt_token_ids"]), max_tokens)
            return tokens

        return await self._thread.run(_size(prompts), lambda: [tokenize_one(prompt) for prompt in prompts])

    def truncation(self, body: GenerationBody, max_tokens: int | None) -> dict[str, Any]:
        """The `tokenization_kwargs` by which a request has its prompt cut. What "fits" leaves room for `max_tokens`."""
        options: dict[str, Any] = {}
        keep = body.truncate_prompt_tokens
        if keep is not None:
            room = self._processor.max_model_len - (max_tokens or 1)
            options["truncate_prompt_tokens"] = max(1, room) if keep == -1 else keep
        if body.truncation_side is not None:
            options["truncation_side"] = body.truncation_side
        return options

    async def render_chat(
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
        """The prompt text of a conversation. Raises ValidationError."""
        tokenizer = self._tokenizer
        if tokenizer is None:
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
        text = await self._thread.run(
            _size([messages, tools or (), documents or (), variables or ()]),
            lambda: tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                content_format=self._content_format,
                tokenize=False,
                documents=documents,
                **{**self._variables, **(variables or {})},
            ),
        )
        assert isinstance(text, str)
        return text

    def find_token(self, text: str) -> int | None:
        """The id of the token that is written so; None if there is none."""
        return None if self._tokenizer is None else self._tokenizer.convert_tokens_to_ids([text])[0]

    async def count_tokens(self, text: str) -> int:
        """How many tokens a text has; 0 without a tokenizer."""
        tokenizer = self._tokenizer
        return 0 if tokenizer is None else await self._thread.run(len(text), lambda: len(tokenizer.encode(text, False)))

    async def run_sized(self, value: Any, work: Callable[[], Result]) -> Result:
        """The result of work on `value`: at once, or on the thread if there is much text in it."""
        return await self._thread.run(_size(value), work)

    def check_room(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raises ValidationError if prompt and output cannot both fit the context."""
        limit = self._processor.max_model_len
        if num_prompt_tokens >= limit:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and the context {limit} (max_model_len): there is no room "
                "for a single output token; shorten the prompt",
                param="prompt",
                value=num_prompt_tokens,
            )
        if max_tokens is not None and num_prompt_tokens + max_tokens > limit:
            raise ValidationError(
                f"max_tokens={max_tokens} and a prompt of {num_prompt_tokens} tokens are more than the context of "
                f"{limit} (max_model_len); ask for at most {limit - num_prompt_tokens}",
                param="max_tokens",
                value=max_tokens,
            )


def _size(value: Any) -> int:
    """About how many characters a conversation holds, looked at no further than matters."""
    size, stack = 0, [value]
    while stack and size <= LONG_TEXT_CHARS:
        item = stack.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            size += len(item)
            stack.extend(item.values())
        elif isinstance(item, Sequence):
            size += len(item)
            if size <= LONG_TEXT_CHARS:
                stack.extend(item)
    return size


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

"""From a request's text or messages to token ids, and the path of a conversation of any route to the engine: plan,
admit, render, submit."""

from __future__ import annotations

import hmac
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from quire.config.server import ServerConfig
from quire.errors import ConfigError, ValidationError
from quire.frontend.adapters import ServedAdapter
from quire.frontend.admission import estimate_text_tokens
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.embeds import Embeds
from quire.frontend.http.auth import shown_key
from quire.frontend.http.endpoint import Exchange
from quire.frontend.new_request import ParsedPrompt
from quire.frontend.openai.chat.format import ChatFormat, ChatPlan
from quire.frontend.openai.protocol.chat import ChatBody
from quire.frontend.openai.protocol.completion import CompletionBody
from quire.frontend.openai.protocol.sampling import make_sampling_params
from quire.frontend.openai.submission import Submission, admit
from quire.frontend.text.chat_template import ContentFormat
from quire.frontend.text.tokenizer import LONG_TEXT_CHARS
from quire.sampling_params import SamplingParams


class PromptRenderer:
    """Renders conversations and tokenizes prompts. Both may take long: call them in `Exchange.convert`."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig) -> None:
        """Raises ConfigError for variables of the chat template that are no JSON object."""
        self._processor = engine.pipeline.input_processor
        self._tokenizer = engine.tokenizer
        self._content_format = cast("ContentFormat", config.chat_template_content_format)
        self._trusts_templates = config.trust_request_chat_template
        self._variables = _parse_variables(config.default_chat_template_kwargs)
        self._thread = engine.text_thread

    def read_prompt(
        self,
        prompt: str | Sequence[int] | ParsedPrompt | Embeds,
        options: Mapping[str, Any],
        *,
        cache_salt: str | None = None,
        max_tokens: int | None = 0,
        prediction: str = "",
    ) -> ParsedPrompt:
        """Returns a prompt with its token ids. `options` are `tokenization_kwargs`.

        Unless `max_tokens` is 0 it must leave room for so many tokens (None: for one). Raises ValidationError.
        """
        if isinstance(prompt, str):
            parsed = ParsedPrompt(prompt)
        elif isinstance(prompt, np.ndarray):
            parsed = ParsedPrompt(embeds=prompt)
        else:
            parsed = prompt if isinstance(prompt, ParsedPrompt) else ParsedPrompt(token_ids=list(prompt))
        parsed = replace(parsed, cache_salt=cache_salt, prediction=prediction or ())
        parsed = self._processor.read_prompt(parsed, options)
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
        adapter: ServedAdapter | None = None,
    ) -> str:
        """Returns the prompt text of a conversation: by the template of the request, else that of its adapter, else the
        model's. Raises ValidationError."""
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
            chat_template=adapter.chat_template if chat_template is None and adapter is not None else chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=self._content_format,
            tokenize=False,
            documents=documents,
            **{**self._variables, **(variables or {})},
        )
        assert isinstance(text, str)
        return text

    def splice(self, text: str, embeds: EmbedsInChat, options: Mapping[str, Any]) -> ParsedPrompt:
        """Returns the prompt of a rendered conversation with its embeddings in the places of their marks. Raises
        ValidationError if the template has left one out, or repeated it."""
        assert self._tokenizer is not None, "a conversation was rendered"
        pieces = embeds.split(text)
        ids: list[int] = []
        is_token_ids: list[bool] = []
        rows: list[Embeds] = []
        for i, piece in enumerate(pieces):
            if i:
                array = embeds.arrays[i - 1]
                ids += [0] * len(array)
                is_token_ids += [False] * len(array)
                rows.append(array)
            piece_ids = self._tokenizer.encode(piece, bool(options.get("add_special_tokens", True)) and not i)
            ids += piece_ids
            is_token_ids += [True] * len(piece_ids)
            rows.append(np.zeros((len(piece_ids), embeds.arrays[0].shape[1]), np.float32))
        return ParsedPrompt("".join(pieces), ids, embeds=np.concatenate(rows), is_token_ids=is_token_ids)

    def take_embeds(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], EmbedsInChat]:
        """Returns a conversation with a mark in the place of each part of type prompt_embeds, and what the marks stand
        for. Raises ValidationError."""
        embeds = EmbedsInChat()
        marked: list[Mapping[str, Any]] = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list) and any(map(_is_embeds_part, content)):
                parts = [
                    {"type": "text", "text": embeds.add(self._processor.decode_embeds(part["data"]))}
                    if _is_embeds_part(part)
                    else part
                    for part in content
                ]
                message = {**message, "content": parts}
            marked.append(message)
        return marked, embeds

    def find_token(self, text: str) -> int | None:
        """Returns the id of the token that is written `text`; None if there is none."""
        return None if self._tokenizer is None else self._tokenizer.convert_tokens_to_ids([text])[0]

    async def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a text; 0 without a tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return 0
        if len(text) <= LONG_TEXT_CHARS:
            return len(tokenizer.encode(text, False))
        return await self._thread.run(lambda: len(tokenizer.encode(text, False)))


class EmbedsInChat:
    """The embeddings in a conversation, each with a text that stands in its place until the template is rendered."""

    def __init__(self) -> None:
        self.arrays: list[Embeds] = []
        self._mark = f"<embeds {uuid.uuid4().hex}>"

    def add(self, array: Embeds) -> str:
        """Returns the text to put in the place of an array."""
        self.arrays.append(array)
        return self._mark

    def split(self, text: str) -> list[str]:
        """Returns the texts before, between and after the arrays. Raises ValidationError."""
        pieces = text.split(self._mark)
        if len(pieces) != len(self.arrays) + 1:
            raise ValidationError(
                f"the chat template shows {len(pieces) - 1} of {len(self.arrays)} parts of prompt_embeds; put them "
                "where it repeats the text of a message once",
                param="messages",
            )
        return pieces


def _is_embeds_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "prompt_embeds" and isinstance(part.get("data"), str)


def cache_salt(exchange: Exchange, given: str | None) -> str | None:
    """Returns the salt of a request that sets `given`. With --isolate-cache-by-key it is unique to the key."""
    if not exchange.state.config.isolate_cache_by_key:
        return given
    identity = b"\0".join((shown_key(exchange.request), b"" if given is None else b"+" + given.encode()))
    return hmac.digest(exchange.state.member.salt_secret, identity, "sha256").hex()


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


@dataclass(frozen=True)
class PreparedChat:
    """Conversations ready for the engine. They share everything but their messages."""

    prompts: list[ParsedPrompt]
    params: SamplingParams
    plan: ChatPlan

    @property
    def prompt(self) -> ParsedPrompt:
        """The prompt of the only conversation."""
        (prompt,) = self.prompts
        return prompt


async def submit_chats(
    exchange: Exchange,
    bodies: Sequence[ChatBody],
    request_id: str,
    *,
    priority: int = 0,
    thinking_budget: int | None = None,
) -> tuple[PreparedChat, Submission]:
    """Hands conversations to the engine. All fields but `messages` are read from the first body.

    `thinking_budget` limits the model's reasoning, where it has one. Raises ValidationError, OverloadedError.
    """
    params, plan = await plan_chats(exchange, bodies)
    sizes = [estimate_text_tokens(texts_of(body.messages)) for body in bodies]
    async with admit(exchange, sizes, params) as submission:
        chat = await render_chats(exchange, bodies, params, plan, thinking_budget)
        await submission.send(chat.prompts, params, request_id, priority=priority)
    return chat, submission


async def plan_chats(exchange: Exchange, bodies: Sequence[ChatBody]) -> tuple[SamplingParams, ChatPlan]:
    """Returns the parameters and the plan that the conversations share. Raises ValidationError."""
    state, body = exchange.state, bodies[0]
    defaults = state.engine.pipeline.input_processor.sampling_defaults

    def plan() -> tuple[SamplingParams, ChatPlan]:
        params = make_sampling_params(body, defaults, max_tokens=body.output_limit, logprobs=body.num_logprobs)
        plan = state.part(ChatFormat).plan(body)
        plan.adjust(params)
        return params, plan

    params, chat_plan = await exchange.convert(plan)
    state.check_num_outputs(len(bodies) * params.n)
    return params, chat_plan


async def render_chats(
    exchange: Exchange,
    bodies: Sequence[ChatBody],
    params: SamplingParams,
    plan: ChatPlan,
    thinking_budget: int | None = None,
) -> PreparedChat:
    """Returns the conversations with their prompts, and adjusts `params` to them. Raises ValidationError."""
    renderer = exchange.state.part(PromptRenderer)
    prompts = await render_prompts(exchange, bodies, plan, params.max_tokens)
    texts = [prompt.text or "" for prompt in prompts]
    plan.limit_reasoning(params, texts, renderer.find_token, thinking_budget)
    plan = plan.place_form(params, texts, renderer.find_token)
    return PreparedChat(prompts, params, plan)


async def render_prompts(
    exchange: Exchange, bodies: Sequence[ChatBody], plan: ChatPlan, max_tokens: int | None = 0
) -> list[ParsedPrompt]:
    """Returns the prompts of conversations, through the model's chat template. Unless `max_tokens` is 0 they must leave
    room for so many tokens (None: for one)."""
    renderer, body = exchange.state.part(PromptRenderer), bodies[0]
    options = renderer.tokenization(body, max_tokens)
    salt = cache_salt(exchange, body.cache_salt)

    def render(each: ChatBody) -> ParsedPrompt:
        messages, embeds = renderer.take_embeds(each.messages)
        text = renderer.render_chat(
            messages,
            chat_template=each.chat_template,
            tools=plan.tools,
            documents=each.documents,
            add_generation_prompt=each.add_generation_prompt,
            continue_final_message=each.continue_final_message,
            variables=each.template_variables(),
            adapter=exchange.adapter,
        )
        prompt = renderer.splice(text, embeds, options) if embeds.arrays else text
        prediction = "" if each.prediction is None else each.prediction.text
        return renderer.read_prompt(prompt, options, cache_salt=salt, max_tokens=max_tokens, prediction=prediction)

    return await exchange.convert(lambda: list(map(render, bodies)))


def texts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the texts of a conversation, for a first estimate of its tokens."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = part.get("text") if isinstance(part, Mapping) else None
            if isinstance(text, str):
                yield text

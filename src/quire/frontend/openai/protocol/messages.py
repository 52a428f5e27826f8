"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, and their conversations in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.openai.protocol.chat import MAX_MESSAGES, RESERVED_VARIABLES, ChatBody
from quire.frontend.openai.protocol.fields import Name, Object, PositiveCount, RequestBody, Text, Word
from quire.frontend.openai.protocol.sampling import bound_of
from quire.frontend.prompts import MAX_CACHE_SALT_CHARS

Blocks = Text | Annotated[list[Object], Meta(max_length=4096)]


class Turn(msgspec.Struct):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks
    """Text, or blocks of it."""


class ConversationBody(RequestBody, kw_only=True):
    """What both routes read."""

    model: Name
    messages: Annotated[list[Turn], Meta(max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    chat_template_kwargs: Object | None = None
    tools: Annotated[list[Object], Meta(max_length=1024)] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None

    NEUTRAL = {  # noqa: RUF012
        "tools": ([],),
        "tool_choice": ({"type": "none"}, {"type": "auto"}),
        "thinking": ({"type": "disabled"},),
        "output_config": ({},),
    }

    def conversation(self) -> list[dict[str, Any]]:
        """Messages as chat templates know them, the system's first. Raises ValidationError for what is no text."""
        turns = [{"role": turn.role, "content": _text_parts(turn.content, "messages")} for turn in self.messages]
        if self.system is None:
            return turns
        return [{"role": "system", "content": _text_parts(self.system, "system")}, *turns]

    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs`, checked. Raises ValidationError."""
        reserved = RESERVED_VARIABLES.intersection(self.chat_template_kwargs or {})
        if reserved:
            raise ValidationError(
                f"chat_template_kwargs may not set {', '.join(sorted(reserved))}", param="chat_template_kwargs"
            )
        return dict(self.chat_template_kwargs or {})


class CountTokensBody(ConversationBody, kw_only=True):
    """A conversation whose length is wanted."""


class MessagesBody(ConversationBody, kw_only=True):
    """A conversation to be answered."""

    max_tokens: PositiveCount
    stream: bool | None = False
    stop_sequences: Annotated[list[Word], Meta(max_length=1024)] | None = None
    temperature: Annotated[float, bound_of("temperature")] | None = None
    top_k: Annotated[int, bound_of("top_k")] | None = None
    top_p: Annotated[float, bound_of("top_p")] | None = None
    metadata: Object | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    vllm_xargs: Object | None = None

    def as_chat(self) -> ChatBody:
        """The same request as /v1/chat/completions would read it."""
        return ChatBody(
            model=self.model,
            messages=self.conversation(),
            max_tokens=self.max_tokens,
            stream=self.stream,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            cache_salt=self.cache_salt,
        )


def _text_parts(content: str | Sequence[dict[str, Any]], param: str) -> Any:
    if isinstance(content, str):
        return content
    for block in content:
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = str(block.get("type"))[:60]
            raise ValidationError(
                f"{param} holds a block of type {kind!r}; this version of Quire takes text blocks only",
                param=param,
                value=kind,
            )
    return [{"type": "text", "text": block["text"]} for block in content]

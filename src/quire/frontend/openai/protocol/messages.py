"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, and the same requests in OpenAI's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.http.bodies import Name, Object, PositiveCount, RequestBody, Text, Word
from quire.frontend.new_request import MAX_CACHE_SALT_CHARS
from quire.frontend.openai.protocol.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatBody,
    FunctionDefinition,
    FunctionName,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolChoice,
)
from quire.frontend.openai.protocol.sampling import bound_of

Message = dict[str, Any]
Content = str | Sequence[Mapping[str, Any]]


def conversation_of(system: Content | None, turns: Sequence[tuple[str, Content]]) -> list[Message]:
    """The system's words, if there are any, and all turns. Raises ValidationError for what is no text.

    Turns of one role that follow one another are one: many templates know no others.
    """
    messages: list[Message] = []
    if system is not None:
        messages.append({"role": "system", "content": _text_parts("system", system)})
    for index, (role, content) in enumerate(turns):
        for message in _READERS[role](f"messages[{index}].content", content):
            if messages and _are_one(messages[-1], message):
                parts = _parts(messages[-1])
                parts.extend(_parts(message))
                messages[-1] |= {**message, "content": parts}
            else:
                messages.append(message)
    return messages


def _are_one(first: Message, second: Message) -> bool:
    return first["role"] == second["role"] != "tool" and "tool_calls" not in first and "reasoning" not in second


def _parts(message: Message) -> list[Message]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _system(where: str, content: Content) -> list[Message]:
    return [{"role": "system", "content": _text_parts(where, content)}]


def _user(where: str, content: Content) -> list[Message]:
    """What the user says, with results of tools as messages of their own, in order."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Message] = []
    parts: list[Message] = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if block.get("type") != "tool_result":
            parts.append(_text_part(place, block))
            continue
        if parts:
            messages.append({"role": "user", "content": parts})
            parts = []
        messages.append(_result(place, block))
    return [*messages, {"role": "user", "content": parts}] if parts or not messages else messages


def _result(where: str, block: Mapping[str, Any]) -> Message:
    content = block.get("content")
    parts = _text_parts(f"{where}.content", "" if content is None else content)
    text = parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)
    return {"role": "tool", "tool_call_id": _word(where, block, "tool_use_id"), "content": text}


def _assistant(where: str, content: Content) -> list[Message]:
    """What the model said, thought and called, in one message."""
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    parts: list[Message] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        place, kind = f"{where}[{index}]", block.get("type")
        if kind == "thinking":
            thoughts.append(_word(place, block, "thinking"))
        elif kind == "tool_use":
            calls.append(_call(place, block))
        elif kind != "redacted_thinking":  # which nobody here can read
            parts.append(_text_part(place, block))
    message: Message = {"role": "assistant", "content": parts or ""}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    return [{**message, "tool_calls": calls} if calls else message]


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise _refusal(f"{where}.input must be an object")
    function = {"name": _word(where, block, "name"), "arguments": arguments}
    return {"id": _word(where, block, "id"), "type": "function", "function": function}


_READERS = {"system": _system, "user": _user, "assistant": _assistant}


def _text_parts(where: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _refusal(f"{where} must be text or a list of blocks")
    return [_text_part(f"{where}[{index}]", block) for index, block in enumerate(content)]


def _text_part(where: str, block: Any) -> Message:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind != "text":
        shown = repr(kind[:60]) if isinstance(kind, str) else f"a {type(kind).__name__}"
        raise _refusal(f"{where} is a block of type {shown}; this server takes text only there")
    return {"type": "text", "text": _word(where, block, "text")}


def _word(where: str, block: Mapping[str, Any], field: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise _refusal(f"{where}.{field} must be text")
    return value


def _refusal(message: str) -> ValidationError:
    return ValidationError(message, param=message.partition("[")[0].partition(".")[0].partition(" ")[0])


Blocks = Text | Annotated[list[Object], Meta(max_length=4096)]


class Turn(msgspec.Struct):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks
    """Text, or blocks: text, tool_use, tool_result, thinking."""


class AnthropicTool(msgspec.Struct):
    """A function the model may call. Tools that would run on the server are refused in words."""

    name: FunctionName
    input_schema: Object | None = None
    """A JSON schema of its input; required."""
    description: Annotated[str, Meta(max_length=1 << 20)] | None = None
    type: Name | None = None
    strict: bool | None = None

    def as_tool(self) -> Tool:
        """The same in OpenAI's words. Raises ValidationError."""
        if self.type not in (None, "custom"):
            raise ValidationError(
                f"tools holds one of type {str(self.type)[:60]!r}; this server runs no tools, and takes those with an "
                "input_schema only",
                param="tools",
            )
        if self.input_schema is None:
            raise ValidationError(f"the tool {self.name} has no input_schema", param="tools")
        return Tool(FunctionDefinition(self.name, self.description, self.input_schema, self.strict))


class AnthropicToolChoice(msgspec.Struct):
    """Whether a tool must be used: any of them, or the one that is named."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    def as_choice(self) -> ToolChoice:
        """The same in OpenAI's words. Raises ValidationError."""
        if self.type != "tool":
            return "required" if self.type == "any" else self.type
        if self.name is None:
            raise ValidationError('tool_choice of type "tool" needs a name', param="tool_choice")
        return NamedToolChoice(NamedFunction(self.name))


class Thinking(msgspec.Struct):
    """Whether the model is to reason: variables of the chat template, enable_thinking and thinking."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: PositiveCount | None = None
    """With enabled: close it after so many tokens, where the server knows the tokens around it."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: no blocks of it are given."""


class OutputFormat(msgspec.Struct):
    """The form of the text."""

    type: Literal["json_schema"]
    schema: Object


class OutputConfig(msgspec.Struct):
    """What the answer is to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template, reasoning_effort."""
    format: OutputFormat | None = None


class ConversationBody(RequestBody, kw_only=True):
    """What both routes read."""

    model: Name
    messages: Annotated[list[Turn], Meta(max_length=MAX_MESSAGES)]
    """Where the last one is the assistant's, the answer goes on from it."""
    system: Blocks | None = None
    """What stands before the conversation."""
    chat_template_kwargs: Object | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    """Functions the model may call."""
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "What is a quire?"}]}  # noqa: RUF012

    def as_chat(self) -> ChatBody:
        """The same request as /v1/chat/completions would read it. Raises ValidationError."""
        if not self.messages:
            raise ValidationError("messages is empty; a conversation needs at least one message", param="messages")
        messages = conversation_of(self.system, [(turn.role, turn.content) for turn in self.messages])
        goes_on = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        thinking, config, choice = self.thinking, self.output_config, self.tool_choice
        form = config.format if config is not None else None
        return ChatBody(
            model=self.model,
            messages=messages,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            tools=[tool.as_tool() for tool in self.tools or ()] or None,
            tool_choice=None if choice is None else choice.as_choice(),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            include_reasoning=thinking is None or (thinking.type != "disabled" and thinking.display != "omitted"),
            reasoning_effort=config.effort if config is not None else None,
            response_format=None if form is None else {"type": "json_schema", "json_schema": {"schema": form.schema}},
            chat_template_kwargs=self._template_variables(),
        )

    @property
    def thinking_budget(self) -> int | None:
        """How long the model may reason."""
        thinking = self.thinking
        return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None

    def _template_variables(self) -> dict[str, Any]:
        given = self.chat_template_kwargs or {}
        if self.thinking is None:
            return given
        thinks = self.thinking.type != "disabled"
        return {"enable_thinking": thinks, "thinking": thinks, **given}


class CountTokensBody(ConversationBody, kw_only=True):
    """A conversation whose length is wanted."""


class MessagesBody(ConversationBody, kw_only=True):
    """A conversation to be answered."""

    max_tokens: PositiveCount
    stream: bool | None = False
    """Answer with server-sent events, as the text comes."""
    stop_sequences: Annotated[list[Word], Meta(max_length=1024)] | None = None
    temperature: Annotated[float, bound_of("temperature")] | None = None
    top_k: Annotated[int, bound_of("top_k")] | None = None
    top_p: Annotated[float, bound_of("top_p")] | None = None
    metadata: Object | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    vllm_xargs: Object | None = None
    mm_payload: Literal["tensors", "none"] | None = None
    return_mm_kwargs: bool | None = None

    watermarking: bool | None = None
    kv_transfer_params: Object | None = None
    ec_transfer_params: Object | None = None

    EXAMPLE = {**ConversationBody.EXAMPLE, "max_tokens": 40}  # noqa: RUF012 - a ClassVar of the base class
    NEUTRAL = {  # noqa: RUF012
        "watermarking": (False,),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    }
    WITHOUT_EFFECT = {  # noqa: RUF012
        "vllm_xargs": "it is for extensions, and there are none",
        "mm_payload": "no answer has processed media",
        "return_mm_kwargs": "no answer has processed media",
    }

    def as_chat(self) -> ChatBody:
        """The same request as /v1/chat/completions would read it. Raises ValidationError."""
        chat = super().as_chat()
        chat.max_tokens = self.max_tokens
        chat.stream = self.stream
        chat.stop = self.stop_sequences
        chat.temperature, chat.top_k, chat.top_p = self.temperature, self.top_k, self.top_p
        chat.cache_salt = self.cache_salt
        return chat

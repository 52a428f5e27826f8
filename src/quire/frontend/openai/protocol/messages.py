"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, and their conversion to a chat request."""

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
from quire.frontend.openai.protocol.sampling import ExtraArguments, bound_of

Message = dict[str, Any]
Content = str | Sequence[Mapping[str, Any]]


def conversation_of(system: Content | None, turns: Sequence[tuple[str, Content]]) -> list[Message]:
    """Returns the system prompt, if there is one, and all turns as messages. Raises ValidationError for images.

    Consecutive turns of one role become one message, because many templates accept no others.
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
    """Returns the user's text as messages, with the results of tools as separate messages, in order."""
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
    """Returns the model's text, reasoning and calls as one message."""
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
        elif kind != "redacted_thinking":  # encrypted
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
    """Text, or blocks of type text, tool_use, tool_result or thinking."""


class AnthropicTool(msgspec.Struct):
    """A function the model may call. Tools that would run on the server are refused."""

    name: FunctionName
    input_schema: Object | None = None
    """JSON schema of the input; required."""
    description: Annotated[str, Meta(max_length=1 << 20)] | None = None
    type: Name | None = None
    strict: bool | None = None

    def as_tool(self) -> Tool:
        """Returns the same in OpenAI's form. Raises ValidationError."""
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
    """Choice among the tools: any of them, one by name, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    def as_choice(self) -> ToolChoice:
        """Returns the same in OpenAI's form. Raises ValidationError."""
        if self.type != "tool":
            return "required" if self.type == "any" else self.type
        if self.name is None:
            raise ValidationError('tool_choice of type "tool" needs a name', param="tool_choice")
        return NamedToolChoice(NamedFunction(self.name))


class Thinking(msgspec.Struct):
    """Switch of the model's reasoning: the variables enable_thinking and thinking of the chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: PositiveCount | None = None
    """With enabled: maximum number of reasoning tokens, where the server knows the tokens around reasoning."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the answer has no blocks of reasoning."""


class OutputFormat(msgspec.Struct):
    """Form of the text."""

    type: Literal["json_schema"]
    schema: Object


class OutputConfig(msgspec.Struct):
    """Form and effort of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The variable reasoning_effort of the chat template."""
    format: OutputFormat | None = None


class ConversationBody(RequestBody, kw_only=True):
    """Common fields of both routes."""

    model: Name
    messages: Annotated[list[Turn], Meta(max_length=MAX_MESSAGES)]
    """Messages in order. If the last one is the assistant's, the answer continues it."""
    system: Blocks | None = None
    """Text before the conversation."""
    chat_template_kwargs: Object | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    """Functions the model may call."""
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    EXAMPLE = {"model": "demo", "messages": [{"role": "user", "content": "What is a quire?"}]}  # noqa: RUF012

    def as_chat(self) -> ChatBody:
        """Returns the request as a chat request. Raises ValidationError."""
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
        """Maximum number of reasoning tokens; None: unlimited."""
        thinking = self.thinking
        return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None

    def _template_variables(self) -> dict[str, Any]:
        given = self.chat_template_kwargs or {}
        if self.thinking is None:
            return given
        thinks = self.thinking.type != "disabled"
        return {"enable_thinking": thinks, "thinking": thinks, **given}


class CountTokensBody(ConversationBody, kw_only=True):
    """Body of /v1/messages/count_tokens: a conversation whose tokens are counted."""


class MessagesBody(ConversationBody, kw_only=True):
    """Body of /v1/messages: a conversation to be answered."""

    max_tokens: PositiveCount
    stream: bool | None = False
    """true: the answer is a stream of server-sent events."""
    stop_sequences: Annotated[list[Word], Meta(max_length=1024)] | None = None
    temperature: Annotated[float, bound_of("temperature")] | None = None
    top_k: Annotated[int, bound_of("top_k")] | None = None
    top_p: Annotated[float, bound_of("top_p")] | None = None
    metadata: Object | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    vllm_xargs: ExtraArguments | None = None
    """num_speculative_tokens, 0 to 128: most drafts of the request in a step; kv_store false: its blocks are kept out
    of --kv-store. Other keys have no effect."""
    mm_payload: Literal["tensors", "none"] | None = None
    return_mm_kwargs: bool | None = None

    watermarking: bool | None = None
    kv_transfer_params: Object | None = None
    ec_transfer_params: Object | None = None

    EXAMPLE = {**ConversationBody.EXAMPLE, "max_tokens": 40}  # noqa: RUF012 - a ClassVar of the base class
    NEUTRAL = {  # noqa: RUF012
        "watermarking": (False,),
        "ec_transfer_params": ({},),
    }
    WITHOUT_EFFECT = {  # noqa: RUF012
        "mm_payload": "no answer has processed media",
        "return_mm_kwargs": "no answer has processed media",
    }

    def as_chat(self) -> ChatBody:
        """Returns the request as a chat request. Raises ValidationError."""
        chat = super().as_chat()
        chat.max_tokens = self.max_tokens
        chat.stream = self.stream
        chat.stop = self.stop_sequences
        chat.temperature, chat.top_k, chat.top_p = self.temperature, self.top_k, self.top_p
        chat.cache_salt, chat.vllm_xargs = self.cache_salt, self.vllm_xargs
        chat.kv_transfer_params = self.kv_transfer_params
        return chat

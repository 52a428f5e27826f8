"""The body of OpenAI's /v1/responses, and its conversion to a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.http.bodies import (
    Count,
    Finite,
    Int64,
    Name,
    Object,
    PositiveCount,
    RequestBody,
    Text,
    TokenId,
    Word,
)
from quire.frontend.new_request import MAX_CACHE_SALT_CHARS
from quire.frontend.openai.protocol.chat import (
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

MAX_ITEMS = 1 << 16
LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
]


class ResponseTool(msgspec.Struct):
    """A tool. Functions are the only type; others are refused."""

    type: Name
    name: FunctionName | None = None
    description: Annotated[str, Meta(max_length=1 << 20)] | None = None
    parameters: Object | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Accepted without effect: the schema is enforced where tool_choice forces a call."""


class ResponseToolChoice(msgspec.Struct, omit_defaults=True):
    """{"type": "function", "name": …}, or {"type": "allowed_tools", "mode": …, "tools": […]}."""

    type: Name
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[Object], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """Form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema: Object | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, omit_defaults=True):
    """Form and length of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """The variable verbosity of the chat template."""


class ReasoningConfig(msgspec.Struct, omit_defaults=True):
    """Settings of the model's reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """The variable reasoning_effort of the chat template."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted without effect: reasoning is returned as it is."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(RequestBody, kw_only=True):
    """Body of /v1/responses: a conversation to be answered in items."""

    input: Text | Annotated[list[Object], Meta(max_length=MAX_ITEMS)]
    """Text, or items: messages, function calls, their outputs, reasoning."""
    model: Name | None = None
    instructions: Text | None = None
    """Instructions of the system before all items. Responses that follow this one do not inherit them."""
    previous_response_id: Name | None = None
    """Id of a stored response whose conversation is continued."""
    store: bool | None = True
    """true: the response is stored for a while, and can be read and continued."""
    background: bool | None = False
    """true: the request returns at once, and the response is read later."""
    stream: bool | None = False
    """true: the answer is a stream of server-sent events."""
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    include: Annotated[list[Include], Meta(max_length=64)] | None = None
    """message.output_text.logprobs has an effect; the others name items that do not occur here."""
    top_logprobs: Annotated[int, bound_of("logprobs")] | None = 0
    """Number of most likely tokens per position, where log-probabilities are included."""
    max_output_tokens: PositiveCount | None = None
    max_tool_calls: PositiveCount | None = None
    text: TextConfig | None = None
    """Form and length of the text."""
    reasoning: ReasoningConfig | None = None
    include_reasoning: bool = True
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    """Functions the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = "auto"
    parallel_tool_calls: bool | None = True
    """false: only the first call of an answer is returned."""
    truncation: Literal["auto", "disabled"] | None = "disabled"
    """auto: a conversation that does not fit is cut at its start."""
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = "auto"
    user: Name | None = None
    prompt_cache_key: Name | None = None

    temperature: Annotated[float, bound_of("temperature")] | None = None
    top_p: Annotated[float, bound_of("top_p")] | None = None
    top_k: Annotated[int, bound_of("top_k")] | None = None
    min_p: Annotated[float, bound_of("min_p")] | None = None
    presence_penalty: Annotated[float, bound_of("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bound_of("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, bound_of("repetition_penalty")] | None = None
    logit_bias: Annotated[dict[Name, Finite], Meta(max_length=65536)] | None = None
    seed: Int64 | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=1024)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=4096)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    skip_special_tokens: bool = True
    structured_outputs: Object | None = None
    """Form of the output, as in /v1/chat/completions; not together with text.format."""
    chat_template_kwargs: Object | None = None
    priority: Int64 = 0
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    vllm_xargs: ExtraArguments | None = None
    """num_speculative_tokens, 0 to 128: most drafts of the request in a step; kv_store false: its blocks are kept out
    of --kv-store. Other keys have no effect."""
    session_id: Name | None = None
    mm_payload: Literal["tensors", "none"] | None = None
    return_mm_kwargs: bool | None = None

    prompt: Object | None = None
    conversation: Name | Object | None = None
    previous_input_messages: Annotated[list[Object], Meta(max_length=MAX_ITEMS)] | None = None
    enable_response_messages: bool = False
    media_io_kwargs: Object | None = None
    mm_processor_kwargs: Object | None = None
    watermarking: bool | None = None
    kv_transfer_params: Object | None = None
    ec_transfer_params: Object | None = None

    EXAMPLE = {"input": "What is a quire?", "max_output_tokens": 40}  # noqa: RUF012 - a ClassVar of the base class
    NEUTRAL = {  # noqa: RUF012
        "prompt": (),
        "conversation": (),
        "previous_input_messages": ([],),
        "enable_response_messages": (False,),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "watermarking": (False,),
        "ec_transfer_params": ({},),
    }
    WITHOUT_EFFECT = {  # noqa: RUF012
        "max_tool_calls": "it counts tools that run on the server, and there are none",
        "prompt_cache_key": "equal beginnings share the cache whatever its value",
        "session_id": "requests of a session are served like others; equal prefixes are found by their content",
        "mm_payload": "no answer has processed media",
        "return_mm_kwargs": "no answer has processed media",
    }

    @property
    def own_names(self) -> Mapping[str, str]:
        return _FIELDS if self.structured_outputs else {**_FIELDS, "structured_outputs": "text"}

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer includes log-probabilities."""
        return LOGPROBS in (self.include or ())

    def as_chat(self, messages: list[dict[str, Any]]) -> ChatBody:
        """Returns the request as a chat request with these messages. Raises ValidationError."""
        tools = _chat_tools(self.tools or ())
        choice: ToolChoice | None = None
        if isinstance(self.tool_choice, ResponseToolChoice):
            tools, choice = _chosen(self.tool_choice, tools)
        else:
            choice = self.tool_choice
        return ChatBody(
            model=self.model,
            messages=messages,
            stream=self.stream,
            max_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs if self.wants_logprobs else 0,
            include_reasoning=self.include_reasoning,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            response_format=self._response_format(),
            chat_template_kwargs=self._template_variables(),
            **{name: getattr(self, name) for name in _TAKEN_OVER},
        )

    def _response_format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return None
        if self.structured_outputs:
            raise ValidationError(
                "text.format and structured_outputs are set; the form of an output is asked for in one field",
                param="text",
            )
        if form.type == "json_object":
            return {"type": "json_object"}
        if form.schema is None:
            raise ValidationError("text.format of type json_schema needs text.format.schema", param="text")
        return {"type": "json_schema", "json_schema": {"schema": form.schema}}

    def _template_variables(self) -> dict[str, Any] | None:
        if self.text is None or self.text.verbosity is None:
            return self.chat_template_kwargs
        return {"verbosity": self.text.verbosity, **(self.chat_template_kwargs or {})}


_TAKEN_OVER = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "structured_outputs", "priority", "cache_salt", "user", "vllm_xargs",
    "kv_transfer_params",
)  # fmt: skip
_FIELDS = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning",
}
"""Names of a chat request's fields that differ here."""


def _chat_tools(tools: Sequence[ResponseTool]) -> list[Tool]:
    found = []
    for tool in tools:
        if tool.type != "function":
            raise ValidationError(
                f"tools holds one of type {tool.type[:60]!r}; this server runs no tools, and takes functions only",
                param="tools",
                value=tool.type,
            )
        if tool.name is None:
            raise ValidationError("a function in tools has no name", param="tools")
        found.append(Tool(FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict)))
    return found


def _chosen(choice: ResponseToolChoice, tools: list[Tool]) -> tuple[list[Tool], ToolChoice]:
    """Returns (the tools that may be called, the tool_choice of a chat request)."""
    if choice.type == "function" and choice.name is not None:
        return tools, NamedToolChoice(NamedFunction(choice.name))
    if choice.type == "allowed_tools" and choice.tools is not None:
        allowed = [tool.get("name") for tool in choice.tools]
        unknown = set(map(str, allowed)).difference(tool.function.name for tool in tools)
        if unknown:
            raise ValidationError(
                f"tool_choice allows {', '.join(sorted(unknown))[:200]}, which is not among tools", param="tool_choice"
            )
        return [tool for tool in tools if tool.function.name in allowed], choice.mode or "auto"
    raise ValidationError(
        'tool_choice is "none", "auto", "required", {"type": "function", "name": …} or {"type": "allowed_tools", '
        f'"mode": …, "tools": […]}}; got an object of type {choice.type[:60]!r}',
        param="tool_choice",
    )

"""The body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.http.bodies import Object, PositiveCount, Text
from quire.frontend.openai.protocol.sampling import GenerationBody, bound_of

MAX_TOOLS = 1024
MAX_SCHEMA_DEPTH = 64
"""Levels of objects and lists in a function's parameters."""
MAX_SCHEMA_NODES = 1 << 16
"""Values in the parameters of all tools of a request."""

FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]+$", min_length=1, max_length=128)]


class FunctionDefinition(msgspec.Struct, omit_defaults=True):
    """A function the model may call."""

    name: FunctionName
    description: Annotated[str, Meta(max_length=1 << 20)] | None = None
    parameters: Object | None = None
    """A JSON schema of its arguments."""
    strict: bool | None = None
    """Taken, and without effect: what the arguments must be is enforced where tool_choice forces a call."""


class Tool(msgspec.Struct):
    """Something the model may use: functions are the only kind."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    """A function by its name."""

    name: FunctionName


class NamedToolChoice(msgspec.Struct):
    """This function must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def tools_for_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as templates read them: what the request gave, in OpenAI's order. Raises ValidationError."""
    found = [{"type": tool.type, "function": msgspec.to_builtins(tool.function)} for tool in tools]
    _check_schemas([tool["function"].get("parameters") for tool in found])
    return found


def _check_schemas(schemas: Sequence[Any]) -> None:
    """Raises ValidationError for parameters that are nested too deeply, or are too many."""
    stack = [(schema, 1) for schema in schemas]
    num_nodes = len(stack)
    while stack:
        value, depth = stack.pop()
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if children and depth > MAX_SCHEMA_DEPTH:
            raise ValidationError(
                f"the parameters of a tool are nested more than {MAX_SCHEMA_DEPTH} levels deep; make them flatter",
                param="tools",
            )
        num_nodes += len(children)
        if num_nodes > MAX_SCHEMA_NODES:
            raise ValidationError(
                f"the parameters of all tools hold more than {MAX_SCHEMA_NODES} values; offer fewer tools",
                param="tools",
            )
        stack.extend((child, depth + 1) for child in children)


MAX_MESSAGES = 1 << 15
Messages = Annotated[list[Object], Meta(max_length=MAX_MESSAGES)]
RESERVED_VARIABLES = frozenset(
    {
        "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
        "content_format", "tokenize", "documents",
    }
)  # fmt: skip
"""Variables of a template that a request sets by fields of its own, or not at all."""


def check_template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs` as a dict of its own. Raises ValidationError for what a request sets otherwise."""
    reserved = RESERVED_VARIABLES.intersection(given or {})
    if reserved:
        raise ValidationError(
            f"chat_template_kwargs may not set {', '.join(sorted(reserved))}: fields of the request do",
            param="chat_template_kwargs",
        )
    return dict(given or {})


class ChatBody(GenerationBody, kw_only=True):
    """A conversation to be answered."""

    messages: Messages
    """Objects with role and content; content is text, or a list of text parts."""
    logprobs: bool | None = False
    top_logprobs: Annotated[int, bound_of("logprobs")] | None = 0
    """So many most likely tokens per position; needs logprobs."""
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    """The newer name of max_tokens, and wins."""
    echo: bool = False
    """Give back the last message before its continuation."""
    add_generation_prompt: bool = True
    """Let the chat template open the answer."""
    continue_final_message: bool = False
    """Go on with the last message; with add_generation_prompt false."""
    add_special_tokens: bool = False
    documents: Annotated[list[Object], Meta(max_length=4096)] | None = None
    """A variable of the chat template."""
    chat_template: Text | None = None
    """Refused unless the server trusts it (--trust-request-chat-template)."""
    chat_template_kwargs: Object | None = None
    """Further variables of the template."""
    include_reasoning: bool = True
    """False: the answer does not show it."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    return_prompt_text: bool | None = None
    """Show the prompt that the chat template made."""

    tools: Tools | None = None
    """Functions the model may call."""
    tool_choice: ToolChoice | None = None
    """Default: auto where there are tools."""
    parallel_tool_calls: bool | None = True
    """False: only the first call of an answer counts."""
    media_io_kwargs: Object | None = None
    mm_processor_kwargs: Object | None = None

    EXAMPLE = {"messages": [{"role": "user", "content": "What is a quire?"}], "max_tokens": 40}  # noqa: RUF012
    NEUTRAL = {  # noqa: RUF012
        **GenerationBody.NEUTRAL,
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    @property
    def own_names(self) -> Mapping[str, str]:
        names = dict(super().own_names)
        if self.logprobs:
            names["logprobs"] = "top_logprobs"
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    @property
    def output_limit(self) -> int | None:
        """The most tokens asked for; None for as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities per position; None for none. Raises ValidationError."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ValidationError("top_logprobs needs logprobs: true", param="top_logprobs", value=self.top_logprobs)
        return None

    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs`, checked. Raises ValidationError."""
        variables = check_template_variables(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return variables

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
"""Maximum depth of objects and lists in a function's parameters."""
MAX_SCHEMA_NODES = 1 << 16
"""Maximum number of values in the parameters of all tools of a request."""

FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]+$", min_length=1, max_length=128)]


class FunctionDefinition(msgspec.Struct, omit_defaults=True):
    """A function the model may call."""

    name: FunctionName
    description: Annotated[str, Meta(max_length=1 << 20)] | None = None
    parameters: Object | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Accepted without effect: the schema is enforced where tool_choice forces a call."""


class Tool(msgspec.Struct):
    """A tool. Functions are the only type."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    """A function by its name."""

    name: FunctionName


class NamedToolChoice(msgspec.Struct):
    """Choice of a function that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def tools_for_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the tools in the form of chat templates, in OpenAI's order of keys. Raises ValidationError."""
    found = [{"type": tool.type, "function": msgspec.to_builtins(tool.function)} for tool in tools]
    _check_schemas([tool["function"].get("parameters") for tool in found])
    return found


def _check_schemas(schemas: Sequence[Any]) -> None:
    """Raises ValidationError for parameters that are nested too deeply or hold too many values."""
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
"""Variables of a template that chat_template_kwargs may not set."""


def check_template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a copy of `chat_template_kwargs`. Raises ValidationError for reserved variables."""
    reserved = RESERVED_VARIABLES.intersection(given or {})
    if reserved:
        raise ValidationError(
            f"chat_template_kwargs may not set {', '.join(sorted(reserved))}: fields of the request do",
            param="chat_template_kwargs",
        )
    return dict(given or {})


class PredictedPart(msgspec.Struct):
    """A part of a predicted answer."""

    type: Literal["text"]
    text: Text


class Prediction(msgspec.Struct):
    """Text that is expected in the answer."""

    type: Literal["content"]
    content: Text | Annotated[list[PredictedPart], Meta(max_length=4096)]

    @property
    def text(self) -> str:
        """All of the text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(GenerationBody, kw_only=True):
    """Body of /v1/chat/completions: a conversation to be answered."""

    messages: Messages
    """Objects with role and content; content is text, or a list of text parts."""
    logprobs: bool | None = False
    top_logprobs: Annotated[int, bound_of("logprobs")] | None = 0
    """Number of most likely tokens per position; needs logprobs."""
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    """The newer name of max_tokens; it takes precedence."""
    echo: bool = False
    """true: the answer begins with the last message of the request."""
    add_generation_prompt: bool = True
    """true: the chat template opens the answer."""
    continue_final_message: bool = False
    """true: the answer continues the last message; needs add_generation_prompt: false."""
    add_special_tokens: bool = False
    documents: Annotated[list[Object], Meta(max_length=4096)] | None = None
    """A variable of the chat template."""
    chat_template: Text | None = None
    """Refused unless the server trusts it (--trust-request-chat-template)."""
    chat_template_kwargs: Object | None = None
    """Further variables of the template."""
    include_reasoning: bool = True
    """false: the answer does not show the reasoning."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    return_prompt_text: bool | None = None
    """true: the answer shows the prompt that the chat template made."""

    prediction: Prediction | None = None
    """Text that is expected in the answer: drafts are made of it, where the server speculates by ngram or suffix."""

    tools: Tools | None = None
    """Functions the model may call."""
    tool_choice: ToolChoice | None = None
    """Default: auto where there are tools."""
    parallel_tool_calls: bool | None = True
    """false: only the first call of an answer is returned."""
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
        """Maximum number of output tokens; None: as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities per position; None: none. Raises ValidationError."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ValidationError("top_logprobs needs logprobs: true", param="top_logprobs", value=self.top_logprobs)
        return None

    def template_variables(self) -> dict[str, Any]:
        """Returns the variables of the chat template. Raises ValidationError."""
        variables = check_template_variables(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return variables

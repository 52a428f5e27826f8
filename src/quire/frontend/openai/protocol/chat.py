"""The body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.http.bodies import Object, PositiveCount, Text
from quire.frontend.openai.protocol.sampling import GenerationBody, bound_of
from quire.frontend.openai.protocol.tools import ToolChoice, Tools

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

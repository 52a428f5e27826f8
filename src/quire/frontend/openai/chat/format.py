"""The format in which the served model writes reasoning and tool calls, and its plan for one request.

A server has one `ChatFormat`, chosen at its start by flags or, if it is unambiguous, by the chat template. It makes a
`ChatPlan` of each request: the tools for the template, the parameters for the engine, the parser of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config.server import ServerConfig
from quire.errors import ConfigError, ValidationError
from quire.frontend.openai.chat.output import ChatParser, MessageParser, PlainText
from quire.frontend.openai.parsers import reasoning as reasoning_registry
from quire.frontend.openai.parsers import tools as tool_registry
from quire.frontend.openai.parsers.constrained import parse_required, required_schema
from quire.frontend.openai.parsers.events import Program, StreamParser
from quire.frontend.openai.parsers.reasoning import ReasoningParserSpec, reasoning_parser
from quire.frontend.openai.parsers.tools import ToolParserSpec, tool_parser
from quire.frontend.openai.protocol.chat import ChatBody, NamedToolChoice, tools_for_template
from quire.logger import init_logger
from quire.sampling_params import SamplingParams
from quire.structured_outputs import ReasoningTokens, StructuredOutputsParams

logger = init_logger(__name__)

OFF = "none"
"""Name of a parser that turns parsing off, whatever the chat template is."""


@dataclass(frozen=True)
class ChatPlan:
    """The plan for one request, from its tools and the model's format."""

    tools: list[dict[str, Any]] | None = None
    """Tools for the chat template."""
    program: Program | None = None
    """Parser of the calls; None if calls are not wanted."""
    tool_spec: ToolParserSpec | None = None
    reasoning_spec: ReasoningParserSpec | None = None
    max_num_calls: int | None = None
    shows_reasoning: bool = True
    repeats_reasoning: bool = False
    schema: dict[str, Any] | None = None
    """JSON schema that the answer must match."""
    is_named: bool = False
    """True: the request has named the function."""

    @property
    def is_plain(self) -> bool:
        """True if all of the answer is text for the user."""
        return self.program is None and self.reasoning_spec is None

    @property
    def reads_reasoning(self) -> bool:
        """True if reasoning in the answer is separated from the rest."""
        return self.reasoning_spec is not None or (self.tool_spec is not None and self.tool_spec.reads_reasoning)

    def adjust(self, params: SamplingParams) -> None:
        """Makes the engine leave the parsers' markers in the text, and sets the form of a forced call.

        Raises ValidationError for a form that is not possible.
        """
        if any(spec is not None and spec.keeps_special_tokens for spec in (self.tool_spec, self.reasoning_spec)):
            params.skip_special_tokens = False
        if self.schema is None:
            return
        if params.structured_outputs is not None:
            raise ValidationError(
                "a tool_choice that forces a call sets the form of the answer; leave response_format and "
                "structured_outputs out",
                param="tool_choice",
            )
        try:
            params.structured_outputs = StructuredOutputsParams(json=self.schema)
        except ValidationError as e:
            raise ValidationError(f"the parameters of a tool cannot be enforced: {e}", param="tools") from None

    def place_form(
        self, params: SamplingParams, prompts: Sequence[str], find_id: Callable[[str], int | None]
    ) -> ChatPlan:
        """Makes the form of an answer begin after the reasoning, if single tokens mark the reasoning's end.

        Otherwise the form holds from the first token on, and no reasoning is read. `find_id` returns the id of a
        token's text. Returns the plan to go on with.
        """
        form = params.structured_outputs
        if form is None or self.reasoning_spec is None or form.structural_tag is not None:
            return self
        if self._is_over(prompts):
            return self
        tokens = self._find_tokens(prompts, find_id)
        if tokens is None:
            return replace(self, reasoning_spec=None)
        params.structured_outputs = form.behind(tokens)
        return self

    def limit_reasoning(
        self,
        params: SamplingParams,
        prompts: Sequence[str],
        find_id: Callable[[str], int | None],
        wish: int | None = None,
    ) -> None:
        """Sets the tokens between which `thinking_token_budget` counts.

        `wish` is a budget that has no effect where these tokens are unknown; with `thinking_token_budget` that is a
        ValidationError.
        """
        budget = params.thinking_token_budget
        if budget is None and wish is None:
            return
        if self._is_over(prompts):
            params.thinking_token_budget = None
            return
        params.reasoning_tokens = self._find_tokens(prompts, find_id)
        if params.reasoning_tokens is not None:
            params.thinking_token_budget = wish if budget is None else budget
        elif budget is not None:
            raise ValidationError(
                "thinking_token_budget needs a model whose reasoning stands between two tokens that this server knows "
                "(--reasoning-parser), the same for all conversations of a request; leave it out",
                param="thinking_token_budget",
                value=budget,
            )

    def _is_over(self, prompts: Sequence[str]) -> bool:
        """Returns whether all prompts have closed the reasoning."""
        tags = None if self.reasoning_spec is None else self.reasoning_spec.tags
        return tags is not None and all(map(tags.is_over, prompts))

    def _find_tokens(self, prompts: Sequence[str], find_id: Callable[[str], int | None]) -> ReasoningTokens | None:
        """Returns the tokens around the reasoning in answers to these prompts; None if they are unknown or differ."""
        tags = None if self.reasoning_spec is None else self.reasoning_spec.tags
        found = {None if tags is None or tags.is_over(text) else tags.find_tokens(text, find_id) for text in prompts}
        return found.pop() if len(found) == 1 else None

    def make_parser(self, prompt: str | None) -> ChatParser:
        """Returns the parser of one choice of the answer to `prompt`."""
        if self.is_plain:
            return PlainText()
        reasoning = self.reasoning_spec.make_program(prompt or "") if self.reasoning_spec is not None else None
        return MessageParser(
            reasoning=StreamParser(reasoning) if reasoning is not None else None,
            tools=StreamParser(self.program, trims=True) if self.program is not None else None,
            make_call_id=(self.tool_spec.make_call_id if self.tool_spec is not None else tool_registry.make_call_id),
            max_num_calls=self.max_num_calls,
            shows_reasoning=self.shows_reasoning,
            repeats_reasoning=self.repeats_reasoning,
            ends_in_tool_calls=not self.is_named,
        )


class ChatFormat:
    """The parsers of one server. Either may be None."""

    def __init__(self, config: ServerConfig, template: str | None) -> None:
        """`template` is the chat template. Raises ConfigError for an unknown parser."""
        tool_name = config.tool_call_parser or tool_registry.recognize(template)
        reasoning_name = config.reasoning_parser or reasoning_registry.recognize(template)
        self.tool_spec = None if tool_name in (None, OFF) else tool_parser(tool_name)
        self.reasoning_spec = None if reasoning_name in (None, OFF) else reasoning_parser(reasoning_name)
        if config.enable_auto_tool_choice and self.tool_spec is None:
            raise ConfigError(
                "--enable-auto-tool-choice needs --tool-call-parser: the chat template does not show how this model "
                "writes its calls"
            )
        self._hides_unwanted_tools = config.exclude_tools_when_tool_choice_none
        self._repeats_reasoning = config.enable_reasoning_content
        if self.tool_spec is not None or self.reasoning_spec is not None:
            logger.info("tool calls are read as %s, reasoning as %s", tool_name or OFF, reasoning_name or OFF)

    def plan(self, body: ChatBody) -> ChatPlan:
        """Returns the plan for a request. Raises ValidationError for impossible tools, or a choice among them."""
        choice = body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise ValidationError("tool_choice needs tools; offer some, or leave it out", param="tool_choice")
            return self._plan(body)
        tools = tools_for_template(body.tools)
        if choice == "none":
            return self._plan(body, tools=None if self._hides_unwanted_tools else tools)
        if choice == "required" or isinstance(choice, NamedToolChoice):
            return self._forced(body, tools, choice)
        if self.tool_spec is None:
            raise ValidationError(
                "tools are offered, and this server does not know how its model writes calls; start it with "
                '--tool-call-parser, or send tool_choice: "none"',
                param="tools",
            )
        return self._plan(body, tools=tools, program=self.tool_spec.program_for(tools))

    def _forced(self, body: ChatBody, tools: list[dict[str, Any]], choice: str | NamedToolChoice) -> ChatPlan:
        functions = [tool["function"] for tool in tools]
        named = choice.function.name if isinstance(choice, NamedToolChoice) else None
        if named is not None:
            names = [function["name"] for function in functions]
            functions = [function for function in functions if function["name"] == named][:1]
            if not functions:
                raise ValidationError(
                    f"tool_choice names {named!r}, which is not among tools: {', '.join(names)[:500]}",
                    param="tool_choice",
                )
        is_parallel = named is None and body.parallel_tool_calls is not False
        return replace(
            self._plan(body, tools=tools, program=parse_required),
            schema=required_schema(functions, is_parallel=is_parallel),
            is_named=named is not None,
        )

    def _plan(
        self, body: ChatBody, *, tools: list[dict[str, Any]] | None = None, program: Program | None = None
    ) -> ChatPlan:
        tool_spec = self.tool_spec if program is not None else None
        reads_both = tool_spec is not None and tool_spec.reads_reasoning
        return ChatPlan(
            tools=tools,
            program=program,
            tool_spec=tool_spec,
            reasoning_spec=None if reads_both else self.reasoning_spec,
            max_num_calls=1 if body.parallel_tool_calls is False else None,
            shows_reasoning=body.include_reasoning,
            repeats_reasoning=self._repeats_reasoning,
        )

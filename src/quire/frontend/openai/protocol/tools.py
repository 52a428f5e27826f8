"""Tools in the body of a chat request: what may be called, and whether it must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.http.bodies import Object

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

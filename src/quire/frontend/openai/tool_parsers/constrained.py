"""Calls whose form structured output has forced: `tool_choice` "required", or one that names a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quire.frontend.openai.parsing.events import EventSink
from quire.frontend.openai.parsing.source import Step, TextSource
from quire.frontend.openai.parsing.stream_parser import Program
from quire.frontend.openai.tool_parsers.call_object import read_call_array


def parse_required(source: TextSource, sink: EventSink) -> Step[None]:
    """[{"name": "f", "parameters": {...}}, ...] and nothing else."""
    source.begin()
    yield from source.skip_space()
    yield from read_call_array(source, sink)


def parse_named(name: str) -> Program:
    """The arguments alone: the function is known."""
    return partial(_parse_named, name)


def _parse_named(name: str, source: TextSource, sink: EventSink) -> Step[None]:
    yield from source.skip_space()
    if (yield from source.peek()):
        sink.start(name)
        yield from source.copy_rest(sink.arguments)


def required_schema(functions: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """The JSON schema of what `parse_required` reads: one or more calls of `functions`."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"enum": [function["name"]]}, "parameters": parameters_schema(function)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if is_parallel else {**schema, "maxItems": 1}


def parameters_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    return dict(function.get("parameters") or {"type": "object", "properties": {}})

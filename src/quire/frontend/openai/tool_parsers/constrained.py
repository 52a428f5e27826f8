"""Calls whose form structured output has forced: `tool_choice` "required", or one that names a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.openai.parsing.events import EventSink
from quire.frontend.openai.parsing.source import Step, TextSource
from quire.frontend.openai.tool_parsers.call_object import read_call_array

MAX_CALLS = 64
"""In one answer: a model that finds no end is given one."""


def parse_required(source: TextSource, sink: EventSink) -> Step[None]:
    """[{"name": "f", "parameters": {...}}, ...] and nothing else."""
    source.begin()
    yield from source.skip_space()
    yield from read_call_array(source, sink)


def required_schema(functions: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """The JSON schema of what `parse_required` reads: one or more calls of `functions`."""
    parameters = {
        f"function_{i}": {"type": "object", **(function.get("parameters") or {})}
        for i, function in enumerate(functions)
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"enum": [function["name"]]}, "parameters": {"$ref": f"#/$defs/{key}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function, key in zip(functions, parameters, strict=True)
    ]
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CALLS if is_parallel else 1,
        "items": {"anyOf": calls},
        "$defs": {key: _moved(value, f"#/$defs/{key}") for key, value in parameters.items()},
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema that stood alone, as a part of another one at `root`: its references follow."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }

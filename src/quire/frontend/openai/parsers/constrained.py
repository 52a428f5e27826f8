"""Calls whose form structured output has forced: `tool_choice` "required", or one that names a function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.frontend.openai.parsers.call_object import read_call_array
from quire.frontend.openai.parsers.events import EventSink
from quire.frontend.openai.parsers.source import Step, TextSource

MAX_CALLS = 64
"""Maximum number of calls in one answer, for models that do not stop."""
_SCHEMA_KEYS = ("additionalProperties", "anyOf", "items", "prefixItems")
_SCHEMA_MAP_KEYS = ("$defs", "definitions", "patternProperties", "properties")
_MEETING = frozenset(
    {"$dynamicRef", "allOf", "contains", "dependentRequired", "dependentSchemas", "if", "minProperties", "not", "oneOf"}
)
"""Keywords by which several schemas, or the number of properties, judge one object."""


def parse_required(source: TextSource, sink: EventSink) -> Step[None]:
    """Reads [{"name": "f", "parameters": {...}}, ...] and nothing else."""
    source.begin()
    yield from source.skip_space()
    yield from read_call_array(source, sink)


def required_schema(functions: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """Returns the JSON schema of what `parse_required` reads: calls of `functions` with closed arguments."""
    parameters = {
        f"function_{i}": closed({"type": "object", **(function.get("parameters") or {})})
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


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema without additional properties, unless it mentions them.

    A model that forgets to end an object would otherwise write properties up to its token limit. Where several schemas
    apply to one object it stays unchanged, because closing one would forbid what another requires. The result allows
    nothing that `schema` does not allow.
    """
    meets = any(
        _MEETING & node.keys() or ({"$ref", "anyOf"} & node.keys() and {"properties", "required"} & node.keys())
        for node in _objects(schema)
    )
    return schema if meets else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _closed(value) if key in _SCHEMA_KEYS else value for key, value in schema.items()}
    for key in _SCHEMA_MAP_KEYS:
        if isinstance(schema.get(key), dict):
            result[key] = {name: _closed(part) for name, part in schema[key].items()}
    names = schema.get("properties")
    if (
        isinstance(names, dict)
        and "patternProperties" not in schema
        and names.keys() >= _strings(schema.get("required"))
    ):
        result.setdefault("additionalProperties", False)
    return result


def _strings(value: Any) -> set[str]:
    return {item for item in value if isinstance(item, str)} if isinstance(value, list) else set()


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yields every object in a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _objects(part)


def _moved(schema: Any, root: str) -> Any:
    """Returns a schema as a part of another one, at `root`, with its references adjusted."""
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

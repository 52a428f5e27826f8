"""Changes to a JSON schema before it is compiled. What it allows afterwards, it allowed before."""

from __future__ import annotations

import json
from typing import Any

MAX_INTEGER = 9 * 10**18
"""Integers without a bound of their own end here (near 2**63, where llguidance's ranges end): endless digits would end
nowhere."""

_SCHEMA_KEYS = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_SCHEMA_LIST_KEYS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_SCHEMA_MAP_KEYS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def bound_schema(text: str, *, disable_additional_properties: bool = False) -> str:
    """The schema with bounds on its integers and, if asked for, closed objects."""
    schema = json.loads(text)
    for node in _nodes(schema):
        _bound_integer(node)
        if disable_additional_properties and ("properties" in node or "patternProperties" in node):
            node.setdefault("additionalProperties", False)
    return json.dumps(schema)


def _nodes(schema: Any) -> list[dict[str, Any]]:
    """Every schema inside `schema`, itself first. Values (of enum, const, default) are none."""
    found: list[dict[str, Any]] = []
    todo = [schema]
    while todo:
        node = todo.pop()
        if not isinstance(node, dict):
            continue
        found.append(node)
        todo += [node[key] for key in _SCHEMA_KEYS if key in node]
        for key in _SCHEMA_LIST_KEYS:
            if isinstance(node.get(key), list):
                todo += node[key]
        for key in _SCHEMA_MAP_KEYS:
            if isinstance(node.get(key), dict):
                todo += node[key].values()
    return found


def _bound_integer(node: dict[str, Any]) -> None:
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" not in kinds or "number" in kinds or {"enum", "const", "multipleOf", "$ref"} & node.keys():
        return
    low: Any = node.get("minimum", node.get("exclusiveMinimum"))
    high: Any = node.get("maximum", node.get("exclusiveMaximum"))
    if low is None and high is None:
        node.update(minimum=-MAX_INTEGER, maximum=MAX_INTEGER)
    elif low is None and _is_number(high) and high > -MAX_INTEGER:
        node["minimum"] = -MAX_INTEGER
    elif high is None and _is_number(low) and low < MAX_INTEGER:
        node["maximum"] = MAX_INTEGER


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""The schemas of forced calls: which objects are closed, and that nothing becomes allowed by it."""

from __future__ import annotations

import copy
import json
from typing import Any

import llguidance
import pytest

from quire.frontend.openai.parsers.constrained import closed, required_schema

OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHUT = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, SHUT),
        ({"properties": {"x": OPEN, "y": {"items": OPEN}}}, {"properties": {"x": SHUT, "y": {"items": SHUT}}}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": OPEN}}, {"$ref": "#/$defs/A", "$defs": {"A": SHUT}}),
        ({"prefixItems": [OPEN], "items": False}, {"prefixItems": [SHUT], "items": False}),
        (OPEN | {"required": ["a"]}, SHUT | {"required": ["a"]}),
    ],
)
def test_objects_that_name_their_properties_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    def with_closed_roots(value: dict[str, Any]) -> dict[str, Any]:
        return {**value, "additionalProperties": False} if "properties" in value else value

    before = copy.deepcopy(schema)
    assert closed(schema) == with_closed_roots(expected)
    assert schema == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        OPEN | {"additionalProperties": True},
        OPEN | {"additionalProperties": {"type": "string"}},
        OPEN | {"patternProperties": {"^x": {}}},
        OPEN | {"required": ["b"]},
        OPEN | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"$ref": "#/$defs/A", "required": ["b"], "$defs": {"A": OPEN}},
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        {"oneOf": [OPEN, {"properties": {"b": {}}}]},
        {"properties": {"x": {"if": OPEN, "then": {"required": ["b"]}}}},
        OPEN | {"minProperties": 2},
        {"not": OPEN},
        {"const": OPEN},
        {"type": "object", "default": OPEN},
    ],
)
def test_where_more_may_be_meant_nothing_is_closed(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_a_property_may_have_any_name() -> None:
    schema = {"properties": {"properties": {"type": "string"}, "required": OPEN, "items": OPEN}}
    assert closed(schema) == {
        "properties": {"properties": {"type": "string"}, "required": SHUT, "items": SHUT},
        "additionalProperties": False,
    }


def test_a_forced_call_is_a_grammar_with_closed_arguments() -> None:
    schema = required_schema([{"name": "f", "parameters": OPEN}], is_parallel=False)
    assert schema["$defs"]["function_0"]["additionalProperties"] is False
    assert llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))

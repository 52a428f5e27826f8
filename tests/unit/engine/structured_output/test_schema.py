"""Schemas before they are compiled: bounds are added where there are none, and nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.engine.structured_output.structural_tag import MAX_INTEGER, bound_schema

BOUNDS = {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}


def bound(schema: Any, **options: bool) -> Any:
    return json.loads(bound_schema(json.dumps(schema), **options))


@pytest.mark.parametrize(
    ("schema", "added"),
    [
        ({"type": "integer"}, BOUNDS),
        ({"type": ["integer", "null"]}, BOUNDS),
        ({"type": "integer", "minimum": 3}, {"maximum": MAX_INTEGER}),
        ({"type": "integer", "exclusiveMaximum": 3}, {"minimum": -MAX_INTEGER}),
        ({"type": "integer", "minimum": 10**30}, {}),
        ({"type": "integer", "minimum": "three"}, {}),
        ({"type": "integer", "minimum": 1, "maximum": 2}, {}),
        ({"type": "integer", "enum": [1]}, {}),
        ({"type": "number"}, {}),
        ({"type": ["integer", "number"]}, {}),
        ({"type": [["integer"]]}, {}),
    ],
)
def test_bounds_of_integers_are_added(schema: dict[str, Any], added: dict[str, int]) -> None:
    assert bound(schema) == {**schema, **added}


def test_schemas_inside_schemas_are_found_and_values_left_alone() -> None:
    integer = {"type": "integer"}
    schema = {
        "type": "object",
        "properties": {"type": integer, "enum": {"const": integer}, "default": {"items": [integer]}},
        "$defs": {"a": {"anyOf": [integer, True]}},
        "default": integer,
        "enum": [integer],
    }
    bounded = integer | BOUNDS
    assert bound(schema) == schema | {
        "properties": {"type": bounded, "enum": {"const": integer}, "default": {"items": [bounded]}},
        "$defs": {"a": {"anyOf": [bounded, True]}},
    }


def test_objects_are_closed_where_that_is_asked_for() -> None:
    schema = {"properties": {"a": {"properties": {}, "additionalProperties": True}}}
    assert bound(schema) == schema
    assert bound(schema, disable_additional_properties=True) == schema | {"additionalProperties": False}

"""Rules of the form of an output, before anything is compiled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.errors import ClientError, ValidationError
from quire.structured_outputs import MAX_JSON_DEPTH, ReasoningTokens, StructuredOutputsParams, make_structured_outputs

from .test_sampling_params import HOSTILE


def test_a_schema_is_kept_as_text() -> None:
    params = StructuredOutputsParams(json={"type": "integer", "maximum": 10**30})
    assert params.json == '{"type": "integer", "maximum": 1000000000000000000000000000000}'
    assert params.source == ("json", params.json)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams) == params


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"regex": "a"}, ("regex", "a")),
        ({"choice": ["a", "b"]}, ("choice", '["a", "b"]')),
        ({"grammar": "root ::= x"}, ("grammar", "root ::= x")),
        ({"json_object": True}, ("json", '{"type": "object"}')),
        ({"structural_tag": "{}"}, ("structural_tag", "{}")),
    ],
)
def test_the_source_is_the_field_that_is_set(fields: dict[str, Any], source: tuple[str, str]) -> None:
    assert StructuredOutputsParams(**fields).source == source


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, ""),
        ({"regex": "a", "choice": ["a"]}, ""),
        ({"json_object": True, "json": "{}"}, ""),
        ({"json": "[]"}, ".json"),
        ({"json": "{"}, ".json"),
        ({"json": '{"maximum": NaN}'}, ".json"),
        ({"json": {"maximum": float("inf")}}, ".json"),
        ({"json": {"enum": [{1, 2}]}}, ".json"),
        ({"json": '{"not":' * 100_000}, ".json"),
        ({"json": '{"items":' * (MAX_JSON_DEPTH + 1) + "{}" + "}" * (MAX_JSON_DEPTH + 1)}, ".json"),
        ({"json": '{"a":"' + "x" * (1 << 18) + '"}'}, ".json"),
        ({"choice": []}, ".choice"),
        ({"choice": ["a" * 4000] * 100}, ".choice"),
        ({"regex": ""}, ".regex"),
        ({"regex": "\ud800"}, ""),
        ({"regex": "a" * 70_000}, ".regex"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as e:
        StructuredOutputsParams(**fields)
    assert e.value.param == "structured_outputs" + param
    assert len(str(e.value)) < 400


@pytest.mark.parametrize("name", StructuredOutputsParams.__struct_fields__)
@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: repr(v)[:20])
def test_hostile_values_are_accepted_or_refused_by_name(name: str, value: Any) -> None:
    refused: ClientError | None = None
    try:
        msgspec.msgpack.encode(StructuredOutputsParams(**{name: value}))
    except ClientError as e:
        refused = e
    assert refused is None or str(refused.param).startswith("structured_outputs")


def test_objects_of_a_body() -> None:
    assert make_structured_outputs({"regex": "a", "_backend": "x"}) == StructuredOutputsParams(regex="a")
    with pytest.raises(ValidationError, match="'jsonn'"):
        make_structured_outputs({"jsonn": {}})


def test_where_the_form_begins_is_not_for_a_body_to_say() -> None:
    with pytest.raises(ValidationError, match="'reasoning'"):
        make_structured_outputs({"regex": "a", "reasoning": {"close": 1}})
    form = StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True)
    behind = form.behind(ReasoningTokens(5, 4))
    assert behind.reasoning == ReasoningTokens(5, 4)
    assert form.reasoning is None
    assert msgspec.structs.replace(behind, reasoning=None) == form
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(behind), type=StructuredOutputsParams) == behind

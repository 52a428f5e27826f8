"""Hostile request bodies, derived from the table of fields: whatever an endpoint reads is fuzzed, by its being there.

The JSON schema of a body (the one that makes the OpenAPI document) says what each field may hold. From it come values
on both sides of every bound, and values of every wrong kind, at every depth the schema knows. Everything is drawn from
a seed: a case that failed is made again by its number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.frontend.http.endpoint import Endpoint

REF = "#/components/schemas/{name}"
MAX_DEPTH = 4
LONG_TEXT = '"' + "x" * (1 << 20) + '"'
LONG_LIST = "[" + "1," * 999_999 + "1]"
NEVER_TAKEN = (
    "NaN",
    "-NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "[" * 10_000 + "]" * 10_000,
    '"\\ud800"',
    "+1",
    "",
)
"""Values that no body may hold: invalid JSON, and numbers and texts that cannot be processed."""
STRANGE = (
    "null", "true", "false", "0", "-0.0", "-1", "1", "0.5", "1e-320", "1e308", "-1e308", "2147483647", "2147483648",
    "-2147483649", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
    "1" + "0" * 400, '""', '"x"', '"5"', '"nan"', '"\\u0000"', '"\\u202e"', '"\U00010400"', '"{{ 7*7 }}"',
    '"<|endoftext|>"', '"' + "x" * 5000 + '"', "[]", "[[]]", "[null]", "[true]", '[""]', "[-1]", "[1e308]", "{}",
    '{"":0}', '{"a":{"b":[]}}', "[{}]", '{"type":"x"}', '[{"role":"user"}]', '[{"role":"x","content":null}]',
    '{"0":1e30}', '{"-1":1}', '"(a+)+$"', "[" * 40 + "]" * 40,
    '{"type":"json_schema","json_schema":{"schema":{"$ref":"#"}}}',
)  # fmt: skip
"""Values of every kind. A field may accept or refuse them."""
INPUTS = ("input", "prompt", "messages", "text", "query", "tokens")
"""Fields by which a body says what it is about: a good one has the first of them that it knows."""
GOOD: Mapping[str, Any] = {
    "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}], "text": "x", "query": "x",
    "tokens": [1], "documents": ["x"], "model": "demo", "max_tokens": 2, "max_completion_tokens": 2,
    "max_output_tokens": 2,
}  # fmt: skip
_BUDGETS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """JSON text. `is_good` says whether the door must take it; None: either is right."""

    text: str
    is_good: bool | None = None


@dataclass(frozen=True)
class Case:
    """A body for an endpoint."""

    endpoint: Endpoint
    body: bytes
    fields: tuple[str, ...]
    """Fields that differ from those of a good body."""
    is_good: bool | None


class FieldFuzzer:
    """The cases of some endpoints."""

    def __init__(self, endpoints: Iterable[Endpoint], *, max_text: int = 1 << 20) -> None:
        self.endpoints = [endpoint for endpoint in endpoints if endpoint.body is not None]
        kinds = list(dict.fromkeys(endpoint.body.kind for endpoint in self.endpoints if endpoint.body))
        _, self._schemas = msgspec.json.schema_components(kinds, ref_template=REF)
        self._large = [Value(text) for text in (LONG_TEXT, LONG_LIST) if len(text) <= max_text]
        self._values = {kind: self._values_of_fields(kind) for kind in kinds}
        self._good = {kind: {n: json.dumps(v) for n, v in self.good_body(kind).items()} for kind in kinds}

    def good_body(self, kind: type) -> dict[str, Any]:
        """The least a body of this kind must hold, and little work."""
        properties = self._schemas[kind.__name__]["properties"]
        required = self._schemas[kind.__name__].get("required", ())
        usual = {
            name: value
            for name in GOOD
            for value in ([GOOD[name]], GOOD[name])  # one of several, for bodies that hold batches
            if name in properties and self._fits(properties[name], value)
        }
        topic = next((name for name in INPUTS if name in usual), None)
        names = [name for name in properties if name in required or name in (*_BUDGETS, topic)]
        return {name: usual[name] if name in usual else self._minimal(properties[name]) for name in names}

    def every_value(self) -> Iterator[Case]:
        """Each value of each field once, all else being good."""
        for endpoint in self.endpoints:
            for name, values in self._values[_kind(endpoint)].items():
                for value in values:
                    yield self._case(endpoint, {name: value})

    def every_value_once(self) -> Iterator[Case]:
        """Yields each value of each field at one endpoint that has the field, the endpoints taking turns."""
        places: dict[tuple[str, str], list[tuple[Endpoint, Value]]] = {}
        for endpoint in self.endpoints:
            for name, values in self._values[_kind(endpoint)].items():
                for value in values:
                    places.setdefault((name, value.text), []).append((endpoint, value))
        for number, ((name, _), cases) in enumerate(places.items()):
            endpoint, value = cases[number % len(cases)]
            yield self._case(endpoint, {name: value})

    def draw(self, rng: random.Random) -> Case:
        """One to three fields at once, now and then one of them twice or a very large one."""
        endpoint = rng.choice(self.endpoints)
        fields = self._values[_kind(endpoint)]
        names = rng.sample(list(fields), min(len(fields), rng.choice((1, 1, 2, 3))))
        changed = {name: rng.choice(fields[name]) for name in names}
        if self._large and rng.random() < 0.002:
            changed[names[0]] = rng.choice(self._large)
        return self._case(endpoint, changed, repeats=rng.random() < 0.05)

    def _case(self, endpoint: Endpoint, changed: Mapping[str, Value], *, repeats: bool = False) -> Case:
        kind = _kind(endpoint)
        parts = [f'"{name}":{text}' for name, text in self._good[kind].items() if repeats or name not in changed]
        parts += [f'"{name}":{value.text}' for name, value in changed.items()]
        verdicts = {value.is_good for value in changed.values()}
        if False in verdicts:
            is_good: bool | None = False
        else:
            is_good = True if verdicts == {True} and not set(changed) & set(kind.NEUTRAL) else None
        return Case(endpoint, ("{" + ",".join(parts) + "}").encode("utf-8", "surrogatepass"), tuple(changed), is_good)

    # -- values -------------------------------------------------------------------------------------------------------

    def _values_of_fields(self, kind: type) -> dict[str, list[Value]]:
        properties = self._schemas[kind.__name__]["properties"]
        return {name: _distinct(self._values_of(schema, 0)) for name, schema in properties.items()}

    def _values_of(self, schema: Schema, depth: int) -> Iterator[Value]:
        yield from (Value(text, False) for text in NEVER_TAKEN)
        yield from (Value(text) for text in STRANGE)
        options = [self._resolve(option) for option in schema.get("anyOf", [schema])]
        for option in options:
            yield from self._on_bounds(option, alone=len(options) == 1 or _only_kind(option, options))
            if depth < MAX_DEPTH:
                yield from self._inside(option, depth)

    def _on_bounds(self, schema: Schema, *, alone: bool) -> Iterator[Value]:
        """Both sides of each bound. What is outside must be refused where no other option could take it."""
        bad = False if alone else None
        kind = schema.get("type")
        if kind in ("integer", "number"):
            for key, step in (("minimum", -1), ("maximum", 1)):
                if key in schema:
                    yield Value(_number(schema[key]), True if kind == "integer" else None)
                    yield Value(_number(schema[key] + step), bad if abs(schema[key]) < 2**53 else None)
            if "exclusiveMinimum" in schema:
                yield Value(_number(schema["exclusiveMinimum"]), bad)
        if kind == "string" and schema.get("maxLength", 1 << 30) <= 5000 and "pattern" not in schema:
            yield Value(json.dumps("y" * schema["maxLength"]), True)
            yield Value(json.dumps("y" * (schema["maxLength"] + 1)), bad)
        if kind == "array" and schema.get("maxItems", 1 << 30) <= 5000:
            items = schema.get("items") or {}
            text = json.dumps(self._minimal(items))
            yield Value("[" + ",".join([text] * schema["maxItems"]) + "]")
            yield Value("[" + ",".join([text] * (schema["maxItems"] + 1)) + "]", bad)
        for allowed in schema.get("enum", ()):
            yield Value(json.dumps(allowed), True)

    def _inside(self, schema: Schema, depth: int) -> Iterator[Value]:
        """Yields values that are wrong further down."""
        for name, inner in schema.get("properties", {}).items():
            rest = {key: self._minimal(schema["properties"][key]) for key in schema.get("required", ()) if key != name}
            head = "".join(f"{json.dumps(key)}:{json.dumps(value)}," for key, value in rest.items())
            for value in _distinct(self._values_of(inner, depth + 1)):
                yield Value(f"{{{head}{json.dumps(name)}:{value.text}}}", False if value.text in NEVER_TAKEN else None)
        if schema.get("type") == "array" and schema.get("items") is not None:
            for value in _distinct(self._values_of(schema["items"], depth + 1)):
                yield Value(f"[{value.text}]", False if value.text in NEVER_TAKEN[:-1] else None)
        if schema.get("type") == "object" and "properties" not in schema:
            yield from (Value(f'{{"a":{text}}}', False) for text in NEVER_TAKEN)
            yield from (Value(f'{{"a":{text}}}') for text in STRANGE)

    def _resolve(self, schema: Schema) -> Schema:
        if "$ref" in schema:
            found: Schema = self._schemas[schema["$ref"].rpartition("/")[2]]
            return found
        return schema

    def _fits(self, schema: Schema, value: Any) -> bool:
        """Returns whether the schema accepts a value of this kind, and for a list also its first item."""
        kind = {str: "string", int: "integer", list: "array", dict: "object"}[type(value)]
        options = [self._resolve(option) for option in schema.get("anyOf", [schema])]
        return any(
            option.get("type") == kind and (kind != "array" or self._fits(option.get("items") or {}, value[0]))
            for option in options
            if option
        )

    def _minimal(self, schema: Schema) -> Any:
        """Something small that fits."""
        schema = self._resolve(schema.get("anyOf", [schema])[0])
        if "enum" in schema:
            return schema["enum"][0]
        match schema.get("type"):
            case "object":
                return {key: self._minimal(schema["properties"][key]) for key in schema.get("required", ())}
            case "array":
                return []
            case "string":
                return "x"
            case "boolean":
                return False
            case "integer" | "number":
                return max(schema.get("minimum", 1), 0)
        return None


def _kind(endpoint: Endpoint) -> Any:
    assert endpoint.body is not None
    return endpoint.body.kind


def _only_kind(option: Schema, options: list[Schema]) -> bool:
    """Returns whether no other option could accept what this one must refuse."""
    numbers = ("integer", "number")
    same = numbers if option.get("type") in numbers else (option.get("type"),)
    return sum(other.get("type") in same or not other.get("type") for other in options) == 1


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e30 else repr(float(value))


def _distinct(values: Iterable[Value]) -> list[Value]:
    """Each text once; a verdict wins over none."""
    found: dict[str, Value] = {}
    for value in values:
        if value.text not in found or found[value.text].is_good is None:
            found[value.text] = value
    return list(found.values())

"""The table of fields: everything has a bound, and the documents say what the table says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.server import ServerConfig
from quire.errors import ValidationError
from quire.frontend.http.bodies import MAX_LAX_BYTES, BodyReader, RequestBody
from quire.frontend.http.openapi import make_fields_page
from quire.frontend.openai.app import endpoints_of
from quire.frontend.openai.protocol.chat import ChatBody

ROOT = Path(__file__).resolve().parents[4]
EVERYTHING = ServerConfig(enable_admin=True, admin_port=8000, port=8000, enable_tokenizer_info_endpoint=True)
ENDPOINTS = endpoints_of(EVERYTHING, is_admin=False)
READERS: list[BodyReader[Any]] = list(dict.fromkeys(e.body for e in ENDPOINTS if e.body is not None))


REQUIRED: dict[str, Any] = {
    "prompt": "x", "messages": [], "tokens": [], "request_ids": [], "path": "", "method": "", "model": "m",
    "max_tokens": 1, "input": "x", "query": "x", "documents": [],
}  # fmt: skip
"""Every field that some body cannot do without."""


def required_of(reader: BodyReader[Any]) -> dict[str, Any]:
    """The least that a body holds."""
    return {field.name: REQUIRED[field.name] for field in msgspec.structs.fields(reader.kind) if field.required}


def unbounded(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yields where a JSON schema has a number without a range, or a text or list without a length."""
    for option in schema.get("anyOf", ()):
        yield from unbounded(option, path)
    kind = schema.get("type")
    if kind in ("integer", "number"):
        has_low = "minimum" in schema or "exclusiveMinimum" in schema
        if not has_low or not ("maximum" in schema or "exclusiveMaximum" in schema):
            yield path
    if kind == "string" and "maxLength" not in schema and "enum" not in schema:
        yield path
    if kind == "array":
        if "maxItems" not in schema:
            yield path
        yield from unbounded(schema.get("items") or {}, path + "[]")
    if kind == "object" and "properties" not in schema and "maxProperties" not in schema:
        yield path


def test_every_field_of_every_body_has_a_bound() -> None:
    _, components = msgspec.json.schema_components([reader.kind for reader in READERS])
    found = [
        where
        for name, schema in components.items()
        for field, described in schema["properties"].items()
        for where in unbounded(described, f"{name}.{field}")
    ]
    assert found == []


def test_the_check_for_bounds_can_fail() -> None:
    class Loose(RequestBody, kw_only=True):
        text: str = ""
        numbers: list[float] = []  # noqa: RUF012

    _, components = msgspec.json.schema_components([Loose])
    found = [w for f, s in components["Loose"]["properties"].items() for w in unbounded(s, f)]
    assert found == ["text", "numbers", "numbers[]"]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.kind.__name__)
def test_neutral_fields_exist_and_their_values_are_of_their_type(reader: BodyReader[Any]) -> None:
    for name, neutral in reader.kind.NEUTRAL.items():
        assert name in reader.kind.__struct_fields__
        for value in neutral:
            body = {**required_of(reader), name: value}
            assert getattr(reader.read(msgspec.json.encode(body)), name) == value


def test_the_page_of_fields_is_up_to_date() -> None:
    page = ROOT / "docs" / "http_fields.md"
    assert page.read_text(encoding="utf-8") == make_fields_page(ENDPOINTS), "run python -m tools.http_fields"


def refused_field(reader: BodyReader[Any], body: bytes) -> str | None:
    """The field an error names; None if the body is taken."""
    try:
        reader.read(body)
    except ValidationError as e:
        return (e.param or "").split(".")[0]
    return None


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.kind.__name__)
@pytest.mark.parametrize("body", [b"[y\xfc\x80", b'{"model": 1, x', b"[" * 5000, b"\xff"])
def test_what_is_no_json_is_refused_wherever_it_goes_wrong(reader: BodyReader[Any], body: bytes) -> None:
    """A wrong field may come before the place where the text stops being JSON."""
    assert refused_field(reader, body) is not None


@given(reader=st.sampled_from(READERS), text=st.text(max_size=40), cut=st.integers(0, 60), junk=st.binary(max_size=4))
def test_mutilated_bodies_are_read_or_refused(reader: BodyReader[Any], text: str, cut: int, junk: bytes) -> None:
    whole = msgspec.json.encode({"model": 7, "prompt": [text], "messages": text, "tokens": {"a": text}})
    refused_field(reader, whole[:cut] + junk + whole[cut + 1 :])


LOSSLESS: list[tuple[str, str, object]] = [
    ("max_tokens", "5.0", 5),
    ("max_tokens", '"5"', 5),
    ("temperature", '"0.5"', 0.5),
    ("temperature", "1", 1.0),
    ("logprobs", '"true"', True),
    ("logprobs", "1", True),
    ("stream", '"false"', False),
    ("seed", "-3.0", -3),
    ("stop", '"5"', "5"),
]
LOSSY = [
    ("max_tokens", "5.5"),
    ("max_tokens", '"5 tokens"'),
    ("max_tokens", '""'),
    ("max_tokens", "true"),
    ("max_tokens", '"9223372036854775808"'),
    ("temperature", '"nan"'),
    ("temperature", '"Infinity"'),
    ("logprobs", '"yes"'),
    ("logprobs", "2"),
    ("stop", "5"),
    ("user", "5"),
    ("n", "[1]"),
]


def chat_with(name: str, value: str) -> bytes:
    return f'{{"messages":[{{"role":"user","content":"x"}}],"{name}":{value}}}'.encode()


@pytest.mark.parametrize(("name", "value", "meant"), LOSSLESS)
def test_a_number_or_a_boolean_may_be_written_in_another_way(name: str, value: str, meant: object) -> None:
    found = getattr(BodyReader(ChatBody).read(chat_with(name, value)), name)
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize(("name", "value"), LOSSY)
def test_what_would_lose_something_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValidationError) as caught:
        BodyReader(ChatBody).read(chat_with(name, value))
    assert caught.value.param == name


def test_numbers_of_a_million_digits_are_not_read_as_such() -> None:
    """Reading a text of 27 million digits as a number would stop the event loop for 0.1 s."""
    for digits in (1000, MAX_LAX_BYTES):
        body = chat_with("max_tokens", '"' + "0" * digits + '5"')
        with pytest.raises(ValidationError, match="max_tokens"):
            BodyReader(ChatBody).read(body)
    assert BodyReader(ChatBody).read(chat_with("max_tokens", '"5"') + b" " * 1000).max_tokens == 5
    with pytest.raises(ValidationError, match="max_tokens"):
        BodyReader(ChatBody).read(chat_with("max_tokens", '"5"') + b" " * MAX_LAX_BYTES)

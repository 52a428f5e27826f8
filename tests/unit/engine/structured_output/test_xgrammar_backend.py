"""The second grammar library, where it is installed: the same forms as the first one's."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import tokenizers

from quire.config.engine import StructuredOutputsConfig
from quire.engine.structured_output.backend import Grammar
from quire.engine.structured_output.xgrammar_backend import XGrammarBackend
from quire.errors import ConfigError, ValidationError
from quire.structured_outputs import StructuredOutputsParams

from .conftest import EOS, SETUP
from .test_llguidance_backend import PERSON, allowed, takes
from .test_structural_tag import CALLS, DIGITS, TEXT, seq, tag

IS_INSTALLED = importlib.util.find_spec("xgrammar") is not None
needs_xgrammar = pytest.mark.skipif(not IS_INSTALLED, reason="xgrammar is not installed")


@pytest.mark.skipif(IS_INSTALLED, reason="xgrammar is installed")
def test_without_the_library_it_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'quire\[xgrammar\]'"):
        StructuredOutputsConfig(grammar_backend="xgrammar")
    with pytest.raises(ConfigError, match="cannot be imported"):
        XGrammarBackend(msgspec.structs.replace(SETUP, library="xgrammar"))


@pytest.fixture(scope="module")
def xgrammar() -> Iterator[XGrammarBackend]:
    backend = XGrammarBackend(msgspec.structs.replace(SETUP, library="xgrammar", cpu_s=20.0))
    yield backend
    backend.close()


def structural(form: Any) -> dict[str, Any]:
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


@needs_xgrammar
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"regex": "[a-c]{2}"}, ["ab"], ["a", "abc", ""]),
        ({"choice": ["yes", 'a "b"\n\\', "é😀"]}, ["yes", 'a "b"\n\\', "é😀"], ["no", "ye"]),
        ({"grammar": 'root ::= "a" root | "b"'}, ["aab", "b"], ["aa"]),
        ({"json_object": True}, ['{"a": [1, {"b": null}]}'], ["[1]", "1"]),
        ({"json": PERSON}, ['{"name": "Al", "age": -12}', '{"name":"","age":0}'], ["{}"]),
        ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"Al","age":1}'], ['{"name": "Al","age":1}']),
        (
            {"json": {"properties": {"a": {}}, "type": "object"}, "disable_additional_properties": True},
            ['{"a": 1}'],
            ['{"b": 1}'],
        ),
        (structural(seq(TEXT, tag("<n>", DIGITS, "</n>"))), ["x<n>1</n>"], ["x<n>a"]),
        (structural(CALLS), ["no call", "x<f=a>12</f>y", "<fx>any<end>"], ["<f=a>x"]),
        (structural({**CALLS, "at_least_one": True}), ["<f=a>12</f>y"], ["no call"]),
        (
            {"structural_tag": '{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}'},
            ["<a>1</a>"],
            ["<a>x</a>"],
        ),
    ],
)
def test_a_form_takes_what_fits_and_nothing_else(
    fields: dict[str, Any], good: list[str], bad: list[str], xgrammar: XGrammarBackend, tokenizer: tokenizers.Tokenizer
) -> None:
    params = StructuredOutputsParams(**fields)
    for text in good:
        assert takes(xgrammar.compile(params), text, tokenizer), text
    for text in bad:
        assert not takes(xgrammar.compile(params), text, tokenizer), text


@needs_xgrammar
@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "("},
        {"json": {"type": "magic"}},
        {"json": PERSON, "whitespace_pattern": " *"},
        {"grammar": "root ::= nothing"},
        {"grammar": 'start: "a"'},
        structural({"type": "magic"}),
        {"structural_tag": "[]"},
    ],
)
def test_what_is_wrong_is_the_clients_error(fields: dict[str, Any], xgrammar: XGrammarBackend) -> None:
    with pytest.raises(ValidationError, match=r"structured_outputs.* cannot be compiled") as caught:
        xgrammar.compile(StructuredOutputsParams(**fields))
    assert "/project/" not in str(caught.value)


def ids(text: str, tokenizer: tokenizers.Tokenizer) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@needs_xgrammar
def test_a_complete_form_and_one_that_may_go_on(xgrammar: XGrammarBackend, tokenizer: tokenizers.Tokenizer) -> None:
    grammar: Grammar = xgrammar.compile(StructuredOutputsParams(regex="ab*"))
    for token_id in ids("ab", tokenizer):
        assert not grammar.is_complete()
        assert grammar.accept(token_id) is None
    assert not grammar.is_complete()
    assert EOS in allowed(grammar)
    assert grammar.copy_with([]).accept(10**9) is not None
    assert grammar.forced_token() is None
    assert grammar.accept(EOS) is None
    assert grammar.is_complete()
    assert grammar.accept(EOS) is not None
    assert len(allowed(grammar)) > 3000  # it cannot go on, and `accept` says so
    choice = xgrammar.compile(StructuredOutputsParams(choice=["ab"]))
    choice = choice.copy_with(ids("ab", tokenizer))
    assert choice.is_complete()


@needs_xgrammar
def test_drafts_and_copies_change_nothing(xgrammar: XGrammarBackend, tokenizer: tokenizers.Tokenizer) -> None:
    grammar = xgrammar.compile(StructuredOutputsParams(regex="[0-9]{3}"))
    digits = ids("1", tokenizer) * 3
    assert grammar.count_valid([*digits, *ids("x", tokenizer)]) == 3
    before = allowed(grammar)
    copy = grammar.copy_with(digits)
    assert copy.is_complete()
    assert allowed(grammar) == before
    with pytest.raises(ValidationError):
        copy.copy_with(digits)

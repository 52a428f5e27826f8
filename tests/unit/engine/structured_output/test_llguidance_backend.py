"""Grammars: what they let through, and that random text comes to an end in them."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import tokenizers

from quire.engine.structured_output.backend import Grammar
from quire.engine.structured_output.llguidance_backend import LLGuidanceBackend
from quire.engine.structured_output.sandbox import MAX_CACHED_GRAMMARS
from quire.errors import ValidationError
from quire.structured_outputs import StructuredOutputsParams
from tests.seeds import seeds

from .conftest import EOS, VOCAB_SIZE

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def allowed(grammar: Grammar) -> list[int]:
    row = np.zeros(VOCAB_SIZE // 32, dtype=np.int32)
    grammar.fill_bitmask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def takes(grammar: Grammar, text: str, tokenizer: tokenizers.Tokenizer) -> bool:
    """Returns whether `text` is a complete output."""
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        if token_id not in allowed(grammar) or grammar.accept(token_id) is not None:
            return False
    return grammar.is_complete() or EOS in allowed(grammar)


def forced_text(grammar: Grammar, tokenizer: tokenizers.Tokenizer) -> str:
    """Returns the text that the grammar forces, which is also all that its masks allow."""
    token_ids = []
    while (token_id := grammar.forced_token()) is not None:
        assert allowed(grammar) == [token_id]
        assert grammar.accept(token_id) is None
        token_ids.append(token_id)
    return str(tokenizer.decode(token_ids))


def test_tokens_without_a_choice_are_forced(backend: LLGuidanceBackend, tokenizer: tokenizers.Tokenizer) -> None:
    grammar = backend.compile(StructuredOutputsParams(choice=["left of the house", "right of the house"]))
    assert grammar.forced_token() is None
    (left,) = tokenizer.encode("l", add_special_tokens=False).ids
    assert grammar.accept(left) is None
    assert forced_text(grammar.copy_with([]), tokenizer) == "eft of the house"
    assert forced_text(grammar, tokenizer) == "eft of the house"
    assert grammar.is_complete()
    assert grammar.forced_token() is None


def test_a_long_forced_text_is_not_looked_at_for_every_token(
    backend: LLGuidanceBackend, tokenizer: tokenizers.Tokenizer
) -> None:
    text = " ".join(["word"] * 500)
    grammar = backend.compile(StructuredOutputsParams(choice=[text]))
    token_ids = []
    while grammar.forced_token() is None:
        (token_id,) = allowed(grammar)
        assert grammar.accept(token_id) is None
        token_ids.append(token_id)
    assert str(tokenizer.decode(token_ids)) + forced_text(grammar.copy_with([]), tokenizer) == text
    assert 300 < len(token_ids) < 500


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"regex": "[a-c]{2}"}, ["ab"], ["a", "abc", ""]),
        ({"choice": ["yes", 'a "b"\n\\', "é😀"]}, ["yes", 'a "b"\n\\', "é😀"], ["no", "ye"]),
        ({"grammar": 'root ::= "a" root | "b"'}, ["aab", "b"], ["aa"]),
        ({"grammar": 'start: "a"* "b"'}, ["aab", "b"], ["aa"]),
        ({"json_object": True}, ['{"a": [1, {"b": null}]}'], ["[1]", "1"]),
        ({"json": PERSON}, ['{"name": "Al", "age": -12}', '{"name":"","age":0}'], ['{"name": "too long for it"', "{}"]),
        ({"json": PERSON}, ['{\n    "name": "Al",\n    "age": 1\n}'], ['{  "name": "Al", "age": 1}']),
        ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"Al","age":1}'], ['{"name": "Al","age":1}']),
        ({"json": PERSON, "whitespace_pattern": "[ ]{0,2}"}, ['{  "name":"Al","age":1}'], ['{   "name":"Al","age":1}']),
        ({"json": {"properties": {"a": {"type": "null"}}, "type": "object"}}, ['{"b": 1}'], []),
        (
            {"json": {"properties": {"a": {}}, "type": "object"}, "disable_additional_properties": True},
            ['{"a": 1}'],
            ['{"b": 1}'],
        ),
    ],
)
def test_texts_are_taken_exactly_when_they_fit(
    fields: dict[str, Any],
    good: list[str],
    bad: list[str],
    backend: LLGuidanceBackend,
    tokenizer: tokenizers.Tokenizer,
) -> None:
    params = StructuredOutputsParams(**fields)
    for text in good:
        assert takes(backend.compile(params), text, tokenizer), text
    for text in bad:
        assert not takes(backend.compile(params), text, tokenizer), text


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "("},
        {"regex": "a(?=b)"},
        {"grammar": "root ::= missing"},
        {"grammar": 'root ::= "a'},
        {"json": {"type": "object", "not": {}}},
        {"json": {"type": "nonsense"}},
        {"json": {"type": "integer", "minimum": 3, "maximum": 1}},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"json": PERSON, "whitespace_pattern": "("},
        {"structural_tag": "[]"},
        {"structural_tag": '{"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}'},
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], backend: LLGuidanceBackend) -> None:
    with pytest.raises(ValidationError, match=rf"structured_outputs\.{next(iter(fields))} cannot be compiled") as e:
        backend.compile(StructuredOutputsParams(**fields))
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 600


@pytest.mark.parametrize("seed", seeds(3))
def test_random_tokens_close_a_bounded_schema_within_its_size(
    seed: int, backend: LLGuidanceBackend, tokenizer: tokenizers.Tokenizer
) -> None:
    """The worst model there is. White space and digits cannot go on for ever."""
    grammar = backend.compile(StructuredOutputsParams(json=PERSON))
    rng, output = random.Random(seed), []
    while not grammar.is_complete():
        token_id = rng.choice(allowed(grammar))
        if token_id == EOS:
            break
        assert grammar.accept(token_id) is None
        output.append(token_id)
        assert len(output) < 250
    person = json.loads(tokenizer.decode(output))
    assert set(person) == {"name", "age"}


def test_tags_in_free_text(backend: LLGuidanceBackend, tokenizer: tokenizers.Tokenizer) -> None:
    tag = {"begin": "<call=f>", "schema": PERSON, "end": "</call>"}
    params = StructuredOutputsParams(structural_tag=json.dumps({"structures": [tag], "triggers": ["<call="]}))
    for text in ("no call", 'I call <call=f>{"name": "Al", "age": 1}</call> now'):
        assert takes(backend.compile(params), text, tokenizer), text
    for text in ("<call=g>", '<call=f>{"name": 1'):
        assert not takes(backend.compile(params), text, tokenizer), text


def test_a_token_that_does_not_fit_is_named(backend: LLGuidanceBackend) -> None:
    grammar = backend.compile(StructuredOutputsParams(regex="a"))
    before = allowed(grammar)
    assert grammar.count_valid([5]) == 0
    assert allowed(grammar) == before
    error = grammar.accept(5)
    assert isinstance(error, ValidationError)
    assert "structured_outputs" in str(error.param)
    assert len(allowed(grammar)) == VOCAB_SIZE, "a broken grammar allows all: the next accept says why"
    assert backend.compile(StructuredOutputsParams(regex="a")).accept(VOCAB_SIZE + 7) is not None


def test_copies_are_independent_and_the_cache_is_bounded(
    backend: LLGuidanceBackend, tokenizer: tokenizers.Tokenizer
) -> None:
    ids = tokenizer.encode("ab", add_special_tokens=False).ids
    params = StructuredOutputsParams(regex="ab?c")
    first = backend.compile(params)
    copy = first.copy_with(ids)
    assert allowed(first) != allowed(copy)
    assert allowed(backend.compile(params)) == allowed(first)
    with pytest.raises(ValidationError):
        copy.copy_with(ids)
    for i in range(MAX_CACHED_GRAMMARS + 3):
        backend.compile(StructuredOutputsParams(choice=[f"c{i}"]))
    assert len(backend._cached) == MAX_CACHED_GRAMMARS

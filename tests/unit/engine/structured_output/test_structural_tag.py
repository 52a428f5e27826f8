"""Structural tags: what each format lets through, alone and beside others."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.structured_output.guidance import compile_matcher, load_vocabulary, make_grammar_text
from quire.engine.structured_output.llguidance_backend import LLGuidanceBackend
from quire.errors import ValidationError
from quire.structured_outputs import StructuredOutputsParams
from tests.seeds import examples

from .conftest import EOS, TOKENIZER_FILE, VOCAB_SIZE
from .test_llguidance_backend import takes

VOCABULARY = load_vocabulary(TOKENIZER_FILE, VOCAB_SIZE, [EOS])

TEXT = {"type": "any_text"}
DIGITS = {"type": "regex", "pattern": "[0-9]+"}
JSON = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def seq(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


CALLS = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [tag("<f=a>", DIGITS, "</f>"), tag("<f=b>", JSON, "</f>"), tag("<fx>", TEXT, ["</fx>", "<end>"])],
}

CASES: list[tuple[Any, list[str], list[str]]] = [
    (const("abc"), ["abc"], ["ab", "abcd"]),
    (const(""), [""], ["a"]),
    (JSON, ['{"x": 1}', "{}"], ['{"x": "1"}']),
    (DIGITS, ["1", "23"], ["", "a"]),
    ({"type": "regex", "pattern": "a/b\\.\n"}, ["a/b.\n"], ["a/bx"]),
    ({"type": "grammar", "grammar": 'root ::= "a" [0-9]{2} sub\nsub ::= "x" | "y"'}, ["a12x"], ["a1x"]),
    (TEXT, ["", "any\n thing <f=a>"], []),
    ({"type": "any_text", "excludes": ["no", "a.b"]}, ["n o", "axb"], ["well, no", "a.b"]),
    (seq(const("a"), DIGITS, const("b")), ["a1b"], ["ab"]),
    (seq(TEXT, const("</t>"), DIGITS), ["hello </t>1", "</t>12"], ["hello", "x</t>"]),
    (seq(TEXT, tag("<n>", DIGITS, "</n>"), const("!")), ["x<n>1</n>!"], ["x<n>a"]),
    (seq(const("a"), TEXT), ["a", "abc\n"], ["b"]),
    ({"type": "or", "elements": [const("yes"), seq(const("no"), DIGITS)]}, ["yes", "no7"], ["no"]),
    (tag("<t>", TEXT, "</t>"), ["<t>abc < d</t>", "<t></t>"], ["<t>abc", "<t>a</t>b"]),
    (tag("<t>", TEXT, ["</t>", "<|end|>"]), ["<t>abc</t>", "<t>abc<|end|>"], ["<t>abc"]),
    (tag("<t>", JSON, "</t>"), ['<t>{"x": 2}</t>'], ["<t>{}"]),
    (CALLS, ["no call", "x<f=a>12</f>y", '<f=b>{"x": 1}</f><f=a>1</f>', "<fx>any<end>"], ["<f=c", "<f=a>x"]),
    ({**CALLS, "at_least_one": True}, ["x<f=a>12</f>y"], ["no call"]),
    ({**CALLS, "stop_after_first": True}, ["no call", "x<f=a>12</f>"], ["x<f=a>12</f>y"]),
    ({**CALLS, "stop_after_first": True, "at_least_one": True}, ["x<f=a>12</f>"], ["x"]),
    ({**CALLS, "excludes": ["bad"]}, ["good<f=a>1</f>"], ["bad<f=a>1</f>"]),
    (seq(CALLS, const("<stop>")), ["hm<f=a>1</f> and <stop>", "<stop>"], ["hm"]),
    (tag("<t>", CALLS, "</t>"), ["<t>a<f=a>1</f>b</t>"], ["<t>a<f=a>1</f>"]),
    (
        {"type": "tags_with_separator", "tags": [tag("<a>", DIGITS, "</a>")], "separator": ","},
        ["", "<a>1</a>", "<a>1</a>,<a>2</a>"],
        ["<a>1</a>,", "<a>1</a><a>2</a>"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag("<a>", DIGITS, "</a>")], "separator": ",", "at_least_one": True},
        ["<a>1</a>"],
        [""],
    ),
    (
        {
            "type": "tags_with_separator", "tags": [tag("<a>", DIGITS, "</a>")], "separator": ",",
            "stop_after_first": True,
        },
        ["<a>1</a>"],
        ["<a>1</a>,<a>2</a>"],
    ),
    (seq({"type": "optional", "content": const("a")}, const("b")), ["ab", "b"], ["aab"]),
    ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "aba"]),
    ({"type": "star", "content": const("ab")}, ["", "abab"], ["a"]),
    ({"type": "repeat", "content": const("ab"), "min": 2, "max": 3}, ["abab", "ababab"], ["ab", "abababab"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "good", "bad"), CASES, ids=[f"{i}-{form['type']}" for i, (form, _, _) in enumerate(CASES)]
)
def test_a_format_takes_what_fits_and_nothing_else(
    form: Any, good: list[str], bad: list[str], backend: LLGuidanceBackend, tokenizer: tokenizers.Tokenizer
) -> None:
    text = json.dumps({"type": "structural_tag", "format": form})
    params = StructuredOutputsParams(structural_tag=text)
    for output in good:
        assert takes(backend.compile(params), output, tokenizer), output
    for output in bad:
        assert not takes(backend.compile(params), output, tokenizer), output


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (None, "format type 'None' is not one of"),
        ({"type": "magic"}, "format type 'magic' is not one of const_string"),
        ({"type": "const_string"}, "value is missing"),
        ({"type": "sequence", "elements": []}, "elements is missing"),
        (seq(TEXT, DIGITS), "free text in a sequence"),
        (seq(TEXT, 3), "free text in a sequence"),
        ({"type": "star", "content": TEXT}, "no end of its own"),
        ({"type": "repeat", "content": DIGITS, "min": 1, "max": 10**9}, "at most 1024"),
        ({**CALLS, "triggers": ["<g"]}, "no trigger begins '<f=a>'"),
        (tag("<a>", DIGITS, 3), "the end of a tag"),
        ({"type": "any_text", "excludes": [""]}, "excludes is a list of texts"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "style 'qwen_xml'"),
        ({"type": "regex", "pattern": "("}, "cannot be compiled"),
    ],
)
def test_what_is_no_format_is_the_clients_error(form: Any, message: str, backend: LLGuidanceBackend) -> None:
    params = StructuredOutputsParams(structural_tag=json.dumps({"format": form}))
    with pytest.raises(ValidationError) as caught:
        backend.compile(params)
    assert message in str(caught.value)
    assert caught.value.param == "structured_outputs.structural_tag"


TEXTS = st.text('ab<>/\n"\\{', max_size=4)
LEAVES = st.one_of(
    st.fixed_dictionaries({"type": st.just("const_string"), "value": TEXTS}),
    st.fixed_dictionaries({"type": st.just("any_text")}, optional={"excludes": st.lists(TEXTS, max_size=2)}),
    st.sampled_from([DIGITS, JSON, {"type": "regex", "pattern": "a|b/"}, {"type": "magic"}, None, 3, {}]),
    st.fixed_dictionaries({"type": st.just("grammar"), "grammar": st.sampled_from(['root ::= "a" | "b"', "x"])}),
)


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tags = st.fixed_dictionaries(
        {"type": st.just("tag"), "begin": TEXTS, "content": inner, "end": st.one_of(TEXTS, st.lists(TEXTS, max_size=2))}
    )
    flags = {"at_least_one": st.booleans(), "stop_after_first": st.booleans()}
    return st.one_of(
        tags,
        st.fixed_dictionaries(
            {"type": st.sampled_from(["sequence", "or"]), "elements": st.lists(inner | tags, max_size=3)}
        ),
        st.fixed_dictionaries(
            {
                "type": st.just("triggered_tags"),
                "triggers": st.lists(TEXTS),
                "tags": st.lists(tags, max_size=2),
                **flags,
            }
        ),
        st.fixed_dictionaries(
            {"type": st.just("tags_with_separator"), "tags": st.lists(tags, max_size=2), "separator": TEXTS, **flags}
        ),
        st.fixed_dictionaries({"type": st.sampled_from(["optional", "star", "plus"]), "content": inner}),
        st.fixed_dictionaries(
            {"type": st.just("repeat"), "content": inner, "min": st.integers(-1, 2), "max": st.integers(-1, 3)}
        ),
    )


@given(st.recursive(LEAVES, branches, max_leaves=5))
@settings(max_examples=examples(100))
def test_any_tree_is_a_grammar_or_the_clients_error(form: Any) -> None:
    params = StructuredOutputsParams(structural_tag=json.dumps({"format": form}))
    with contextlib.suppress(ValidationError):
        matcher = compile_matcher(VOCABULARY, make_grammar_text(params), params)
        assert any(matcher.compute_bitmask()) or matcher.is_stopped()

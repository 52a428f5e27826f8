"""The form of an output, asked for over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.errors import ValidationError
from quire.frontend.openai.protocol.completion import CompletionBody
from quire.structured_outputs import StructuredOutputsParams

from .serving import Server, check

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "regex": None}}, None),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": json.dumps(SCHEMA)}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "root ::= a"}, {"grammar": "root ::= a"}),
    ],
)
def test_ways_to_ask(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    form = CompletionBody(prompt="x", **fields).form()
    if "disable_any_whitespace" in str(fields):
        expected = {"json": SCHEMA, "disable_any_whitespace": True}
    assert form == (None if expected is None else StructuredOutputsParams(**expected))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regexx": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
    ],
)
def test_what_makes_no_sense_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as e:
        CompletionBody(prompt="x", **fields).form()
    assert e.value.param == param


def test_answers_have_the_form_and_bad_forms_are_a_400() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer(PATH, prompt="Yes or no?", structured_outputs={"choice": ["yes", "no"]})
        assert answer["choices"][0]["text"] in ("yes", "no")
        assert answer["choices"][0]["finish_reason"] == "stop"
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "A person."}], "max_tokens": 200}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
        answer = await server.answer(CHAT, **body)
        assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"name", "age"}
        chunks = await server.stream(CHAT, **body)
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert json.loads(text).keys() == {"name", "age"}
        for stream in (False, True):
            error = await server.refusal(PATH, prompt="x", structured_outputs={"regex": "("}, stream=stream)
            assert "unclosed group" in error["message"]
            assert (error["type"], error["param"]) == ("BadRequestError", "structured_outputs")
            error = await server.refusal(PATH, prompt="x", guided_regex="(", stream=stream)
            assert "unclosed group" in error["message"]
            assert error["param"] == "guided_regex"
            wrong = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "nothing"}}}
            error = await server.refusal(CHAT, **body | {"response_format": wrong}, stream=stream)
            assert error["param"] == "response_format"

    check(test)

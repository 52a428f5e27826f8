"""Translates a request's form into the grammar that llguidance reads.

Runs in the compiler's child process: text from clients is processed nowhere else before it has passed there.
"""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance

from quire.engine.structured_output.structural_tag import bound_schema, make_tag_grammar
from quire.errors import ValidationError
from quire.structured_outputs import StructuredOutputsParams

WHITESPACE = r"[ ]|\n[ ]{0,16}"
"""White space between two parts of JSON: one space, or a line break with its indentation. Bounded, so that white space
alone can never use up an output."""

_MAX_WHY_CHARS = 400
"""Most characters of a library's error message, which may quote the whole grammar."""


def make_grammar_text(params: StructuredOutputsParams) -> str:
    """Returns the grammar. Raises ValidationError for a form that cannot be translated. Does not compile it."""
    kind, text = params.source
    try:
        match kind:
            case "json":
                return _json_grammar(text, params)
            case "regex":
                return str(llguidance.LLMatcher.grammar_from_regex(text))
            case "choice":
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
                return str(llguidance.LLMatcher.grammar_from_lark(f"start: {choices}"))
            case "grammar":
                return str(llguidance.grammar_from("grammar", text))
            case _:
                return _tag_grammar(text, params)
    except ValidationError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, AssertionError) as e:
        raise grammar_error(params, str(e) or type(e).__name__) from None


def grammar_error(params: StructuredOutputsParams, why: str) -> ValidationError:
    """Returns the error for a grammar that cannot be used."""
    kind = params.source.kind
    lines = [line.strip() for line in why.splitlines()]
    words = " ".join(line for line in lines if line.strip("^") and not re.match(r"\d+ \|", line))
    if len(words) > _MAX_WHY_CHARS:
        words = words[:_MAX_WHY_CHARS] + "…"
    return ValidationError(f"structured_outputs.{kind} cannot be compiled: {words}", param=f"structured_outputs.{kind}")


def _json_options(params: StructuredOutputsParams) -> Any:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False, "lenient": False}
    pattern = WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
    return {"whitespace_flexible": True, "whitespace_pattern": pattern, "lenient": False}


def _json_grammar(schema: str, params: StructuredOutputsParams) -> str:
    bounded = bound_schema(schema, disable_additional_properties=params.disable_additional_properties)
    return str(llguidance.LLMatcher.grammar_from_json_schema(bounded, overrides=_json_options(params)))


def _tag_grammar(text: str, params: StructuredOutputsParams) -> str:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("a structural tag is a JSON object")
    return make_tag_grammar(value, _json_options(params))

"""llguidance: translation of forms into grammars that it reads, the tokens of the model, and matchers of both.

Forms are translated in the compiler's child process: text from clients is processed nowhere else before it has passed
there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llguidance

from quire.config.tokenizer_json import read_tokenizer_json
from quire.engine.structured_output.compiler import CompilerSetup
from quire.engine.structured_output.structural_tag import bound_schema, make_tag_grammar
from quire.errors import ConfigError, ValidationError
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


ENDS_WELL = frozenset({"NoExtension", "NoExtensionBias", "EndOfSentence"})
"""llguidance's words for an output that nothing can follow."""


class GrammarVocabulary(NamedTuple):
    """A tokenizer and the number of logits per row."""

    tokenizer: llguidance.LLTokenizer
    vocab_size: int


def load_vocabulary(tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarVocabulary:
    """Reads a tokenizer.json, or the vocabulary file that its directory has instead. Raises ConfigError if it cannot be
    read.

    The model may have more logits than the tokenizer has tokens, or fewer.
    """
    eos = list(eos_token_ids)
    try:
        text = _read_text(tokenizer_file)
        try:
            tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
        except ValueError as e:
            if "too small" not in str(e):
                raise
            tokenizer = llguidance.LLTokenizer(text, eos_token=eos)
    except (ValueError, OSError) as e:
        raise ConfigError(f"{tokenizer_file} cannot be used for structured outputs: {e}") from None
    return GrammarVocabulary(tokenizer, vocab_size)


def make_check(setup: CompilerSetup) -> Callable[[StructuredOutputsParams], str]:
    """Returns a check for the compiler process: it compiles a grammar, and returns it as text."""
    vocabulary = load_vocabulary(Path(setup.tokenizer_file), setup.vocab_size, setup.eos_token_ids)

    def check(params: StructuredOutputsParams) -> str:
        text = make_grammar_text(params)
        compile_matcher(vocabulary, text, params)
        return text

    return check


def _read_text(tokenizer_file: Path) -> str:
    if tokenizer_file.is_file():
        return tokenizer_file.read_text(encoding="utf-8")
    found = read_tokenizer_json(tokenizer_file.parent)
    if found is None:
        raise ConfigError(f"structured outputs need the model's tokenizer.json, and there is no {tokenizer_file}")
    return found.text


def compile_matcher(vocabulary: GrammarVocabulary, text: str, params: StructuredOutputsParams) -> llguidance.LLMatcher:
    """Returns the initial state of a grammar.

    Raises ValidationError if it is wrong, exceeds llguidance's limits, or allows nothing.
    """
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
    if not matcher.is_error() and not matcher.is_accepting():
        matcher.compute_bitmask()  # finds out whether anything can begin
        if matcher.is_stopped() and matcher.stop_reason() in ENDS_WELL:
            raise grammar_error(params, "no output can satisfy it")
    if matcher.is_error():
        raise grammar_error(params, matcher.get_error())
    return matcher

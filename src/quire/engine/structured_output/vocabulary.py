"""The model's tokens in llguidance's form, and llguidance's matchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import llguidance

from quire.config.tokenizer_json import read_tokenizer_json
from quire.engine.structured_output.grammar_text import grammar_error
from quire.errors import ConfigError
from quire.structured_outputs import StructuredOutputsParams

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

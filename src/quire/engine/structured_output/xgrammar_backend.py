"""Grammars by xgrammar (https://github.com/mlc-ai/xgrammar), where it is installed: `--grammar-backend xgrammar`.

The child compiles and sends the compiled grammar as text, so nothing is compiled in the engine. xgrammar imports torch
and more, so it is imported only if it is configured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.structured_output.backend import Grammar
from quire.engine.structured_output.compiler import CompilerSetup
from quire.engine.structured_output.guidance import grammar_error, load_vocabulary
from quire.engine.structured_output.sandbox import CheckedBackend
from quire.engine.structured_output.structural_tag import bound_schema, format_of
from quire.errors import ClientError, ConfigError, ValidationError
from quire.structured_outputs import StructuredOutputsParams

MAX_WHITESPACE = 16
"""Characters of white space between two parts of JSON."""
_PLACE = re.compile(r"^\[[\d:]+\] \S+: ", re.MULTILINE)
"""Matches places in xgrammar's source within its error messages."""


def _import_xgrammar() -> Any:
    try:
        import xgrammar  # optional, and heavy: it imports torch
    except ImportError as e:
        raise ConfigError(
            f"--grammar-backend xgrammar: xgrammar cannot be imported ({e}); pip install 'quire[xgrammar]', or use "
            "guidance"
        ) from None
    return xgrammar


def _load_token_info(setup: CompilerSetup) -> Any:
    """Returns the vocabulary in xgrammar's form. Raises ConfigError."""
    xgrammar = _import_xgrammar()
    tokenizer, vocab_size = load_vocabulary(Path(setup.tokenizer_file), setup.vocab_size, setup.eos_token_ids)
    known = min(tokenizer.vocab_size, vocab_size)
    tokens = [b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in range(known)]
    return xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(setup.eos_token_ids)
    )


def make_check(setup: CompilerSetup) -> Callable[[StructuredOutputsParams], str]:
    """Returns a check for the child process: it compiles a grammar, and returns it as text."""
    xgrammar = _import_xgrammar()
    compiler = xgrammar.GrammarCompiler(_load_token_info(setup), max_threads=1, cache_enabled=False)

    def check(params: StructuredOutputsParams) -> str:
        try:
            return str(_compile(compiler, params).serialize_json())
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, RecursionError, AssertionError) as e:
            raise grammar_error(params, _PLACE.sub("", str(e)) or type(e).__name__) from None

    return check


def _compile(compiler: Any, params: StructuredOutputsParams) -> Any:
    kind, text = params.source
    match kind:
        case "json":
            if params.whitespace_pattern is not None:
                raise ValueError("xgrammar has no whitespace_pattern; leave it out, or use the backend guidance")
            schema = bound_schema(text, disable_additional_properties=params.disable_additional_properties)
            if params.disable_any_whitespace:
                return compiler.compile_json_schema(
                    schema, any_whitespace=False, separators=(",", ":"), strict_mode=False
                )
            return compiler.compile_json_schema(schema, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
        case "regex":
            return compiler.compile_regex(text)
        case "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            return compiler.compile_grammar(f"root ::= {choices}")
        case "grammar":
            if "::=" not in text:
                raise ValueError("xgrammar reads EBNF with root ::= …; for Lark use the backend guidance")
            return compiler.compile_grammar(text)
        case _:
            return compiler.compile_structural_tag({"type": "structural_tag", "format": format_of(json.loads(text))})


class XGrammarGrammar(Grammar):
    """One matcher."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def accept(self, token_id: int) -> ClientError | None:
        if token_id < self._vocab_size and not self._matcher.is_terminated() and self._matcher.accept_token(token_id):
            return None
        return ValidationError(
            "the output cannot go on in the form that was asked for: another parameter (allowed_token_ids, bad_words, "
            "logit_bias, min_tokens) forbids what fits",
            param="structured_outputs",
        )

    def is_complete(self) -> bool:
        matcher = self._matcher
        if matcher.is_terminated() or not matcher.is_completed():
            return bool(matcher.is_terminated())
        row = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        self.fill_bitmask(row)
        for token_id in matcher.stop_token_ids:
            row[token_id // 32] &= np.int32(~np.uint32(1 << token_id % 32).astype(np.int32))
        return not row.any()

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        needed = not self._matcher.is_terminated() and self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0)
        if not needed or not row.any():
            row[:] = -1

    def count_valid(self, token_ids: Sequence[int]) -> int:
        matcher = self._matcher.fork()
        for count, token_id in enumerate(token_ids):
            if matcher.is_terminated() or not matcher.accept_token(token_id):
                return count
        return len(token_ids)

    def copy(self) -> XGrammarGrammar:
        return XGrammarGrammar(self._matcher.fork(), self._vocab_size)


class XGrammarBackend(CheckedBackend):
    """Reads what the child has compiled."""

    def __init__(self, setup: CompilerSetup) -> None:
        """Raises ConfigError if xgrammar is not installed, or the tokenizer cannot be read."""
        super().__init__(setup)
        self._xgrammar = _import_xgrammar()
        self._info = _load_token_info(setup)

    def _load(self, text: str, params: StructuredOutputsParams) -> Grammar:
        compiled = self._xgrammar.CompiledGrammar.deserialize_json(text, self._info)
        return XGrammarGrammar(self._xgrammar.GrammarMatcher(compiled), self.vocab_size)

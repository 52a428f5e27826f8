"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): the default backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np
import numpy.typing as npt

from quire.engine.structured_output.backend import Grammar
from quire.engine.structured_output.compiler import CompilerSetup
from quire.engine.structured_output.guidance import ENDS_WELL, GrammarVocabulary, compile_matcher, load_vocabulary
from quire.engine.structured_output.sandbox import CheckedBackend
from quire.errors import ClientError, ValidationError
from quire.structured_outputs import StructuredOutputsParams

MAX_FORCED = 64
"""Most tokens of a forced text that are reported as forced: finding them costs as much as the text is long."""


class LLGuidanceGrammar(Grammar):
    """One matcher. `num_unlooked` tokens are accepted before `forced_token` looks again."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: GrammarVocabulary, num_unlooked: int = 0) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_unlooked = num_unlooked

    def accept(self, token_id: int) -> ClientError | None:
        matcher = self._matcher
        self._num_unlooked = max(0, self._num_unlooked - 1)
        is_known = token_id < self._vocabulary.tokenizer.vocab_size
        if is_known and matcher.consume_token(token_id) and (not matcher.is_stopped() or self.is_complete()):
            return None
        why = matcher.get_error().partition("\n")[0] or f"the grammar ends with {matcher.stop_reason()}"
        return ValidationError(
            f"the output cannot go on in the form that was asked for: {why}; a limit of the grammar library was "
            "reached, or another parameter (allowed_token_ids, bad_words, logit_bias, min_tokens) forbids what fits",
            param="structured_outputs",
        )

    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and self._matcher.stop_reason() in ENDS_WELL

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        row[:] = -1 if self._matcher.is_error() else mask[: len(row)]

    def forced_token(self) -> int | None:
        if self._num_unlooked:
            return None
        forced = self._matcher.compute_ff_tokens()
        self._num_unlooked = max(0, len(forced) - MAX_FORCED)
        if not forced or self._num_unlooked:
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)  # cheap: the text is known
        (words,) = np.nonzero(mask)
        word = int(mask[words[0]]) if len(words) == 1 else 0
        return forced[0] if word and not word & (word - 1) and forced[0] < self._vocabulary.vocab_size else None

    def count_valid(self, token_ids: Sequence[int]) -> int:
        return int(self._matcher.validate_tokens(list(token_ids)))

    def copy(self) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self._matcher.deep_copy(), self._vocabulary, self._num_unlooked)


class LLGuidanceBackend(CheckedBackend):
    """Compiles again what the child process has compiled: the work is deterministic, and costs the same."""

    def __init__(self, setup: CompilerSetup) -> None:
        """Raises ConfigError if the tokenizer cannot be read."""
        super().__init__(setup)
        self._vocabulary = load_vocabulary(Path(setup.tokenizer_file), setup.vocab_size, setup.eos_token_ids)

    def _load(self, text: str, params: StructuredOutputsParams) -> Grammar:
        return LLGuidanceGrammar(compile_matcher(self._vocabulary, text, params), self._vocabulary)

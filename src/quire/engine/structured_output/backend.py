"""The interface to grammar libraries: one file per library implements it.

`place_form` delays a grammar until the end of a model's reasoning: before it any token is allowed except the end of the
text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from quire.errors import ClientError, ValidationError
from quire.structured_outputs import ReasoningTokens, StructuredOutputsParams


class Grammar(ABC):
    """The state of one output in its grammar. Used by one thread at a time."""

    @abstractmethod
    def accept(self, token_id: int) -> ClientError | None:
        """Takes in a token. Returns why it is not allowed, or None."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Returns whether the output is complete and no token but the end can follow."""

    @abstractmethod
    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        """Writes which tokens may come next into `row` [ceil(vocab / 32)]: bit t % 32 of word t // 32.

        The end of sequence is among them where the output may end. A grammar that cannot continue allows all: the next
        `accept` then returns the reason.
        """

    def forced_token(self) -> int | None:
        """Returns the token that must come next; None where there is a choice, or where finding out costs as much as a
        mask.

        Changes nothing.
        """
        return None

    @abstractmethod
    def count_valid(self, token_ids: Sequence[int]) -> int:
        """Returns how many of these tokens, from the first on, may come next. Changes nothing."""

    @abstractmethod
    def copy(self) -> Grammar:
        """Returns an independent state that has seen the same tokens."""

    def copy_with(self, token_ids: Sequence[int]) -> Grammar:
        """Returns an independent state that has seen `token_ids` more. Raises ClientError if it does not allow them."""
        copy = self.copy()
        for token_id in token_ids:
            error = copy.accept(token_id)
            if error is not None:
                raise error
        return copy


class GrammarBackend(ABC):
    """Compiles grammars for one tokenizer. Used by the compiler's thread only."""

    vocab_size: int
    """Number of logits per row; set by the constructor."""
    eos_token_ids: Sequence[int] = ()
    """The tokens that end a text."""

    @abstractmethod
    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Returns the initial state of a grammar. Raises ValidationError for one that is wrong or exceeds a limit."""

    @abstractmethod
    def close(self) -> None:
        """Releases its resources. May be called twice, and from any thread."""


class _Part(Enum):
    """Part of the output that comes next."""

    START = 0
    """Nothing was generated: reasoning may begin, or the form."""
    REASONING = 1
    FORM = 2


class AfterReasoning(Grammar):
    """Applies `form` after the token that closes the reasoning, or at once if no reasoning begins."""

    def __init__(
        self, form: Grammar, tokens: ReasoningTokens, eos_token_ids: Sequence[int], part: _Part | None = None
    ) -> None:
        self._form = form
        self._tokens = tokens
        self._eos_token_ids = eos_token_ids
        self._part = part or (_Part.REASONING if tokens.open is None else _Part.START)

    def accept(self, token_id: int) -> ClientError | None:
        if self._part is _Part.START:
            self._part = _Part.REASONING if token_id == self._tokens.open else _Part.FORM
            return None if self._part is _Part.REASONING else self._form.accept(token_id)
        if self._part is _Part.FORM:
            return self._form.accept(token_id)
        if token_id == self._tokens.close:
            self._part = _Part.FORM
        return None

    def is_complete(self) -> bool:
        return self._part is _Part.FORM and self._form.is_complete()

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        words = row.view(np.uint32)
        if self._part is _Part.REASONING:
            words[:] = 0xFFFFFFFF
            for token_id in self._eos_token_ids:
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
            return
        self._form.fill_bitmask(row)
        if self._part is _Part.START and self._tokens.open is not None:
            words[self._tokens.open // 32] |= np.uint32(1 << self._tokens.open % 32)

    def forced_token(self) -> int | None:
        return self._form.forced_token() if self._part is _Part.FORM else None

    def count_valid(self, token_ids: Sequence[int]) -> int:
        if self._part is _Part.FORM or (self._part is _Part.START and list(token_ids[:1]) != [self._tokens.open]):
            return self._form.count_valid(token_ids)
        for position, token_id in enumerate(token_ids):
            if token_id == self._tokens.close:
                return position + 1 + self._form.count_valid(token_ids[position + 1 :])
            if token_id in self._eos_token_ids:
                return position
        return len(token_ids)

    def copy(self) -> AfterReasoning:
        return AfterReasoning(self._form.copy(), self._tokens, self._eos_token_ids, self._part)


def place_form(form: Grammar, tokens: ReasoningTokens | None, eos_token_ids: Sequence[int], vocab_size: int) -> Grammar:
    """Returns `form`, delayed until the end of the reasoning. Raises ValidationError for tokens that the model does not
    have."""
    if tokens is None:
        return form
    for token_id in tokens.ids:
        if not 0 <= token_id < vocab_size:
            raise ValidationError(
                f"the reasoning is said to stand between tokens {tokens.open} and {tokens.close}; the model has "
                f"{vocab_size}",
                param="structured_outputs",
            )
    return AfterReasoning(form, tokens, [token_id for token_id in eos_token_ids if token_id < vocab_size])

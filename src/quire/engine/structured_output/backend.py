"""What a grammar library must offer. One file per library implements this; nothing else knows which one it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.errors import ClientError
from quire.structured_outputs import StructuredOutputsParams


class Grammar(ABC):
    """The state of one output in its grammar. Used by one thread at a time."""

    @abstractmethod
    def accept(self, token_id: int) -> ClientError | None:
        """Take in a token; why that is impossible, else None."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the output fits and no token but the end can follow."""

    @abstractmethod
    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next into `row` [ceil(vocab / 32)]: bit t % 32 of word t // 32. The end of
        sequence is among them where the output may end. A grammar that cannot go on allows all: the next `accept`
        then says why."""

    def forced_token(self) -> int | None:
        """The token that comes next, where the grammar leaves no choice; None where it does, or where finding out
        would cost as much as a mask. Changes nothing."""
        return None

    @abstractmethod
    def count_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may come next. Changes nothing."""

    @abstractmethod
    def copy(self) -> Grammar:
        """An independent state that has seen the same."""

    def copy_with(self, token_ids: Sequence[int]) -> Grammar:
        """An independent state that has seen `token_ids` more. Raises ClientError if it does not allow them."""
        copy = self.copy()
        for token_id in token_ids:
            error = copy.accept(token_id)
            if error is not None:
                raise error
        return copy


class GrammarBackend(ABC):
    """Compiles grammars for one tokenizer. Used by the compiler's thread only."""

    vocab_size: int
    """Rows of logits; set by the constructor."""
    eos_token_ids: Sequence[int] = ()
    """The tokens that it knows to end a text."""

    @abstractmethod
    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The start of a grammar. Raises ValidationError for one that is wrong or goes beyond a limit."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds. May be called twice, and from any thread."""

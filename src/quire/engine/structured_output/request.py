"""The state of one request's grammar."""

from __future__ import annotations

from concurrent.futures import Future
from enum import Enum

from quire.engine.structured_output.backend import Grammar
from quire.errors import ClientError, GenerationError, QuireError, ValidationError
from quire.structured_outputs import StructuredOutputsParams


class GrammarVerdict(Enum):
    """Result of passing a token to a grammar."""

    GOES_ON = 0
    COMPLETE = 1
    """The output is complete, and nothing can follow."""
    BROKEN = 2
    """The grammar does not allow the token, or cannot continue: see `StructuredOutputRequest.error`."""


class StructuredOutputRequest:
    """The grammar of one request, from its compilation to the last token.

    The compiler's thread sets `compiling`; everything else belongs to the scheduler. The grammar has always seen
    exactly the request's output tokens: those from before a restart when it is compiled, later ones as they are
    appended. A preemption changes nothing.
    """

    __slots__ = ("compiling", "error", "jumps", "params")

    def __init__(self, params: StructuredOutputsParams) -> None:
        self.params = params
        self.jumps = False
        """True if tokens that the grammar forces are appended without a step of the model."""
        self.compiling: Future[Grammar] = Future()
        self.error: QuireError | None = None

    @property
    def grammar(self) -> Grammar:
        """The grammar; set after a successful compilation."""
        return self.compiling.result(timeout=0)

    def check_start(self) -> GrammarVerdict:
        """Returns whether anything is left to generate: a resumed request may be complete. Called after the
        compilation."""
        error = self.compiling.exception(timeout=0)
        if error is None:
            return GrammarVerdict.COMPLETE if self.grammar.is_complete() else GrammarVerdict.GOES_ON
        self.error = error if isinstance(error, QuireError) else GenerationError(f"{type(error).__name__}: {error}")
        return GrammarVerdict.BROKEN

    def accept(self, token_id: int) -> GrammarVerdict:
        """Takes in the next output token."""
        why = self.grammar.accept(token_id)
        if why is not None:
            self.error = why if isinstance(why, ClientError) else ValidationError(str(why), param="structured_outputs")
            return GrammarVerdict.BROKEN
        return GrammarVerdict.COMPLETE if self.grammar.is_complete() else GrammarVerdict.GOES_ON

    def count_valid(self, token_ids: list[int]) -> int:
        """Returns how many of these tokens, from the first on, may come next."""
        return self.grammar.count_valid(token_ids)

    def forced_token(self) -> int | None:
        """Returns the token that must come next, or None if there is a choice."""
        return self.grammar.forced_token()

    def cancel(self) -> None:
        """Prevents a compilation that has not begun: the request has ended."""
        self.compiling.cancel()

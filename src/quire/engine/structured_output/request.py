"""The grammar of one request, from the moment it is asked for to the request's last token."""

from __future__ import annotations

from concurrent.futures import Future
from enum import Enum

from quire.engine.structured_output.backend import Grammar
from quire.errors import ClientError, GenerationError, QuireError, ValidationError
from quire.structured_outputs import StructuredOutputsParams


class GrammarVerdict(Enum):
    """What a grammar says of a token it was given."""

    GOES_ON = 0
    COMPLETE = 1
    """The output has the form that was asked for, and nothing can follow."""
    BROKEN = 2
    """The grammar does not allow it, or cannot go on: `StructuredOutputRequest.error` says why."""


class StructuredOutputRequest:
    """What a `Request` with a grammar holds. The compiler's thread sets `compiling`; all else belongs to the scheduler.

    The grammar has seen exactly the request's output tokens, always: those of an earlier life of the core are given to
    it where it is compiled, later ones as they are appended. A preemption changes nothing.
    """

    __slots__ = ("compiling", "error", "jumps", "params")

    def __init__(self, params: StructuredOutputsParams) -> None:
        self.params = params
        self.jumps = False
        """Whether tokens that the grammar forces are appended without the model."""
        self.compiling: Future[Grammar] = Future()
        self.error: QuireError | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether the compiler is done with it, with success or not."""
        return self.compiling.done()

    @property
    def grammar(self) -> Grammar:
        """Once compiled without an error."""
        return self.compiling.result(timeout=0)

    def check_start(self) -> GrammarVerdict:
        """Once compiled: whether there is anything left to generate. A resumed request may have said all."""
        error = self.compiling.exception(timeout=0)
        if error is None:
            return GrammarVerdict.COMPLETE if self.grammar.is_complete() else GrammarVerdict.GOES_ON
        self.error = error if isinstance(error, QuireError) else GenerationError(f"{type(error).__name__}: {error}")
        return GrammarVerdict.BROKEN

    def accept(self, token_id: int) -> GrammarVerdict:
        """Take in the next output token."""
        why = self.grammar.accept(token_id)
        if why is not None:
            self.error = why if isinstance(why, ClientError) else ValidationError(str(why), param="structured_outputs")
            return GrammarVerdict.BROKEN
        return GrammarVerdict.COMPLETE if self.grammar.is_complete() else GrammarVerdict.GOES_ON

    def forced_token(self) -> int | None:
        """The token that must come next, where there is no choice."""
        return self.grammar.forced_token()

    def cancel(self) -> None:
        """The request has ended: do not begin to compile."""
        self.compiling.cancel()

"""The compiler process with a translation that takes what the name of the grammar says: time, memory or a stack."""

from __future__ import annotations

import faulthandler

from quire.engine.structured_output import compiler, guidance
from quire.engine.structured_output.guidance import make_grammar_text
from quire.structured_outputs import StructuredOutputsParams


def hungry(params: StructuredOutputsParams) -> str:
    """Wraps `make_grammar_text` and consumes resources."""
    match params.regex:
        case "cpu":
            while True:
                pass
        case "memory":
            bytearray(1 << 30)
        case "stack":
            faulthandler._stack_overflow()
    return make_grammar_text(params)


if __name__ == "__main__":
    guidance.make_grammar_text = hungry
    compiler.main()

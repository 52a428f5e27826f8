"""Structured outputs: what compiles their grammars, and what one may cost."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from quire.config.flags import flag, parse_human_int
from quire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """Limits are per grammar; a request whose grammar goes beyond one is refused."""

    grammar_backend: str = flag(
        "auto",
        "Library that compiles JSON schemas, regular expressions and grammars; xgrammar must be installed.",
        choices=("auto", "guidance", "xgrammar"),
    )
    grammar_jump_forward: bool = flag(
        True, "Append tokens that a grammar forces without running the model for each; the output is the same."
    )
    grammar_compile_cpu_s: float = flag(
        3.0, "CPU seconds a grammar may take to compile.", parse=float, minimum=0.1, maximum=600
    )
    grammar_compile_memory_bytes: int = flag(
        1 << 29, "Memory a grammar may take to compile (512M, 1G).", parse=parse_human_int, minimum=1 << 24
    )

    def __post_init__(self) -> None:
        if self.grammar_backend == "xgrammar" and not has_xgrammar():
            raise ConfigError(
                "--grammar-backend xgrammar: xgrammar is not installed; pip install 'quire[xgrammar]', or use guidance"
            )


def has_xgrammar() -> bool:
    """Whether it can be used."""
    return importlib.util.find_spec("xgrammar") is not None

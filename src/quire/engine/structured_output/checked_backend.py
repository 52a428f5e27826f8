"""A backend whose grammars are compiled in a child process first (see compiler.py), and kept."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict

from quire.engine.structured_output.backend import Grammar, GrammarBackend
from quire.engine.structured_output.compiler import CompilerSetup
from quire.engine.structured_output.sandbox import CompilerProcess
from quire.structured_outputs import StructuredOutputsParams

MAX_CACHED_GRAMMARS = 64
"""Compiled grammars that are kept for the next request that asks for the same."""
MAX_CACHED_CHARS = 1 << 21
"""Text of those grammars together: their memory grows with it."""


class CheckedBackend(GrammarBackend):
    """Nothing reaches `_load` that has not passed in the child."""

    def __init__(self, setup: CompilerSetup) -> None:
        self.vocab_size = setup.vocab_size
        self.eos_token_ids = setup.eos_token_ids
        self._process = CompilerProcess(setup)
        self._cached: OrderedDict[tuple[object, ...], Grammar] = OrderedDict()
        self._num_chars = 0

    @abstractmethod
    def _load(self, text: str, params: StructuredOutputsParams) -> Grammar:
        """The start of a grammar, from the child's answer. Raises ValidationError."""

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        key = _key(params)
        grammar = self._cached.get(key)
        if grammar is None:
            grammar = self._load(self._process.check(params), params)
            self._keep(key, grammar)
        else:
            self._cached.move_to_end(key)
        return grammar.copy()

    def _keep(self, key: tuple[object, ...], grammar: Grammar) -> None:
        self._cached[key] = grammar
        self._num_chars += _size(key)
        while len(self._cached) > MAX_CACHED_GRAMMARS or self._num_chars > MAX_CACHED_CHARS:
            oldest, _ = self._cached.popitem(last=False)
            self._num_chars -= _size(oldest)

    def close(self) -> None:
        self._process.kill()


def _key(params: StructuredOutputsParams) -> tuple[object, ...]:
    return (
        *params.source,
        params.disable_any_whitespace,
        params.disable_additional_properties,
        params.whitespace_pattern,
    )


def _size(key: tuple[object, ...]) -> int:
    return len(str(key[1]))

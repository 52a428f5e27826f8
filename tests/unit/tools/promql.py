"""Enough of PromQL to read our own queries: finds the metrics and labels in them, and refuses what is no query."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?![\w.]))|(?P<duration>\$__rate_interval|\d+[smhd])|(?P<string>\"[^\"]*\"|'[^']*')"
    r"|(?P<name>[A-Za-z_:][\w:]*)|(?P<op>==|!=|<=|>=|=~|!~|[-+*/<>=(){}\[\],]))"
)
_AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
_FUNCTIONS = {"rate", "increase", "histogram_quantile"}
_RANGED = {"rate", "increase"}


@dataclass
class Selector:
    """A metric in a query, with the labels it is filtered by."""

    metric: str
    labels: list[str] = field(default_factory=list)
    is_range: bool = False


@dataclass
class Expression:
    """The subject of a query. `grouped_by` are labels of aggregations."""

    selectors: list[Selector] = field(default_factory=list)
    grouped_by: list[str] = field(default_factory=list)


def parse(text: str) -> Expression:
    """Raises ValueError, with the place, for what is no query."""
    parser = _Parser(list(_tokens(text)), text)
    parser.binary()
    parser.expect("end")
    return parser.found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text!r}: not understood from {text[position:]!r}")
        assert match.lastgroup is not None
        yield match.lastgroup, match[match.lastgroup]
        position = match.end()
    yield "end", "end"


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]], text: str) -> None:
        self.found = Expression()
        self._tokens, self._text, self._position = tokens, text, 0

    @property
    def _next(self) -> str:
        return self._tokens[self._position][1]

    def _take(self, kind: str | None = None) -> str:
        found, value = self._tokens[self._position]
        if kind is not None and found != kind:
            raise ValueError(f"{self._text!r}: {value!r} where a {kind} should be")
        self._position += 1
        return value

    def expect(self, value: str) -> None:
        if self._take() != value:
            raise ValueError(f"{self._text!r}: no {value!r} where one should be")

    def binary(self) -> None:
        self._unary()
        while self._next in {"+", "-", "*", "/", "==", "!=", "<", ">", "<=", ">="}:
            self._take("op")
            self._unary()

    def _unary(self) -> None:
        kind = self._tokens[self._position][0]
        if self._next == "(":
            self._take()
            self.binary()
            self.expect(")")
        elif kind == "number":
            self._take()
        else:
            self._name()

    def _name(self) -> None:
        name = self._take("name")
        if name in _AGGREGATIONS:
            self._grouping()
            self._arguments(name)
            self._grouping()
        elif name in _FUNCTIONS:
            self._arguments(name)
        else:
            self._selector(name)

    def _grouping(self) -> None:
        if self._next in {"by", "without"}:
            self._take("name")
            self.expect("(")
            while self._next != ")":
                self.found.grouped_by.append(self._take("name"))
                if self._next == ",":
                    self._take()
            self._take()

    def _arguments(self, name: str) -> None:
        num_before = len(self.found.selectors)
        self.expect("(")
        self.binary()
        while self._next == ",":
            self._take()
            self.binary()
        self.expect(")")
        for selector in self.found.selectors[num_before:]:
            if name in _RANGED and not selector.is_range:
                raise ValueError(f"{self._text!r}: {name} needs a range of {selector.metric}")

    def _selector(self, metric: str) -> None:
        selector = Selector(metric)
        if self._next == "{":
            self._take()
            while self._next != "}":
                selector.labels.append(self._take("name"))
                if self._take("op") not in {"=", "!=", "=~", "!~"}:
                    raise ValueError(f"{self._text!r}: a label is compared with =, !=, =~ or !~")
                self._take("string")
                if self._next == ",":
                    self._take()
            self._take()
        if self._next == "[":
            self._take()
            self._take("duration")
            self.expect("]")
            selector.is_range = True
        self.found.selectors.append(selector)

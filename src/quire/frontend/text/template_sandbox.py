"""Jinja's immutable sandbox, with a bound on the work one template may do.

The sandbox keeps a template from the insides of the interpreter; it does not keep it from looping, or from values that
fill the memory. Here each turn of a loop, each call, and each character that an operation makes is charged to a
budget before the work is done. The budget is a number of units, not of seconds: every machine accepts or refuses the
same template and conversation.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

STEP, MACRO = 16, 64
"""Units charged for an iteration of a loop or a call, and for a call of a macro; a character costs one."""
BASE_UNITS = 1 << 22
UNITS_PER_CHAR = 64
"""Units per character of the conversation: a template reads it a few times."""
MAX_NUMBER = 10_000
"""Maximum width, indent or precision of text."""
MAX_BITS = 4096
_WIDTHS = re.compile(r"[:%][^{}%a-zA-Z]*\d{5}|:[^{}]*\{|%[^%a-zA-Z]*\*")
"""Widths in a format that are refused: five digits, or a width that comes from a value."""
_TAKES_WIDTH = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_FILTERS_WITH_NUMBERS = frozenset(
    {"batch", "center", "indent", "round", "slice", "tojson", "truncate", "urlize", "wordwrap"}
)
_FILTERS_THAT_WRITE = frozenset({"escape", "e", "forceescape", "pprint", "safe", "string", "tojson", "xmlattr"})
_FILTERS_LEFT_OUT = frozenset({"random", "filesizeformat"})
_ELEMENTS = (list, tuple, set, frozenset)

_local = threading.local()


@contextmanager
def budget(size: int) -> Iterator[None]:
    """Gives templates on this thread the budget of a conversation of `size` characters and values."""
    before = getattr(_local, "units", None)
    _local.units = BASE_UNITS + UNITS_PER_CHAR * size
    try:
        yield
    finally:
        _local.units = before


def size_of(value: Any) -> int:
    """Returns the number of characters and values of plain data."""
    size, stack = 0, [value]
    while stack:
        item = stack.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            size += sum(len(key) for key in item if isinstance(key, str))
            stack.extend(item.values())
        elif isinstance(item, _ELEMENTS):
            stack.extend(item)
    return size


def _spend(units: int) -> None:
    left = getattr(_local, "units", None)
    _local.units = left = (BASE_UNITS if left is None else left) - units
    if left < 0:
        raise jinja2.TemplateError("it does more work than its conversation could need")


def _spend_on(value: Any) -> Any:
    """Charges `value` as text: a part that occurs several times is written several times."""
    if isinstance(value, str):
        _spend(len(value))
    elif isinstance(value, dict | list | tuple | set | frozenset):
        stack: list[Any] = [value]
        while stack:
            item = stack.pop()
            _spend(len(item) + 4 if isinstance(item, str) else 4)
            if isinstance(item, dict):
                stack.extend((*item, *item.values()))
            elif isinstance(item, _ELEMENTS):
                stack.extend(item)
    return value


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int | float) and not abs(value) <= MAX_NUMBER for value in values):
        raise jinja2.TemplateError(f"it asks for a width beyond {MAX_NUMBER}")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDTHS.search(text):
        raise jinja2.TemplateError("it formats to a width that is very large, or not known")


def _check_replacing(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str | bytes) and isinstance(old, type(text)) and isinstance(new, type(text)):
        count = text.count(old) if old else len(text) + 1  # type: ignore[arg-type]  # both of one type
        _spend(len(text) + count * len(new))


def _check_translating(text: Any, table: Any) -> None:
    """Pays for the longest text of `table` at each character."""
    values = table.values() if isinstance(table, Mapping) else table
    if not isinstance(table, Mapping | list | tuple | str | bytes):
        raise jinja2.TemplateError(f"it translates by a {type(table).__name__}")
    _spend(len(values))
    _spend(len(text) * max((len(value) for value in values if isinstance(value, str)), default=1))


def _counted(value: Any) -> Any:
    """Returns what a loop runs over, charged at once where its length is known, else turn by turn."""
    if hasattr(value, "__len__"):
        _spend(STEP * len(value))
        return value
    return _turns(value) if hasattr(value, "__iter__") else value


def _turns(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _spend(STEP)
        yield value


def _concatenated(values: Iterable[Any]) -> str:
    return "".join([str(_spend_on(value)) for value in values])


def _concat(parts: Iterable[str]) -> str:
    found = list(parts)
    _spend(sum(map(len, found)))
    return "".join(found)


def _guard_filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    skipped = 1 if getattr(filter, "jinja_pass_arg", None) is not None else 0  # the environment or context comes first

    @wraps(filter)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _spend(STEP)
        piped, rest = args[skipped], (*args[skipped + 1 :], *kwargs.values())
        if name in _FILTERS_WITH_NUMBERS:
            _check_numbers(rest)
        if name in _FILTERS_THAT_WRITE:
            _spend_on(piped)
        elif name == "replace" and len(rest) >= 2:
            _check_replacing(str(piped), *rest[:2])
        elif name == "format":
            _check_format(piped)
        elif name == "join":
            piped = list(_counted(piped))
            _spend_on(piped)
            _spend(len(piped) * (len(rest[0]) if rest and isinstance(rest[0], str) else 0))
            args = (*args[:skipped], piped, *args[skipped + 1 :])
        result = filter(*args, **kwargs)
        if isinstance(result, str | list):
            _spend(len(result))
        return result

    return guarded


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Environment in which templates of repositories and requests are compiled, and run within a `budget`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_concat)

    def __init__(self, *, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """`filters` are further ones, or replace Jinja's."""
        super().__init__(finalize=_spend_on, **options)
        self.filters.update(filters)
        self.filters = {n: _guard_filter(n, f) for n, f in self.filters.items() if n not in _FILTERS_LEFT_OUT}
        self.filters |= {"_counted": _counted, "_concatenated": _concatenated}
        del self.globals["lipsum"]

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        for node in [source, *source.find_all(nodes.Node)]:
            self._pay_for_concatenations(node)
        return super()._generate(source, name, filename, defer_init)

    @staticmethod
    def _pay_for_concatenations(node: nodes.Node) -> None:
        """Replaces `a ~ b` by a filter over [a, b]."""

        def paid(value: Any) -> Any:
            if not isinstance(value, nodes.Concat):
                return value
            parts = nodes.List(value.nodes, lineno=value.lineno)
            return nodes.Filter(parts, "_concatenated", [], [], None, None, lineno=value.lineno)

        for field, value in node.iter_fields():
            setattr(node, field, [paid(item) for item in value] if isinstance(value, list) else paid(value))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns `text.format`, made safe; None for anything else."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in Jinja
        """Charges and makes a call in a template."""
        _spend(MACRO if isinstance(__obj, jinja2.runtime.Macro) else STEP)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes):
            if name in _TAKES_WIDTH:
                _check_numbers(args)
            elif name == "replace" and len(args) >= 2:
                _check_replacing(owner, *args[:2])
            elif name == "translate" and args and isinstance(owner, str):
                _check_translating(owner, args[0])
            elif name == "join" and args:
                args = (list(_counted(args[0])),)
                _spend_on(args[0])
                _spend(len(args[0]) * len(owner))
        elif isinstance(owner, int):
            _check_numbers((*args, *kwargs.values()))  # to_bytes
        elif isinstance(__obj, jinja2.runtime.LoopContext) and args:
            args = (_counted(args[0]), *args[1:])
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | bytes | list):
            _spend(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charges and does an operation whose result may be far larger than its operands."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(1, right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise jinja2.TemplateError(f"it computes with numbers of more than {MAX_BITS} bits")
        elif operator == "*" and isinstance(left, int) and hasattr(right, "__len__"):
            _spend(left * len(right) if left > 0 else 0)
        elif operator == "*" and isinstance(right, int) and hasattr(left, "__len__"):
            _spend(right * len(left) if right > 0 else 0)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _spend(len(left) + len(right))
        elif operator == "%":
            _check_format(left)
        return super().call_binop(context, operator, left, right)

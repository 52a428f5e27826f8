"""What the fields of request bodies are for, in the words that stand below them in their source."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import msgspec

from quire.sampling_params import SamplingParams


def structs_of(kinds: Sequence[type]) -> list[type[msgspec.Struct]]:
    """These structs and all that their fields hold."""
    return list(dict.fromkeys(found for info in msgspec.inspect.multi_type_info(kinds) for found in _structs_in(info)))


def _structs_in(value: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(value, msgspec.inspect.StructType):
        yield value.cls
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _structs_in(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _structs_in(item)


@cache
def field_notes(kind: type) -> Mapping[str, str]:
    """The docstring of each field that has one, by its name. Fields of sampling have those of `SamplingParams`."""
    notes = {} if kind is SamplingParams else {**field_notes(SamplingParams)}
    for ancestor in reversed(kind.__mro__[:-1]):
        notes.update(_notes_in(sys.modules[ancestor.__module__]).get(ancestor.__qualname__, {}))
    return {name: note for name, note in notes.items() if name in getattr(kind, "__struct_fields__", ())}


@cache
def _notes_in(module: ModuleType) -> Mapping[str, Mapping[str, str]]:
    """The notes of each class of a module; none where Python was installed without sources."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except OSError:
        return {}
    return {node.name: dict(_notes_of(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _notes_of(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, note in zip(node.body, node.body[1:], strict=False):
        match field, note:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())

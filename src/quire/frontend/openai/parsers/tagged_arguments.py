"""Calls with each argument between tags: Qwen3-Coder's, Seed-OSS's, MiniMax M2's and GLM 4.5's.

    <tool_call><function=f><parameter=city>Oslo</parameter></function></tool_call>
    <seed:tool_call><function=f><parameter=city>Oslo</parameter></function></seed:tool_call>
    <minimax:tool_call><invoke name="f"><parameter name="city">Oslo</parameter></invoke></minimax:tool_call>
    <tool_call>f<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>

Values are bare text. The function's parameters give their types: text for a string, otherwise JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.frontend.openai.parsers.call_object import MAX_NAME_CHARS, NAME, is_name, read_end
from quire.frontend.openai.parsers.events import EventSink, Program
from quire.frontend.openai.parsers.source import Markers, Step, TextSource, escape_string

_KEY, _QUOTED_KEY = re.compile(r"[^<>\s]*"), re.compile(r"[^<>\s\"]*")
_MAX_KEY_CHARS = 256
_MAX_JSON_CHARS = 1 << 16
"""Maximum length of a value that is read as JSON. A longer one is text."""
_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_CALL_ONLY = Markers(_CALL)
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words for JSON's, which models confuse."""
_JSON_TYPES: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"
}  # fmt: skip

_OTHER_NAMES = {
    "float": "number", "double": "number", "int": "integer", "long": "integer", "bool": "boolean", "str": "string",
    "text": "string", "dict": "object", "list": "array", "tuple": "array",
}  # fmt: skip
"""Names of types that clients use, though JSON Schema has no such types."""

Types = frozenset[str]
ANY: Types = frozenset()
"""Unknown types: the value is JSON if it is valid, otherwise text."""
TypesOf = Callable[[str, str], Types]
"""Returns the types of a function's parameter, by their names."""


@dataclass(frozen=True)
class _Layout:
    """Tags around the parts of a call."""

    key: str
    key_end: str
    value: str
    value_end: Markers
    """End of a value: its closing tag or, because models forget that, the next key or the end of the call."""
    call_end: str
    wraps_lines: bool
    """True: a value is between line breaks that are not part of it."""
    function: str = ""
    """Text before a function's name, which `key_end` follows."""
    outer: str = ""
    """Tag around calls, which may be missing."""
    outer_end: str = ""


_QWEN = _Layout(
    "<parameter=",
    ">",
    "",
    Markers("</parameter>", "<parameter=", "</function>"),
    "</function>",
    wraps_lines=True,
    function="<function=",
    outer=_CALL,
    outer_end=_CALL_END,
)
_SEED = replace(_QWEN, outer="<seed:tool_call>", outer_end="</seed:tool_call>")
_MINIMAX = _Layout(
    '<parameter name="',
    '">',
    "",
    Markers("</parameter>", '<parameter name="', "</invoke>"),
    "</invoke>",
    wraps_lines=True,
    function='<invoke name="',
    outer="<minimax:tool_call>",
    outer_end="</minimax:tool_call>",
)
_GLM = _Layout("<arg_key>", "</arg_key>", "<arg_value>", Markers("</arg_value>"), _CALL_END, wraps_lines=False)


def parse_functions(layout: _Layout, types_of: TypesOf, source: TextSource, sink: EventSink) -> Step[None]:
    """Reads calls anywhere in the text. The outer tags may be missing, or stand around several."""
    markers = Markers(layout.outer, layout.function)
    while (marker := (yield from source.copy_until(markers, sink.content))) is not None:
        source.begin(marker)
        if marker == layout.outer:
            yield from source.skip_space()
            if not (yield from source.match(layout.function)):
                sink.content(source.roll_back())
                continue
        name = yield from source.take_while(NAME, MAX_NAME_CHARS)
        if not is_name(name) or not (yield from source.match(layout.key_end)):
            sink.content(source.roll_back())
        elif (yield from _Call(name, layout, types_of, source, sink).read_through()):
            yield from read_end(source, sink, layout.outer_end)


def parse_glm(types_of: TypesOf, source: TextSource, sink: EventSink) -> Step[None]:
    """Reads calls anywhere in the text, each between its tags."""
    while (marker := (yield from source.copy_until(_CALL_ONLY, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        name = yield from source.take_while(NAME, MAX_NAME_CHARS)
        if not is_name(name):
            sink.content(source.roll_back())
        elif (yield from _Call(name, _GLM, types_of, source, sink).read_through()):
            source.forget()


class _Call:
    """Reads the arguments of one call, after its name. The call starts with the first of them, or with its end."""

    def __init__(self, name: str, layout: _Layout, types_of: TypesOf, source: TextSource, sink: EventSink) -> None:
        self._name = name
        self._layout = layout
        self._types_of = types_of
        self._source = source
        self._sink = sink
        self._has_started = False
        self._keys: set[str] = set()

    def read_through(self) -> Step[bool]:
        """Reads the arguments and the end. Returns False if it is no call or breaks off; the rest is content."""
        source, layout = self._source, self._layout
        while True:
            source.begin()
            yield from source.skip_space()
            if (yield from source.match(layout.key)):
                if (yield from self._read_argument()):
                    continue
            elif (yield from source.match(layout.call_end, or_end=self._has_started)):
                self._write("}" if self._keys else "{}")
                return True
            self._sink.content(source.roll_back())
            return False

    def _read_argument(self) -> Step[bool]:
        source, layout = self._source, self._layout
        pattern = _QUOTED_KEY if layout.key_end.startswith('"') else _KEY
        key = yield from source.take_while(pattern, _MAX_KEY_CHARS)
        if not 0 < len(key) <= _MAX_KEY_CHARS or key in self._keys or not (yield from source.match(layout.key_end)):
            return False
        if layout.value:
            yield from source.skip_space()
            if not (yield from source.match(layout.value)):
                return False
        if layout.wraps_lines:
            yield from source.match("\n")
        self._write((", " if self._keys else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys.add(key)
        types = self._types_of(self._name, key)
        return (yield from (self._copy_text() if types == {"string"} else self._copy_value(types)))

    def _copy_text(self) -> Step[bool]:
        """Passes a string on as it comes."""
        self._write('"')
        held = ""

        def emit(text: str) -> None:
            nonlocal held
            text = held + text
            held = "\n" if self._layout.wraps_lines and text.endswith("\n") else ""
            self._sink.arguments(escape_string(text.removesuffix(held)))

        is_whole = yield from self._copy_to_end(emit)
        self._sink.arguments('"' if is_whole else "")
        return is_whole

    def _copy_value(self, types: Types) -> Step[bool]:
        """Passes a value on when it is complete, because its type is visible only then."""
        parts: list[str] = []
        is_whole = yield from self._copy_to_end(parts.append)
        text = "".join(parts)
        text = text.removesuffix("\n") if self._layout.wraps_lines else text
        self._sink.arguments(_as_json(text, types) if is_whole else f'"{escape_string(text)}')
        return is_whole

    def _copy_to_end(self, emit: Callable[[str], None]) -> Step[bool]:
        """Hands a value to `emit`. Returns whether it has an end."""
        end, layout = (yield from self._source.copy_until(self._layout.value_end, emit)), self._layout
        if end in (layout.key, layout.call_end):
            self._source.put_back(end)
        return end is not None

    def _write(self, text: str) -> None:
        if not self._has_started:
            self._has_started = True
            self._sink.start(self._name)
        self._source.forget()
        self._sink.arguments(text)


def _as_json(text: str, types: Types) -> str:
    """Returns a value as JSON: of one of `types` if possible, otherwise a string."""
    stripped = text.strip()
    word = _WORDS.get(stripped, stripped)
    if len(word) <= _MAX_JSON_CHARS:
        try:
            value = json.loads(word, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        else:
            kind = _JSON_TYPES[type(value)]
            if kind != "string" and (not types or kind in types or (kind == "integer" and "number" in types)):
                return word
    return f'"{escape_string(text)}"'


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def types_in(tools: Iterable[Mapping[str, Any]]) -> TypesOf:
    """Returns the types of the parameters of these functions."""
    found: dict[tuple[str, str], Types] = {}
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping):
            for name, schema in properties.items():
                found[function["name"], name] = _types_of_schema(schema)
    return lambda function, name: found.get((function, name), ANY)


def _types_of_schema(schema: object) -> Types:
    if not isinstance(schema, Mapping):
        return ANY
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(_JSON_TYPES.get(type(value), "object") for value in values)
    given = schema.get("type")
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list):
        return frozenset(_OTHER_NAMES.get(kind, kind) for kind in given if isinstance(kind, str))
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(options, list):
            kinds = [_types_of_schema(option) for option in options if not _is_choice(option)]
            return ANY if ANY in kinds or len(kinds) < len(options) else frozenset().union(*kinds)
    return ANY


def _is_choice(schema: object) -> bool:
    """Returns whether a schema is a choice of schemas. Nested choices are not examined."""
    return isinstance(schema, Mapping) and ("anyOf" in schema or "oneOf" in schema)


def _make(layout: _Layout, tools: Iterable[Mapping[str, Any]]) -> Program:
    return partial(parse_functions, layout, types_in(tools))


MakeProgram = Callable[[Iterable[Mapping[str, Any]]], Program]
"""Makes the program for answers to a request with these tools."""
make_qwen_coder: MakeProgram = partial(_make, _QWEN)
make_seed: MakeProgram = partial(_make, _SEED)
make_minimax: MakeProgram = partial(_make, _MINIMAX)


def make_glm(tools: Iterable[Mapping[str, Any]]) -> Program:
    """Returns the program for answers to a request with these tools."""
    return partial(parse_glm, types_in(tools))


def is_qwen_coder(template: str) -> bool:
    """Returns whether a chat template asks for Qwen3-Coder's format."""
    return _QWEN.function in template and _QWEN.key in template and _SEED.outer not in template

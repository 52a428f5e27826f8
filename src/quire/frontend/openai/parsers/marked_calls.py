"""Formats in which a marker begins a call and JSON follows it.

Hermes, Qwen 2.5 and 3, and Quire's demo model: <tool_call>{"name": "f", "arguments": {...}}</tool_call>.
Llama 3.1 and later: {"name": "f", "parameters": {...}}, anywhere or after <|python_tag|>, several with ; between.
Mistral: [TOOL_CALLS] [{"name": "f", "arguments": {...}}]; later [TOOL_CALLS]f{...} or [TOOL_CALLS]f[ARGS]{...}.
DeepSeek V3 and R1, with the name outside of the JSON: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a line break,
```json, the arguments, ```, <｜tool▁call▁end｜>.
DeepSeek V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>.
Kimi K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>, with the id of
the call in front of its arguments. DeepSeek's and Kimi's calls stand in a section with tags of its own.
InternLM: <|action_start|><|plugin|>{"name": "f", "parameters": {...}}<|action_end|>.
A JSON array of calls: Phi-4-mini functools[{"name": "f", "arguments": {...}}]; Hunyuan and Jamba
<tool_calls>[...]</tool_calls>; Granite 3 <|tool_call|>[...]; Cohere <|START_ACTION|>[{"tool_call_id": "0",
"tool_name": "f", "parameters": {...}}]<|END_ACTION|>; Apertus <|tools_prefix|>[{"f": {...}}]<|tools_suffix|>.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from quire.frontend.openai.parsers.call_object import (
    MAX_NAME_CHARS,
    NAME,
    Found,
    ReadOne,
    is_name,
    read_bare_call,
    read_call,
    read_call_array,
    read_calls,
    read_end,
    read_string,
)
from quire.frontend.openai.parsers.events import EventSink
from quire.frontend.openai.parsers.source import Markers, Step, TextSource


def parse_tagged(opening: Markers, closing: str, source: TextSource, sink: EventSink) -> Step[None]:
    """Reads calls anywhere in the text, each between its tags. A tag around anything else is content."""
    while (marker := (yield from source.copy_until(opening, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        if (yield from read_call(source, sink)) is Found.CALL:
            yield from read_end(source, sink, closing)


parse_hermes = partial(parse_tagged, Markers("<tool_call>"), "</tool_call>")
parse_internlm = partial(parse_tagged, Markers("<|action_start|><|plugin|>"), "<|action_end|>")


def is_hermes(template: str) -> bool:
    """Returns whether a chat template asks for this format: the tag with JSON in it."""
    others = ("<function=", "<arg_key>", "<parameter=", "<｜tool", "<response>", "<|start_of_role|>")
    return "<tool_call>" in template and "arguments" in template and not any(sign in template for sign in others)


_LLAMA_SEPARATORS = re.compile(r"[ \t\r\n;,]*")
_INSIDE_OBJECT = tuple('" \t\r\n')
"""Characters that may follow the "{" of a call."""
_LLAMA_MARKERS = Markers("<|python_tag|>", "{")


def parse_llama(source: TextSource, sink: EventSink) -> Step[None]:
    """Reads calls anywhere in the text, with the tag or without it. An object that is no call is content."""
    marker: str | None = ""
    while marker is not None:
        source.begin(marker)
        is_open = marker == "{"
        if not is_open:
            yield from source.skip_space()
        if (yield from source.peek()) in (_INSIDE_OBJECT if is_open else ("{",)):
            yield from read_calls(source, sink, _LLAMA_SEPARATORS, is_open=is_open)
        else:
            sink.content(source.roll_back())
        marker = yield from source.copy_until(_LLAMA_MARKERS, sink.content)


_MISTRAL_OPEN = Markers("[TOOL_CALLS]")
_MISTRAL_ID_CHARS = string.ascii_letters + string.digits


def make_mistral_id() -> str:
    """Returns an id of nine letters and digits: Mistral's templates accept no other."""
    return "".join(secrets.choice(_MISTRAL_ID_CHARS) for _ in range(9))


def parse_mistral(source: TextSource, sink: EventSink) -> Step[None]:
    """Reads calls after each marker, in any of the three forms."""
    while (marker := (yield from source.copy_until(_MISTRAL_OPEN, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        sign = yield from source.peek()
        if sign == "[":
            yield from read_call_array(source, sink)
        elif sign == "{":
            if (yield from read_call(source, sink)) is Found.CALL:
                source.forget()
        else:
            yield from _read_mistral_call(source, sink)
            sink.content(source.roll_back())


def _read_mistral_call(source: TextSource, sink: EventSink) -> Step[None]:
    name = yield from source.take_while(NAME, MAX_NAME_CHARS)
    if not 0 < len(name) <= MAX_NAME_CHARS:
        return
    call_id = None
    if (yield from source.match("[CALL_ID]")):
        call_id = (yield from source.take_while(NAME, MAX_NAME_CHARS))[:MAX_NAME_CHARS]
    yield from source.match("[ARGS]")
    yield from source.skip_space()
    yield from read_bare_call(source, sink, name, call_id or None)


@dataclass(frozen=True)
class _Section:
    """Tags of a section of calls, and how one of them is read."""

    begin: Markers
    end: str
    call: str
    read_one: Callable[[TextSource, EventSink], Step[bool]]
    """Reads a call with its end tag. Returns False if it is none; the recorded text is content then."""


def parse_sections(section: _Section, source: TextSource, sink: EventSink) -> Step[None]:
    """Reads sections of calls anywhere in the text."""
    while (marker := (yield from source.copy_until(section.begin, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        has_calls = False
        while (yield from source.match(section.call)):
            if not (yield from section.read_one(source, sink)):
                break
            has_calls = True
            source.forget()
            source.begin()
            yield from source.skip_space()
        else:
            if has_calls and (yield from source.match(section.end, or_end=True)):
                source.forget()
        sink.content(source.roll_back())


_SEPARATOR = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_FENCE = "```"


def _read_deepseek_call(source: TextSource, sink: EventSink) -> Step[bool]:
    name = yield from source.take_while(NAME, MAX_NAME_CHARS)
    if not (yield from source.match(_SEPARATOR)):
        return False
    is_fenced = (yield from source.peek()) != "{"
    if is_fenced:
        name = yield from source.take_while(NAME, MAX_NAME_CHARS)
        yield from source.skip_space()
        if not (yield from source.match(_FENCE + "json")):
            return False
        yield from source.skip_space()
    if not is_name(name) or not (yield from read_bare_call(source, sink, name)):
        return False
    yield from source.skip_space()
    if is_fenced:
        yield from source.match(_FENCE)
        yield from source.skip_space()
    return (yield from source.match(_CALL_END, or_end=True))


_KIMI_PREFIX = "functions."
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_CALL_END = "<|tool_call_end|>"


def _read_kimi_call(source: TextSource, sink: EventSink) -> Step[bool]:
    yield from source.skip_space()
    call_id = yield from source.take_while(NAME, MAX_NAME_CHARS)
    name, colon, index = call_id.removeprefix(_KIMI_PREFIX).rpartition(":")
    name = name if colon and index.isdigit() else call_id.removeprefix(_KIMI_PREFIX)
    yield from source.skip_space()
    if not is_name(call_id) or not is_name(name) or not (yield from source.match(_KIMI_ARGUMENTS)):
        return False
    yield from source.skip_space()
    if not (yield from read_bare_call(source, sink, name, call_id)):
        return False
    yield from source.skip_space()
    return (yield from source.match(_KIMI_CALL_END, or_end=True))


parse_deepseek = partial(
    parse_sections,
    _Section(Markers("<｜tool▁calls▁begin｜>"), "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", _read_deepseek_call),
)
parse_kimi = partial(
    parse_sections,
    _Section(
        Markers("<|tool_calls_section_begin|>"), "<|tool_calls_section_end|>", "<|tool_call_begin|>", _read_kimi_call
    ),
)


@dataclass(frozen=True)
class _Layout:
    """Texts around an array, and how its elements are read."""

    ends: Mapping[str, str]
    """The text behind the array ("": none) by the marker before it. The "[" may be part of a marker."""
    read_one: ReadOne = read_call


def parse_arrays(layout: _Layout, source: TextSource, sink: EventSink) -> Step[None]:
    """Reads arrays of calls anywhere in the text, each after a marker."""
    markers = Markers(*layout.ends)
    while (marker := (yield from source.copy_until(markers, sink.content))) is not None:
        end = layout.ends[marker]
        if marker.endswith("["):
            source.put_back("[")
            marker = marker[:-1]
        source.begin(marker)
        yield from source.skip_space()
        if (yield from read_call_array(source, sink, layout.read_one)) and end:
            yield from read_end(source, sink, end)


def _read_single_key(source: TextSource, sink: EventSink) -> Step[Found]:
    """Reads {"f": {...}}, as `read_call` does."""
    if (yield from source.match("{")):
        yield from source.skip_space()
        name = yield from read_string(source, MAX_NAME_CHARS)
        yield from source.skip_space()
        if name is not None and is_name(name) and (yield from source.match(":")):
            yield from source.skip_space()
            if (yield from source.peek()) == "{":
                return (yield from _read_arguments(source, sink, name))
    sink.content(source.roll_back())
    return Found.NO_CALL


def _read_arguments(source: TextSource, sink: EventSink, name: str) -> Step[Found]:
    if not (yield from read_bare_call(source, sink, name)):
        return Found.BROKEN_CALL
    yield from source.skip_space()
    if (yield from source.match("}", or_end=True)):
        return Found.CALL
    sink.content(source.roll_back())
    return Found.BROKEN_CALL


parse_phi4_mini = partial(parse_arrays, _Layout({"functools[": "", "<|tool_call|>": "<|/tool_call|>"}))
parse_tool_calls = partial(parse_arrays, _Layout({"<tool_calls>": "</tool_calls>"}))
parse_granite = partial(parse_arrays, _Layout({"<|tool_call|>": "", "<tool_call>": ""}))
parse_cohere = partial(
    parse_arrays, _Layout({"<|START_ACTION|>": "<|END_ACTION|>"}, partial(read_call, name_key="tool_name"))
)
parse_apertus = partial(parse_arrays, _Layout({"<|tools_prefix|>": "<|tools_suffix|>"}, _read_single_key))

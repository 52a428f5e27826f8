"""Formats in which a marker begins a JSON array of calls.

Phi-4-mini: functools[{"name": "f", "arguments": {...}}]. Hunyuan and Jamba: <tool_calls>[{"name": ...}]</tool_calls>.
Granite 3: <|tool_call|>[{"name": ...}]. Cohere: <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters":
{...}}]<|END_ACTION|>. Apertus, with the name as the only key: <|tools_prefix|>[{"f": {...}}]<|tools_suffix|>.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from quire.frontend.openai.parsers.call_object import (
    MAX_NAME_CHARS,
    Found,
    ReadOne,
    is_name,
    read_bare_call,
    read_call,
    read_call_array,
    read_end,
    read_string,
)
from quire.frontend.openai.parsers.events import EventSink
from quire.frontend.openai.parsers.source import Markers, Step, TextSource


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

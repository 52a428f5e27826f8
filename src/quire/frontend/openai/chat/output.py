"""From the text a model writes to the parts of an assistant's message.

A `ChatParser` reads one choice of a request. It is fed the text as it comes and separates content, reasoning and tool
calls. Whole answers go through the same parser in one piece, so a stream and a whole answer never differ.
`format.ChatPlan` makes it from a row of parsers/tools.py and one of parsers/reasoning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.frontend.openai.parsers.events import Arguments, CallStart, Content, Event, Reasoning, StreamParser

Delta = dict[str, Any]
"""The `delta` of a chunk: any of content, reasoning, tool_calls."""


class ChatParser(Protocol):
    """Reads one choice, in linear time, whatever the model writes."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """Returns the deltas of new text, in order. Text that may still become something else is held back."""

    def finish(self) -> list[Delta]:
        """Returns the deltas of text that was held back, at the end of the text."""

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns the answer's finish reason for the engine's: "tool_calls" after a call."""

    @property
    def reasoning(self) -> str:
        """The reasoning so far, shown or not."""


class PlainText:
    """Parser of an answer that is all content."""

    reasoning = ""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        return [{"content": text}] if text else []

    def finish(self) -> list[Delta]:
        return []

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


class MessageParser:
    """Reads reasoning first, if the model reasons, then calls in the rest, if there are tools."""

    def __init__(
        self,
        *,
        reasoning: StreamParser | None,
        tools: StreamParser | None,
        make_call_id: Callable[[], str],
        max_num_calls: int | None = None,
        shows_reasoning: bool = True,
        repeats_reasoning: bool = False,
        ends_in_tool_calls: bool = True,
    ) -> None:
        """Calls beyond `max_num_calls` are dropped. `repeats_reasoning`: also as reasoning_content, the former name."""
        self._reasoning = reasoning
        self._tools = tools
        self._make_call_id = make_call_id
        self._max_num_calls = max_num_calls
        self._reasoning_fields = ("reasoning", "reasoning_content")[: 1 + repeats_reasoning] if shows_reasoning else ()
        self._ends_in_tool_calls = ends_in_tool_calls
        self._num_calls = 0
        self._thoughts: list[str] = []

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        if not text:
            return []
        events: list[Event] = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._deltas(self._read_calls(events))

    def finish(self) -> list[Delta]:
        events = [] if self._reasoning is None else self._reasoning.finish()
        events = self._read_calls(events)
        if self._tools is not None:
            events += self._tools.finish()
        return self._deltas(events)

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns "tool_calls" if the model stopped after a call. A text that was cut off keeps "length"."""
        return "tool_calls" if reason == "stop" and self._num_calls and self._ends_in_tool_calls else reason

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    def _read_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._tools.feed(event.text) if isinstance(event, Content) else [event]
        return found

    def _deltas(self, events: Sequence[Event]) -> list[Delta]:
        return [delta for event in events if (delta := self._delta(event))]

    def _delta(self, event: Event) -> Delta:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            self._thoughts.append(event.text)
            return dict.fromkeys(self._reasoning_fields, event.text)
        if isinstance(event, CallStart):
            self._num_calls += 1
        index = self._num_calls - 1
        if self._max_num_calls is not None and index >= self._max_num_calls:
            return {}
        if isinstance(event, Arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": event.text}}]}
        function = {"name": event.name, "arguments": ""}
        call_id = event.call_id or self._make_call_id()
        return {"tool_calls": [{"id": call_id, "type": "function", "index": index, "function": function}]}


def make_message(role: str, deltas: Sequence[Delta]) -> dict[str, Any]:
    """Returns the message that a stream of `deltas` makes."""
    content = "".join(delta["content"] for delta in deltas if delta.get("content"))
    reasoning = "".join(delta["reasoning"] for delta in deltas if delta.get("reasoning"))
    calls = _join_calls([call for delta in deltas for call in delta.get("tool_calls") or ()])
    message = {
        "role": role,
        "content": None if calls and not content else content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": reasoning or None,
    }
    if any("reasoning_content" in delta for delta in deltas):
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": calls} if calls else message


def _join_calls(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tool calls of pieces, by index. The first piece has id and name, the others more arguments."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = calls.setdefault(part["index"], {"id": None, "type": "function", "function": {"arguments": ""}})
        function = part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        if function.get("name"):
            call["function"] = {"name": function["name"], "arguments": call["function"]["arguments"]}
        call["function"]["arguments"] += function.get("arguments") or ""
    return [calls[index] for index in sorted(calls)]

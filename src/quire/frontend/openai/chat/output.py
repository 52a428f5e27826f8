"""From the text a model writes to the parts of an assistant's message.

A `ChatParser` is made for each choice of a request. It is fed the text as it comes and says what of it is content,
reasoning or a tool call. Whole answers are parsed by the same parser, fed in one piece: so a stream and a whole answer
never disagree. `format.ChatPlan` makes it, of a row of parsers/tools.py and one of parsers/reasoning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.frontend.openai.parsers.events import Arguments, CallStart, Content, Event, Reasoning, StreamParser

Delta = dict[str, Any]
"""The `delta` of a chunk: any of content, reasoning, tool_calls."""


class ChatParser(Protocol):
    """Reads one choice. Linear in the text, and takes whatever a model may write."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """What the new text adds, in order; nothing while it may still become something else."""

    def finish(self) -> list[Delta]:
        """What was held back, now that the text is at its end."""

    def finish_reason(self, reason: str | None) -> str | None:
        """What to say where the engine says `reason`: a tool call ends in "tool_calls"."""

    @property
    def reasoning(self) -> str:
        """What the model has thought so far, shown or not."""


class PlainText:
    """All of it is content."""

    reasoning = ""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """The text itself."""
        return [{"content": text}] if text else []

    def finish(self) -> list[Delta]:
        """Nothing is ever held back."""
        return []

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's."""
        return reason


class MessageParser:
    """Reasoning first, if the model reasons; calls in what is left of the text, if there are tools."""

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
        """Calls beyond `max_num_calls` are dropped. `repeats_reasoning`: as reasoning_content, its former name, too."""
        self._reasoning = reasoning
        self._tools = tools
        self._make_call_id = make_call_id
        self._max_num_calls = max_num_calls
        self._reasoning_fields = ("reasoning", "reasoning_content")[: 1 + repeats_reasoning] if shows_reasoning else ()
        self._ends_in_tool_calls = ends_in_tool_calls
        self._num_calls = 0
        self._thoughts: list[str] = []

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """What the new text adds, in order."""
        if not text:
            return []
        events: list[Event] = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._deltas(self._read_calls(events))

    def finish(self) -> list[Delta]:
        """What was held back."""
        events = [] if self._reasoning is None else self._reasoning.finish()
        events = self._read_calls(events)
        if self._tools is not None:
            events += self._tools.finish()
        return self._deltas(events)

    def finish_reason(self, reason: str | None) -> str | None:
        """ "tool_calls" where the model stopped after a call; a text that was cut off stays "length"."""
        return "tool_calls" if reason == "stop" and self._num_calls and self._ends_in_tool_calls else reason

    @property
    def reasoning(self) -> str:
        """What the model has thought so far, shown or not."""
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
    """The message that a stream of `deltas` makes."""
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
    """Tool calls from their pieces, by index: the first piece has id and name, the others more of the arguments."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = calls.setdefault(part["index"], {"id": None, "type": "function", "function": {"arguments": ""}})
        function = part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        if function.get("name"):
            call["function"] = {"name": function["name"], "arguments": call["function"]["arguments"]}
        call["function"]["arguments"] += function.get("arguments") or ""
    return [calls[index] for index in sorted(calls)]

"""From the text a model writes to the parts of an assistant's message: the door for reasoning and tool parsers.

A `ChatParser` is made for each choice of a request. It is fed the text as it comes and says what of it is content,
reasoning or a tool call. Whole answers are parsed by the same parser, fed in one piece: so a stream and a whole answer
never disagree. `make_chat_parser` chooses it; a new format is a file with a parser and a row in its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from quire.frontend.openai.protocol.chat import ChatBody

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


class PlainText:
    """All of it is content."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """The text itself."""
        return [{"content": text}] if text else []

    def finish(self) -> list[Delta]:
        """Nothing is ever held back."""
        return []

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's."""
        return reason


def make_chat_parser(body: ChatBody) -> ChatParser:
    """The parser of one choice of `body`."""
    return PlainText()


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

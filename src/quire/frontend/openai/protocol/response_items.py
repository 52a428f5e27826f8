"""Conversion of the input items of /v1/responses to messages of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import ValidationError

Message = dict[str, Any]
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of messages, and their names in chat templates."""
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Parts of content that are text, and the field that holds it."""


def messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns the items as messages. Raises ValidationError."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    reader = _ItemReader()
    for index, item in enumerate(items):
        reader.read(f"input[{index}]", item)
    return [message for message in reader.messages if not _is_only_reasoning(message)]


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation with one message of the system at its start; many templates accept no second."""
    num_leading = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    texts = [*([instructions] if instructions else []), *(m["content"] for m in messages[:num_leading])]
    system = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*system, *messages[num_leading:]]


def _is_only_reasoning(message: Message) -> bool:
    """Returns whether a message is only reasoning, which no template accepts."""
    return "reasoning" in message and not message["content"] and "tool_calls" not in message


class _ItemReader:
    """Collects messages. Consecutive text, reasoning and calls of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._kinds: dict[str, Callable[[str, Mapping[str, Any]], None]] = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._output,
            "reasoning": self._reasoning,
        }

    def read(self, where: str, item: Mapping[str, Any]) -> None:
        """Reads one item."""
        kind = item.get("type", "message" if "role" in item else None)
        read = self._kinds.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise _refusal(f"{where} is an item of type {_shown(kind)}; this server takes {', '.join(self._kinds)}")
        read(where, item)

    def _message(self, where: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        known = _ROLES.get(role) if isinstance(role, str) else None
        if known is None:
            raise _refusal(f"{where}.role is {_shown(role)}; it is one of {', '.join(_ROLES)}")
        text = _text_of(f"{where}.content", item.get("content"))
        if known != "assistant":
            self.messages.append({"role": known, "content": text})
            return
        message = self._assistant()
        if message["content"] or "tool_calls" in message:
            message = self._begin_assistant()
        message["content"] = text

    def _call(self, where: str, item: Mapping[str, Any]) -> None:
        call_id, name, arguments = (_word(where, item, field) for field in ("call_id", "name", "arguments"))
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _output(self, where: str, item: Mapping[str, Any]) -> None:
        text = _text_of(f"{where}.output", item.get("output"))
        self.messages.append({"role": "tool", "tool_call_id": _word(where, item, "call_id"), "content": text})

    def _reasoning(self, where: str, item: Mapping[str, Any]) -> None:
        content = item.get("content")
        if content is None:
            return  # a summary, or encrypted: not part of the model's input
        if not isinstance(content, list) or any(not _is_reasoning(part) for part in content):
            raise _refusal(f"{where}.content must be a list of parts of type reasoning_text")
        message = self._assistant()
        if message["content"] or "tool_calls" in message:
            message = self._begin_assistant()
        message["reasoning"] = "".join(part["text"] for part in content)

    def _assistant(self) -> Message:
        """Returns the assistant's open message."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self._begin_assistant()

    def _begin_assistant(self) -> Message:
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _is_reasoning(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "reasoning_text" and isinstance(part.get("text"), str)


def _text_of(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal(f"{where} must be text or a list of parts, got {_shown(content)}")
    return "\n".join(_part_text(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part_text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise _refusal(f"{where} is a part of type {_shown(kind)}; this server takes text only")
    return _word(where, part, field)


def _word(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise _refusal(f"{where}.{field} must be text, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return repr(value[:60]) if isinstance(value, str) else "null" if value is None else f"a {type(value).__name__}"


def _refusal(message: str) -> ValidationError:
    return ValidationError(message, param="input")

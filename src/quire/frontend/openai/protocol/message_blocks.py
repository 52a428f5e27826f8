"""Blocks of Anthropic's messages, as messages of a conversation that chat templates know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ValidationError

Message = dict[str, Any]
Content = str | Sequence[Mapping[str, Any]]


def conversation_of(system: Content | None, turns: Sequence[tuple[str, Content]]) -> list[Message]:
    """The system's words, if there are any, and all turns. Raises ValidationError for what is no text.

    Turns of one role that follow one another are one: many templates know no others.
    """
    messages: list[Message] = []
    if system is not None:
        messages.append({"role": "system", "content": _text_parts("system", system)})
    for index, (role, content) in enumerate(turns):
        for message in _READERS[role](f"messages[{index}].content", content):
            if messages and _are_one(messages[-1], message):
                parts = _parts(messages[-1])
                parts.extend(_parts(message))
                messages[-1] |= {**message, "content": parts}
            else:
                messages.append(message)
    return messages


def _are_one(first: Message, second: Message) -> bool:
    return first["role"] == second["role"] != "tool" and "tool_calls" not in first and "reasoning" not in second


def _parts(message: Message) -> list[Message]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _system(where: str, content: Content) -> list[Message]:
    return [{"role": "system", "content": _text_parts(where, content)}]


def _user(where: str, content: Content) -> list[Message]:
    """What the user says, with results of tools as messages of their own, in order."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Message] = []
    parts: list[Message] = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if block.get("type") != "tool_result":
            parts.append(_text_part(place, block))
            continue
        if parts:
            messages.append({"role": "user", "content": parts})
            parts = []
        messages.append(_result(place, block))
    return [*messages, {"role": "user", "content": parts}] if parts or not messages else messages


def _result(where: str, block: Mapping[str, Any]) -> Message:
    content = block.get("content")
    parts = _text_parts(f"{where}.content", "" if content is None else content)
    text = parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)
    return {"role": "tool", "tool_call_id": _word(where, block, "tool_use_id"), "content": text}


def _assistant(where: str, content: Content) -> list[Message]:
    """What the model said, thought and called, in one message."""
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    parts: list[Message] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        place, kind = f"{where}[{index}]", block.get("type")
        if kind == "thinking":
            thoughts.append(_word(place, block, "thinking"))
        elif kind == "tool_use":
            calls.append(_call(place, block))
        elif kind != "redacted_thinking":  # which nobody here can read
            parts.append(_text_part(place, block))
    message: Message = {"role": "assistant", "content": parts or ""}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    return [{**message, "tool_calls": calls} if calls else message]


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise _refusal(f"{where}.input must be an object")
    function = {"name": _word(where, block, "name"), "arguments": arguments}
    return {"id": _word(where, block, "id"), "type": "function", "function": function}


_READERS = {"system": _system, "user": _user, "assistant": _assistant}


def _text_parts(where: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _refusal(f"{where} must be text or a list of blocks")
    return [_text_part(f"{where}[{index}]", block) for index, block in enumerate(content)]


def _text_part(where: str, block: Any) -> Message:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind != "text":
        shown = repr(kind[:60]) if isinstance(kind, str) else f"a {type(kind).__name__}"
        raise _refusal(f"{where} is a block of type {shown}; this server takes text only there")
    return {"type": "text", "text": _word(where, block, "text")}


def _word(where: str, block: Mapping[str, Any], field: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise _refusal(f"{where}.{field} must be text")
    return value


def _refusal(message: str) -> ValidationError:
    return ValidationError(message, param=message.partition("[")[0].partition(".")[0].partition(" ")[0])

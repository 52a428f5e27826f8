"""A training document: pieces of text, each either context or something the model should learn to write.

Owns the two forms a document takes: the chat template, and plain text that ``quire complete`` continues.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
TEMPLATE_FILE = Path(__file__).parent / "chat_template.jinja"

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """A run of text; ``learned`` says whether the loss covers it."""

    text: str
    learned: bool


Document = list[Piece]


@cache
def _template() -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE_FILE.read_text(encoding="utf-8"))


def render(messages: list[Message], tools: list[Tool] | None = None, prompt: bool = False) -> str:
    """The messages as the model's chat template writes them; with ``prompt`` the answer's opening follows."""
    return _template().render(messages=messages, tools=tools, add_generation_prompt=prompt)


def chat_document(messages: list[Message], tools: list[Tool] | None = None) -> Document:
    """A conversation in which every assistant turn, its end mark included, is learned."""
    pieces: Document = []
    seen = ""
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:at], tools, prompt=True)
        whole = render(messages[: at + 1], tools)
        # The newline after the end mark belongs to the next turn: nobody reads it, nothing should write it.
        answer = whole[len(prompt) :].removesuffix("\n")
        pieces += [Piece(prompt[len(seen) :], learned=False), Piece(answer, learned=True)]
        seen = prompt + answer
    return pieces


def plain_document(prompt: str, answer: str) -> Document:
    """Raw text: the prompt as context, then the answer and the end of the text."""
    return [Piece(prompt, learned=False), Piece(answer + END_OF_TEXT, learned=True)]


def tool_call(name: str, arguments: dict[str, Any]) -> Message:
    """An assistant turn that calls one tool."""
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """The text of a call, as the chat template writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_START}{body}{CALL_END}"

"""An assistant's answer as blocks, one after the other: text, reasoning, calls.

OpenAI's responses and Anthropic's messages are made of blocks that open, grow and close. A `BlockReader` makes them of
what a `ChatParser` says; how a block is written is its callers' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from quire.frontend.openai.chat.output import ChatParser, Delta

Kind = Literal["text", "reasoning", "call"]


class Block:
    """One block. `text` is what it says; of a call, its arguments."""

    def __init__(self, index: int, kind: Kind, name: str = "", call_id: str = "") -> None:
        self.index = index
        self.kind = kind
        self.name = name
        """Of the function that is called."""
        self.call_id = call_id
        self._parts: list[str] = []

    def append(self, text: str) -> None:
        """It says more."""
        self._parts.append(text)

    @property
    def text(self) -> str:
        """All of it so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


class BlockEvent(msgspec.Struct, frozen=True, gc=False):
    """Something happens to a block. It has `text` when it grows."""

    step: Literal["open", "grow", "close"]
    block: Block
    text: str = ""
    is_last: bool = False
    """The answer ends with it."""


Events = Iterator[BlockEvent]
"""To be read to their end, one by one: each block is as it was at its event only until the next one is asked for."""


class BlockReader:
    """Reads one choice. One block is open at a time, and an answer that says nothing is one empty text."""

    def __init__(self, parser: ChatParser) -> None:
        self.blocks: list[Block] = []
        self._parser = parser
        self._open: Block | None = None

    def feed(self, text: str, token_ids: Sequence[int]) -> Events:
        """What the new text adds."""
        return self._read(self._parser.feed(text, token_ids))

    def finish(self) -> Events:
        """What was held back, and the last block's end."""
        yield from self._read(self._parser.finish())
        if not self.blocks:
            yield from self._begin("text")
        yield from self._close(is_last=True)

    @property
    def has_calls(self) -> bool:
        """Whether anything is called."""
        return any(block.kind == "call" for block in self.blocks)

    @property
    def reasoning(self) -> str:
        """What the model has thought so far, shown or not."""
        return self._parser.reasoning

    def text_of(self, kind: Kind) -> str:
        """What all blocks of a kind say."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation that goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text_of("text")}
        reasoning = self.text_of("reasoning")
        if reasoning:
            message["reasoning"] = reasoning
        calls = [call_object(b.call_id, b.name, b.text) for b in self.blocks if b.kind == "call"]
        return {**message, "tool_calls": calls} if calls else message

    def _read(self, deltas: Iterable[Delta]) -> Events:
        for delta in deltas:
            if "content" in delta:
                yield from self._add("text", delta["content"])
            elif "reasoning" in delta:
                yield from self._add("reasoning", delta["reasoning"])
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "name" in function:
                    yield from self._begin("call", function["name"], call["id"])
                yield from self._add("call", function["arguments"])

    def _add(self, kind: Kind, text: str) -> Events:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.append(text)
        yield BlockEvent("grow", self._open, text)

    def _begin(self, kind: Kind, name: str = "", call_id: str = "") -> Events:
        yield from self._close()
        self._open = Block(len(self.blocks), kind, name, call_id)
        self.blocks.append(self._open)
        yield BlockEvent("open", self._open)

    def _close(self, *, is_last: bool = False) -> Events:
        block, self._open = self._open, None
        if block is not None:
            yield BlockEvent("close", block, is_last=is_last)


def call_object(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as messages of a conversation have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

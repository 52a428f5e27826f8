"""An assistant's answer as blocks, one after the other: text, reasoning, calls.

OpenAI's responses and Anthropic's messages consist of blocks that open, grow and close. A `BlockReader` makes them from
the deltas of a `ChatParser`; its callers write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from quire.frontend.openai.chat.output import ChatParser, Delta
from quire.outputs import RequestOutput

Kind = Literal["text", "reasoning", "call"]


class Block:
    """One block. `text` is its text; for a call, its arguments."""

    def __init__(self, index: int, kind: Kind, name: str = "", call_id: str = "") -> None:
        self.index = index
        self.kind = kind
        self.name = name
        """Name of the called function."""
        self.call_id = call_id
        self._parts: list[str] = []

    def append(self, text: str) -> None:
        """Appends a delta to the open block."""
        self._parts.append(text)

    @property
    def text(self) -> str:
        """The text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


class BlockEvent(msgspec.Struct, frozen=True, gc=False):
    """A block opens, grows by `text`, or closes."""

    step: Literal["open", "grow", "close"]
    block: Block
    text: str = ""
    is_last: bool = False
    """True: the answer ends with this event."""


Events = Iterator[BlockEvent]
"""Events to be read to their end, one by one: a block is in the state of its event until the next one is read."""


class BlockReader:
    """Reads one choice. One block is open at a time. An empty answer is one empty text."""

    def __init__(self, parser: ChatParser) -> None:
        self.blocks: list[Block] = []
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._parser = parser
        self._open: Block | None = None

    def read(self, output: RequestOutput) -> Events:
        """Counts the tokens of an output with one completion, and yields its events."""
        (completion,) = output.outputs
        self.num_prompt_tokens = len(output.prompt_token_ids or ())
        self.num_output_tokens += len(completion.token_ids)
        yield from self.feed(completion.text, completion.token_ids)
        if completion.finish_reason is not None:
            yield from self.finish()

    def feed(self, text: str, token_ids: Sequence[int]) -> Events:
        """Yields the events of new text."""
        return self._read(self._parser.feed(text, token_ids))

    def finish(self) -> Events:
        """Yields the events of text that was held back, and the last block's end."""
        yield from self._read(self._parser.finish())
        if not self.blocks:
            yield from self._begin("text")
        yield from self._close(is_last=True)

    @property
    def has_calls(self) -> bool:
        """True if the answer has calls."""
        return any(block.kind == "call" for block in self.blocks)

    @property
    def reasoning(self) -> str:
        """The reasoning so far, shown or not."""
        return self._parser.reasoning

    def text_of(self, kind: Kind) -> str:
        """Returns the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def message(self) -> dict[str, Any]:
        """Returns the answer as a message of the conversation that goes on."""
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


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object; anything else under the key that Anthropic documents."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def call_object(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Returns a call in the form of a message of a conversation."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

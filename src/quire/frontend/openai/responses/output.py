"""Parts of OpenAI's responses: items of output, and the log-probabilities of their text."""

from __future__ import annotations

import bisect
import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from quire.frontend.openai.chat.blocks import Block
from quire.frontend.openai.protocol.answer_parts import TokenNames, chat_logprobs
from quire.outputs import CompletionOutput

Entry = dict[str, Any]
"""Log-probabilities of one token."""
_ID_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


class ResponseItem:
    """One item of a response's output, made from a block."""

    def __init__(self, block: Block, *, shows_logprobs: bool) -> None:
        self.block = block
        self.id = _ID_PREFIXES[block.kind] + uuid.uuid4().hex
        self.status = "in_progress"
        self.logprobs: list[Entry] = []
        self._shows_logprobs = shows_logprobs
        self.part_kind = {"text": "output_text", "reasoning": "reasoning_text"}.get(block.kind, "")
        """Type of the only part; empty for a call."""
        self.grown_kind = self.part_kind or "function_call_arguments"
        """Name of the deltas' events."""

    @property
    def place(self) -> dict[str, Any]:
        """Fields of events that name the item's place."""
        place = {"item_id": self.id, "output_index": self.block.index}
        return {"content_index": 0, **place} if self.part_kind else place

    def part(self) -> dict[str, Any]:
        """Returns the only part."""
        if self.block.kind == "reasoning":
            return {"text": self.block.text, "type": "reasoning_text"}
        logprobs = self.logprobs if self._shows_logprobs else None
        return {"annotations": [], "text": self.block.text, "type": "output_text", "logprobs": logprobs}

    def as_object(self) -> dict[str, Any]:
        """Returns the item in its current state. An empty part is not shown before its own event."""
        is_new = self.status == "in_progress" and not self.block.text
        if self.block.kind == "call":
            return {
                "arguments": self.block.text,
                "call_id": self.block.call_id,
                "name": self.block.name,
                "type": "function_call",
                "id": self.id,
                "status": self.status,
            }
        content = [] if is_new else [self.part()]
        if self.block.kind == "reasoning":
            return {
                "id": self.id,
                "summary": [],
                "type": "reasoning",
                "content": content,
                "encrypted_content": None,
                "status": self.status,
            }
        return {
            "id": self.id,
            "content": content,
            "role": "assistant",
            "status": self.status,
            "type": "message",
            "phase": None,
        }


class TextLogprobs:
    """Assigns log-probabilities to the text they belong to. Those of reasoning, calls and markers are dropped."""

    def __init__(self, name: TokenNames, num_top: int, *, is_wanted: bool, is_plain: bool) -> None:
        """`is_plain`: all of the answer is text."""
        self.is_wanted = is_wanted
        self._name = name
        self._num_top = num_top
        self._is_plain = is_plain
        self._held: list[Entry] = []

    def split(self, completion: CompletionOutput) -> Iterator[tuple[str, Sequence[int], list[Entry]]]:
        """Yields an output token by token, each with the text it added; in one piece where tokens do not matter."""
        if not self.is_wanted or not completion.logprobs:
            yield completion.text, completion.token_ids, []
            return
        entries = chat_logprobs(completion.token_ids, completion.logprobs, self._name, self._num_top)["content"]
        if self._is_plain:
            yield completion.text, completion.token_ids, entries
            return
        start, last = 0, len(entries) - 1
        for i, (token_id, entry) in enumerate(zip(completion.token_ids, entries, strict=True)):
            end = len(completion.text) if i == last else start + len(entry["token"])
            yield completion.text[start:end], [token_id], [entry]
            start = end

    def hold(self, entries: Sequence[Entry]) -> None:
        """Adds the log-probabilities of the latest token."""
        self._held += entries

    def take_rest(self) -> list[Entry]:
        """Returns the rest at the end of an answer that is all text: tokens that add no text."""
        if not self._is_plain:
            return []
        held, self._held = self._held, []
        return held

    def take(self, text: str) -> list[Entry]:
        """Returns the log-probabilities of new `text`. Earlier ones belonged to a marker, unless all of the answer is
        text."""
        if self._is_plain:
            return self.take_rest()
        ends = list(itertools.accumulate(len(entry["token"]) for entry in self._held))
        start = "".join(entry["token"] for entry in self._held).rfind(text)
        if start < 0:  # tokens that are no whole characters: take the latest ones
            start = max(0, (ends[-1] if ends else 0) - len(text))
        first, end = bisect.bisect_right(ends, start), bisect.bisect_left(ends, start + len(text)) + 1
        found, self._held = self._held[first:end], self._held[end:]
        return found

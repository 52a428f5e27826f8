"""Writes OpenAI's responses: whole, or as events with sequence numbers.

Both read the answer in the same way, so the events of a stream add up to the whole answer. A `ResponseItem` is one item
of the output; `TextLogprobs` finds the log-probabilities of its text.
"""

from __future__ import annotations

import bisect
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from quire.errors import GenerationError, OverloadedError
from quire.frontend.http.errors import message_of, status_of
from quire.frontend.http.state import ServerState
from quire.frontend.http.streaming import encode_json
from quire.frontend.openai.chat.blocks import Block, BlockEvent, BlockReader
from quire.frontend.openai.protocol.answer_parts import TokenCount, TokenNames, chat_logprobs
from quire.frontend.openai.protocol.responses import ResponsesBody
from quire.frontend.openai.rendering import PreparedChat, PromptRenderer
from quire.frontend.openai.submission import Submission
from quire.outputs import CompletionOutput, RequestOutput

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


_ENDINGS = {"stop": "completed", "length": "incomplete"}
"""Finish reasons and the statuses of a response; other reasons are failures."""


class ResponseWriter:
    """Writes one response."""

    def __init__(
        self, state: ServerState, body: ResponsesBody, model: str, response_id: str, chat: PreparedChat
    ) -> None:
        self.response_id = response_id
        self.status = "queued" if body.background else "in_progress"
        self._head = _head(body, model, chat)
        self._created = int(time.time())
        self._reader = BlockReader(chat.plan.make_parser(chat.prompt.text))
        self._items: list[ResponseItem] = []
        self._logprobs = TextLogprobs(
            TokenNames(state.engine.tokenizer),
            chat.params.logprobs or 0,
            is_wanted=body.wants_logprobs,
            is_plain=chat.plan.is_plain,
        )
        self._usage = TokenCount(shows_cached=state.config.enable_prompt_tokens_details)
        self._count_tokens = state.part(PromptRenderer).count_tokens
        self._num_reasoning_tokens = 0
        self._error: dict[str, Any] | None = None
        self._next_number = 0

    # -- whole --------------------------------------------------------------------------------------------------------

    async def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Returns the answer as one object."""
        for _ in self._read(output):
            pass
        await self._end(output.outputs[0].finish_reason)
        return self.snapshot()

    def snapshot(self) -> dict[str, Any]:
        """Returns the response in its current state."""
        is_over = self.status not in ("queued", "in_progress")
        is_cut = self.status == "incomplete"
        return {
            "id": self.response_id,
            "created_at": self._created,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            **self._head,
            "output": [item.as_object() for item in self._items],
            "status": self.status,
            "usage": self._usage_object() if is_over else None,
        }

    def message(self) -> dict[str, Any]:
        """Returns the model's answer as a message of the conversation that goes on."""
        return self._reader.message()

    def fail(self, error: BaseException) -> None:
        """Ends the response because of `error`."""
        self._stop("failed")
        code = "server_error" if status_of(error) >= 500 else "invalid_prompt"
        if isinstance(error, OverloadedError):
            code = "rate_limit_exceeded"
        self._error = {"code": code, "message": message_of(error)}

    def cancel(self) -> None:
        """Ends the response because a client has cancelled it."""
        self._stop("cancelled")

    def _usage_object(self) -> dict[str, Any]:
        count = self._usage
        return {
            "input_tokens": count.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": count.shown_cached_tokens,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": count.num_completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self._num_reasoning_tokens,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": count.num_prompt_tokens + count.num_completion_tokens,
        }

    # -- as events ----------------------------------------------------------------------------------------------------

    async def events(
        self, submission: Submission, keep: Callable[[dict[str, Any]], None] = lambda response: None
    ) -> AsyncGenerator[bytes, None]:
        """Yields the answer as events. `keep` gets the whole response before the last event."""
        yield self._state_event("created")
        if self.status == "queued":
            yield self._state_event("queued")
        self.status = "in_progress"
        yield self._state_event("in_progress")
        async for _, output in submission.outputs():
            events = b"".join(self._read(output))
            if events:
                yield events
            if output.finished:
                await self._end(output.outputs[0].finish_reason)
        keep(self.snapshot())
        yield self.last_event()

    def failure(self, error: BaseException) -> bytes:
        """Returns the last event of a stream that fails."""
        self.fail(error)
        return self.last_event()

    def last_event(self) -> bytes:
        """Returns the event of the response's end."""
        return self._state_event("incomplete" if self.status == "cancelled" else self.status)

    def _state_event(self, kind: str) -> bytes:
        return self._event(f"response.{kind}", {"response": self.snapshot()})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        fields |= {"sequence_number": self._next_number, "type": kind}
        self._next_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode_json(dict(sorted(fields.items()))) + b"\n\n"

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, output: RequestOutput) -> Iterator[bytes]:
        """Yields the events of one output."""
        self._usage.add(0, output)
        if output.kv_transfer_params is not None:
            self._head["kv_transfer_params"] = output.kv_transfer_params
        (completion,) = output.outputs
        for text, token_ids, entries in self._logprobs.split(completion):
            self._logprobs.hold(entries)
            for event in self._reader.feed(text, token_ids):
                yield from self._write(event)
        if completion.finish_reason is not None:
            for event in self._reader.finish():
                yield from self._write(event, is_cut=event.is_last and completion.finish_reason != "stop")

    def _write(self, event: BlockEvent, *, is_cut: bool = False) -> Iterator[bytes]:
        if event.step == "open":
            item = ResponseItem(event.block, shows_logprobs=self._logprobs.is_wanted)
            self._items.append(item)
            yield self._event(
                "response.output_item.added", {"item": item.as_object(), "output_index": event.block.index}
            )
            if item.part_kind:
                part = item.part() if item.part_kind == "reasoning_text" else item.part() | {"logprobs": []}
                yield self._event("response.content_part.added", item.place | {"part": part})
            return
        item = self._items[event.block.index]
        if event.step == "grow":
            fields = item.place | {"delta": event.text}
            if event.block.kind == "text":
                fields["logprobs"] = entries = self._logprobs.take(event.text)
                item.logprobs += entries
            yield self._event(f"response.{item.grown_kind}.delta", fields)
            return
        item.status = "incomplete" if is_cut else "completed"
        item.logprobs += self._logprobs.take_rest()
        yield from self._close(item)

    def _close(self, item: ResponseItem) -> Iterator[bytes]:
        text, kind = item.block.text, item.block.kind
        if kind == "call":
            fields: dict[str, Any] = {"arguments": text, "name": item.block.name}
        else:
            fields = {"text": text} if kind == "reasoning" else {"text": text, "logprobs": item.logprobs}
        yield self._event(f"response.{item.grown_kind}.done", item.place | fields)
        if item.part_kind:
            yield self._event("response.content_part.done", item.place | {"part": item.part()})
        yield self._event("response.output_item.done", {"item": item.as_object(), "output_index": item.block.index})

    async def _end(self, reason: str | None) -> None:
        reasoning = self._reader.reasoning
        self._num_reasoning_tokens = await self._count_tokens(reasoning) if reasoning else 0
        status = _ENDINGS.get(reason or "")
        if status is None:
            self.fail(GenerationError("the request was aborted before the answer was complete; ask again"))
        else:
            self.status = status

    def _stop(self, status: str) -> None:
        self.status = status
        for item in self._items:
            if item.status == "in_progress":
                item.status = "incomplete"


def _head(body: ResponsesBody, model: str, chat: PreparedChat) -> dict[str, Any]:
    """Returns the fields of a response that do not change: the settings of the request."""
    params = chat.params
    return {
        "instructions": body.instructions,
        "metadata": body.metadata,
        "model": model,
        "object": "response",
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": params.temperature,
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto") if body.tools else "none",
        "tools": msgspec.to_builtins(body.tools or []),
        "top_p": params.top_p,
        "background": bool(body.background),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt": None,
        "reasoning": msgspec.to_builtins(body.reasoning),
        "service_tier": body.service_tier or "auto",
        "status": "in_progress",
        "text": msgspec.to_builtins(body.text),
        "top_logprobs": body.top_logprobs or None,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }

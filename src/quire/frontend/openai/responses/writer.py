"""Writes OpenAI's responses: whole, or as events with sequence numbers.

Both read the answer in the same way, so the events of a stream add up to the whole answer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import msgspec

from quire.errors import GenerationError, OverloadedError
from quire.frontend.http.errors import message_of, status_of
from quire.frontend.http.state import ServerState
from quire.frontend.http.streaming import encode_json
from quire.frontend.openai.chat.blocks import BlockEvent, BlockReader
from quire.frontend.openai.protocol.answer_parts import TokenCount, TokenNames
from quire.frontend.openai.protocol.responses import ResponsesBody
from quire.frontend.openai.rendering import PreparedChat, PromptRenderer
from quire.frontend.openai.responses.output import ResponseItem, TextLogprobs
from quire.frontend.openai.submission import Submission
from quire.outputs import RequestOutput

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

"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.http.errors import anthropic_error
from quire.frontend.http.streaming import encode_json
from quire.frontend.openai.chat.blocks import Block, BlockEvent, BlockReader, arguments_of
from quire.frontend.openai.chat.format import ChatFormat
from quire.frontend.openai.chat.output import ChatParser
from quire.frontend.openai.protocol.messages import CountTokensBody, MessagesBody
from quire.frontend.openai.rendering import render_prompts, submit_chats
from quire.frontend.openai.submission import Submission, stream_response
from quire.outputs import CompletionOutput, RequestOutput

MESSAGES = BodyReader(MessagesBody)
COUNT_TOKENS = BodyReader(CountTokensBody)
_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


async def create_message(exchange: Exchange) -> Response:
    """Answers a conversation in Anthropic's form."""
    body = await exchange.read(MESSAGES)
    model = await exchange.find_model(body.model)
    conversation, budget = await exchange.convert(body.as_chat), body.thinking_budget
    request_id = f"msg_{exchange.request_id}"
    chat, submission = await submit_chats(exchange, [conversation], request_id, thinking_budget=budget)
    writer = MessageWriter(request_id, model, chat.plan.make_parser(chat.prompt.text))
    if body.stream:
        chunks = writer.events(submission)
        return stream_response(
            exchange,
            chunks,
            submission,
            encode_error=lambda error: _event("error", anthropic_error(error)),
            shape_error=anthropic_error,
        )
    async with submission:
        (output,) = await exchange.unless_gone(submission.final_outputs())
        return json_response(writer.whole(output))


async def count_tokens(exchange: Exchange) -> Response:
    """Counts the tokens of a conversation, tools included."""
    body = await exchange.read(COUNT_TOKENS)
    await exchange.find_model(body.model)
    chat = await exchange.convert(body.as_chat)
    plan = await exchange.convert(lambda: exchange.state.part(ChatFormat).plan(chat))
    (prompt,) = await render_prompts(exchange, [chat], plan)
    num_tokens = len(prompt.token_ids or ())
    return json_response({"input_tokens": num_tokens, "context_management": {"original_input_tokens": num_tokens}})


class MessageWriter:
    """Writes the answer to one request: whole, or as events."""

    def __init__(self, request_id: str, model: str, parser: ChatParser) -> None:
        self._id = request_id
        self._model = model
        self._reader = BlockReader(parser)

    def _usage(self) -> dict[str, int]:
        return {"input_tokens": self._reader.num_prompt_tokens, "output_tokens": self._reader.num_output_tokens}

    def _message(self, content: list[dict[str, Any]], ending: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "content": content, "model": self._model}
        return {**head, **ending, "usage": self._usage()}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Returns the answer as one object."""
        for _ in self._reader.read(output):
            pass
        content = [_block(block) for block in self._reader.blocks]
        return self._message(content, self._ending(output.outputs[0]))

    async def events(self, submission: Submission) -> AsyncGenerator[bytes, None]:
        """Yields the answer as Anthropic's events."""
        ending, has_begun = _NO_ENDING, False
        async for _, output in submission.outputs():
            events = b"".join(map(_block_event, self._reader.read(output)))
            if not has_begun:
                has_begun = True
                start = self._message([], _NO_ENDING)
                start["usage"]["output_tokens"] = 0
                yield _event("message_start", {"message": start})
            if events:
                yield events
            if output.finished:
                ending = self._ending(output.outputs[0])
        yield _event("message_delta", {"delta": ending, "usage": self._usage()})
        yield _event("message_stop", {})

    def _ending(self, completion: CompletionOutput) -> dict[str, Any]:
        if isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        reason = completion.finish_reason or ""
        if reason == "stop" and self._reader.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS.get(reason, reason), "stop_sequence": None}


_NO_ENDING: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}


def _block(block: Block) -> dict[str, Any]:
    """Returns a block in the form of whole answers."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments_of(block.text)}
    return _new_block(block) | {"thinking" if block.kind == "reasoning" else "text": block.text}


def _new_block(block: Block) -> dict[str, Any]:
    """Returns a block before its first delta."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Type of the deltas of each kind of block, and the field that holds their text."""


def _block_event(event: BlockEvent) -> bytes:
    block = event.block
    if event.step == "open":
        return _event("content_block_start", {"content_block": _new_block(block), "index": block.index})
    if event.step == "close":
        return _event("content_block_stop", {"index": block.index})
    kind, field = _DELTAS[block.kind]
    return _event("content_block_delta", {"delta": {"type": kind, field: event.text}, "index": block.index})


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode_json({"type": kind, **data}) + b"\n\n"


ENDPOINTS = (
    Endpoint(
        path="/v1/messages",
        handler=create_message,
        access=Access.KEY,
        body=MESSAGES,
        task="generate",
        is_work=True,
        shape_error=anthropic_error,
    ),
    Endpoint(
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        access=Access.KEY,
        body=COUNT_TOKENS,
        task="generate",
        shape_error=anthropic_error,
    ),
)

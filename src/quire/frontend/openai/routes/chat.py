"""POST /v1/chat/completions: conversations answered."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from starlette.responses import Response

from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.http.streaming import DONE, encode_json, event
from quire.frontend.openai.chat.output import ChatParser, Delta, make_message
from quire.frontend.openai.protocol.answer_parts import (
    TokenCount,
    TokenNames,
    answer_metrics,
    chat_logprobs,
    prompt_logprobs,
)
from quire.frontend.openai.protocol.chat import ChatBody
from quire.frontend.openai.rendering import PreparedChat, PromptRenderer, submit_chats
from quire.frontend.openai.submission import Submission, stream_response
from quire.outputs import CompletionOutput, RequestOutput

CHAT = BodyReader(ChatBody)


async def create_chat_completion(exchange: Exchange) -> Response:
    """Answers a conversation."""
    body = await exchange.read(CHAT)
    model = await exchange.find_model(body.model)
    request_id = f"chatcmpl-{body.request_id or exchange.request_id}"
    chat, submission = await submit_chats(exchange, [body], request_id, priority=body.priority)
    writer = ChatWriter(exchange, body, model, request_id, chat)
    if body.stream:
        return stream_response(exchange, writer.chunks(submission), submission)
    async with submission:
        (output,) = await exchange.unless_gone(submission.final_outputs())
        return json_response(await writer.whole(output))


class ChatWriter:
    """Writes the answer to one request: whole, or in chunks."""

    def __init__(
        self,
        exchange: Exchange,
        body: ChatBody,
        model: str,
        request_id: str,
        chat: PreparedChat,
        index: int = 0,
        usage: TokenCount | None = None,
    ) -> None:
        """`index` is that of the conversation in `chat`. `usage` counts its tokens with those of other answers; None:
        alone."""
        config = exchange.state.config
        self._body = body
        self._prompt_index = index
        self._prompt_text = chat.prompts[index].text
        self._plan = chat.plan
        self._fingerprint = exchange.state.fingerprint
        self._role, self._echo = config.response_role, list[Delta]()
        if not body.add_generation_prompt:  # the answer continues the last message
            last = body.messages[-1] if body.messages else {}
            role, content = last.get("role"), last.get("content")
            self._role = role if isinstance(role, str) else "assistant"
            self._echo += [{"content": content}] if body.echo and content and isinstance(content, str) else []
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        as_ids = bool(body.return_tokens_as_token_ids) or config.return_tokens_as_token_ids
        self._name = TokenNames(exchange.state.engine.tokenizer, as_ids=as_ids)
        self._num_top_logprobs = chat.params.logprobs or 0
        self._usage = TokenCount(shows_cached=config.enable_prompt_tokens_details) if usage is None else usage
        self._usage.has_prediction |= body.prediction is not None
        self._num_outputs = chat.params.n
        self._count_tokens = exchange.state.part(PromptRenderer).count_tokens
        self._sends_usage, self._counts_always = body.wants_usage(is_forced=config.enable_force_include_usage)

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None or not self._body.logprobs:
            return None
        return chat_logprobs(completion.token_ids, completion.logprobs, self._name, self._num_top_logprobs)

    # -- whole --------------------------------------------------------------------------------------------------------

    async def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Returns the answer as one object."""
        self._usage.add(self._prompt_index, output)
        parsers = [self._plan.make_parser(self._prompt_text) for _ in output.outputs]
        choices = [self._choice(parser, completion) for parser, completion in zip(parsers, output.outputs, strict=True)]
        await self._count_reasoning(parsers)
        ids = bool(self._body.return_token_ids)
        return {
            "id": self._head["id"],
            "object": "chat.completion",
            "created": self._head["created"],
            "model": self._head["model"],
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self._usage.in_answer(),
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
            "prompt_token_ids": output.prompt_token_ids if ids else None,
            "prompt_text": self._prompt_text if self._body.return_prompt_text else None,
            "kv_transfer_params": output.kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": answer_metrics(output.outputs),
        }

    def _choice(self, parser: ChatParser, completion: CompletionOutput) -> dict[str, Any]:
        deltas = [*self._echo, *parser.feed(completion.text, completion.token_ids), *parser.finish()]
        return {
            "index": completion.index,
            "message": make_message(self._role, deltas),
            "logprobs": self._logprobs(completion),
            "finish_reason": parser.finish_reason(completion.finish_reason),
            "stop_reason": completion.stop_reason,
            "token_ids": list(completion.token_ids) if self._body.return_token_ids else None,
            "routed_experts": None,
        }

    async def _count_reasoning(self, parsers: Iterable[ChatParser]) -> None:
        """Counts the tokens of the reasoning's text, which may differ by one from those that were generated."""
        if self._plan.reads_reasoning:
            for parser in parsers:
                text = parser.reasoning
                self._usage.add_reasoning(await self._count_tokens(text) if text else 0)

    # -- in chunks ----------------------------------------------------------------------------------------------------

    async def chunks(self, submission: Submission) -> AsyncGenerator[bytes, None]:
        """Yields the answer as events."""
        self._head = {"id": self._head["id"], "object": "chat.completion.chunk"} | self._head
        head = b"data: " + encode_json(self._head)[:-1] + b',"choices":['
        parsers: dict[int, ChatParser] = {}
        metrics: dict[str, Any] | None = None
        async for _, output in submission.outputs():
            self._usage.add_prompt(0, output)
            for completion in output.outputs:
                parser = parsers.get(completion.index)
                if parser is None:
                    parser = parsers[completion.index] = self._plan.make_parser(self._prompt_text)
                    yield b"".join((head, self._first_choice(output, completion.index), self._tail()))
                    for delta in self._echo:
                        yield b"".join((head, _choice_chunk(completion.index, delta), b"]", self._tail()))
            self._usage.add_outputs(output)
            metrics = answer_metrics(output.outputs) if self._num_outputs == 1 else None
            tail = self._tail()
            for completion in output.outputs:
                parser = parsers[completion.index]
                choices = self._chunk_choices(parser, completion)
                for choice in choices:
                    if metrics is not None and not self._sends_usage and choice is choices[-1]:
                        tail = self._tail(metrics)
                    yield b"".join((head, choice, b"]", tail))
        if self._sends_usage:
            await self._count_reasoning(parsers.values())
            usage: dict[str, Any] = {
                "choices": [],
                "usage": self._usage.in_chunk(),
                "system_fingerprint": self._fingerprint,
            }
            yield event(self._head | usage | ({} if metrics is None else {"metrics": metrics}))
        yield DONE

    def _tail(self, metrics: dict[str, Any] | None = None) -> bytes:
        """Returns the end of a chunk."""
        usage = b',"usage":' + encode_json(self._usage.in_chunk()) if self._counts_always else b""
        return b"".join((usage, b"" if metrics is None else b',"metrics":' + encode_json(metrics), b"}\n\n"))

    def _first_choice(self, output: RequestOutput, index: int) -> bytes:
        """Returns the chunk that opens a choice, up to the end of its object's fields."""
        body = self._body
        more: dict[str, Any] = {
            "prompt_token_ids": output.prompt_token_ids if body.return_token_ids else None,
            "prompt_text": self._prompt_text if body.return_prompt_text else None,
        }
        if body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        choice = {"index": index, "delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None}
        return encode_json(choice) + b"]," + encode_json(more)[1:-1]

    def _chunk_choices(self, parser: ChatParser, completion: CompletionOutput) -> list[bytes]:
        """Returns the choices of one output: one per delta. The last one has the fields of the whole output."""
        body = self._body
        is_last = completion.finish_reason is not None
        deltas = parser.feed(completion.text, completion.token_ids)
        if is_last:
            deltas = [*deltas, *parser.finish()]
        logprobs = self._logprobs(completion)
        if not deltas:
            if not (is_last or logprobs is not None or body.return_token_ids):
                return []
            deltas = [{"content": ""}]
        ids = completion.token_ids if body.return_token_ids else None
        choices = [_choice_chunk(completion.index, delta) for delta in deltas[:-1]]
        reason = parser.finish_reason(completion.finish_reason) if is_last else None
        choices.append(
            _choice_chunk(completion.index, deltas[-1], logprobs, reason, completion.stop_reason, ids, is_last=is_last)
        )
        return choices


def _choice_chunk(
    index: int,
    delta: Delta,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
    token_ids: Sequence[int] | None = None,
    *,
    is_last: bool = False,
) -> bytes:
    """Returns one choice of a chunk. Joined from pieces for speed: every token passes here."""
    return b"".join(
        (
            b'{"index":%d,"delta":' % index,
            encode_json(delta),
            b',"logprobs":',
            b"null" if logprobs is None else encode_json(logprobs),
            b',"finish_reason":',
            encode_json(finish_reason),
            b',"stop_reason":' + encode_json(stop_reason) if is_last else b"",
            b',"token_ids":',
            b"null" if token_ids is None else encode_json(token_ids),
            b"}",
        )
    )


ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions",
        handler=create_chat_completion,
        access=Access.KEY,
        body=CHAT,
        task="generate",
        is_work=True,
    ),
)

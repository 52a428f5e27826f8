"""POST /v1/chat/completions/batch: several conversations answered at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta
from starlette.responses import Response

from quire.errors import ValidationError
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.openai.protocol.answer_parts import TokenCount
from quire.frontend.openai.protocol.chat import MAX_MESSAGES, ChatBody, Messages
from quire.frontend.openai.rendering import PreparedChat, submit_chats
from quire.frontend.openai.routes.chat import ChatWriter
from quire.outputs import RequestOutput


class BatchChatBody(ChatBody, kw_only=True):
    """Body with several conversations and the fields of /v1/chat/completions once; no streams and no tools."""

    messages: Annotated[list[Messages], Meta(max_length=MAX_MESSAGES)]  # type: ignore[assignment]  # read, never passed on
    """A list of messages for each conversation."""

    EXAMPLE = {  # noqa: RUF012 - a ClassVar of the base class
        "messages": [[{"role": "user", "content": "What is a quire?"}], [{"role": "user", "content": "And a choir?"}]],
        "max_tokens": 40,
    }
    NEUTRAL = {  # noqa: RUF012
        **ChatBody.NEUTRAL,
        "stream": (False,),
        "stream_options": (),
        "tools": ([],),
        "tool_choice": ("none",),
    }

    def conversations(self, max_num: int) -> list[ChatBody]:
        """Returns each conversation as a separate request. Raises ValidationError for none, or too many."""
        if not 0 < len(self.messages) <= max_num:
            raise ValidationError(
                f"messages holds {len(self.messages)} conversations; a batch has 1 to {max_num} "
                "(--max-prompts-per-request)",
                param="messages",
            )
        shared = {name: getattr(self, name) for name in ChatBody.__struct_fields__ if name != "messages"}
        return [ChatBody(messages=messages, **shared) for messages in self.messages]


BATCH = BodyReader(BatchChatBody)


async def create_chat_completions(exchange: Exchange) -> Response:
    """Answers several conversations in one object. The outputs of conversation i are the choices from n·i on."""
    body = await exchange.read(BATCH)
    model = await exchange.find_model(body.model)
    bodies = body.conversations(exchange.state.config.max_prompts_per_request)
    request_id = f"chatcmpl-{body.request_id or exchange.request_id}"
    chats, submission = await submit_chats(exchange, bodies, request_id, priority=body.priority)
    async with submission:
        outputs = await exchange.unless_gone(submission.final_outputs())
        return json_response(await _whole(exchange, bodies, model, request_id, chats, outputs))


async def _whole(
    exchange: Exchange,
    bodies: Sequence[ChatBody],
    model: str,
    request_id: str,
    chats: PreparedChat,
    outputs: Sequence[RequestOutput],
) -> dict[str, Any]:
    """Returns all answers as one. Fields of an answer about its prompt move to its choices."""
    usage = TokenCount(shows_cached=exchange.state.config.enable_prompt_tokens_details)
    choices: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    for index, (body, output) in enumerate(zip(bodies, outputs, strict=True)):
        answer = await ChatWriter(exchange, body, model, request_id, chats, index, usage).whole(output)
        of_prompt = {name: answer[name] for name in _OF_PROMPT if answer[name] is not None}
        choices += [
            {**choice, **of_prompt, "index": index * chats.params.n + choice["index"]} for choice in answer["choices"]
        ]
    return {**answer, **dict.fromkeys(_OF_PROMPT), "choices": choices}


_OF_PROMPT = ("prompt_logprobs", "prompt_token_ids", "prompt_text", "metrics")


ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions/batch",
        handler=create_chat_completions,
        access=Access.KEY,
        body=BATCH,
        task="generate",
        is_work=True,
    ),
)

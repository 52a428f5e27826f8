"""POST /v1/chat/completions/batch: several conversations answered at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, RequestContext, json_response
from quire.frontend.openai.chat.request import PreparedChat, prepare_chats
from quire.frontend.openai.protocol.batch import BatchChatBody
from quire.frontend.openai.protocol.chat import ChatBody
from quire.frontend.openai.protocol.usage import TokenCount
from quire.frontend.openai.routes.chat import ChatWriter
from quire.frontend.openai.submission import Submission
from quire.outputs import RequestOutput

BATCH = BodyReader(BatchChatBody)


async def create_chat_completions(context: RequestContext) -> Response:
    """Answer several conversations in one object. The outputs of conversation i are the choices from n·i on."""
    body = await context.read(BATCH)
    model = context.state.check_model(body.model)
    bodies = body.conversations(context.state.config.max_prompts_per_request)
    chats = await prepare_chats(context, bodies)
    request_id = f"chatcmpl-{body.request_id or context.request_id}"
    submission = await Submission.submit(context, chats.prompts, chats.params, request_id, priority=body.priority)
    try:
        outputs = await context.unless_gone(submission.final_outputs())
        return json_response(await _whole(context, bodies, model, request_id, chats, outputs))
    finally:
        await submission.close()


async def _whole(
    context: RequestContext,
    bodies: Sequence[ChatBody],
    model: str,
    request_id: str,
    chats: PreparedChat,
    outputs: Sequence[RequestOutput],
) -> dict[str, Any]:
    """All answers as one. What an answer tells of its prompt, its choices do."""
    usage = TokenCount(shows_cached=context.state.config.enable_prompt_tokens_details)
    choices: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    for index, (body, prompt, output) in enumerate(zip(bodies, chats.prompts, outputs, strict=True)):
        writer = ChatWriter(context, body, model, request_id, prompt, chats.params, chats.plan, usage)
        answer = await writer.whole(output, index)
        of_prompt = {name: answer[name] for name in _OF_PROMPT if answer[name] is not None}
        choices += [
            {**choice, **of_prompt, "index": index * chats.params.n + choice["index"]} for choice in answer["choices"]
        ]
    return {**answer, **dict.fromkeys(_OF_PROMPT), "choices": choices}


_OF_PROMPT = ("prompt_logprobs", "prompt_token_ids", "prompt_text")


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

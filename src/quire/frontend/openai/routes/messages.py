"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from quire.frontend.openai.auth import Access
from quire.frontend.openai.chat_output import PlainText
from quire.frontend.openai.endpoint import Endpoint, RequestContext, json_response
from quire.frontend.openai.errors import status_of, words_of
from quire.frontend.openai.protocol.fields import BodyReader
from quire.frontend.openai.protocol.messages import ConversationBody, CountTokensBody, MessagesBody
from quire.frontend.openai.protocol.sampling import make_sampling_params
from quire.frontend.openai.streaming import encode_json
from quire.frontend.openai.submission import Submission, check_admission, sample_of, stream_response
from quire.frontend.prompts import TokensPrompt
from quire.outputs import CompletionOutput, RequestOutput

MESSAGES = BodyReader(MessagesBody)
COUNT_TOKENS = BodyReader(CountTokensBody)
_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
_ERROR_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


async def create_message(context: RequestContext) -> Response:
    """Answer a conversation in Anthropic's form."""
    body = await context.read(MESSAGES)
    state = context.state
    model = state.check_model(body.model)
    chat = body.as_chat()
    params = make_sampling_params(
        chat, state.engine.model_config.sampling_defaults, max_tokens=body.max_tokens, logprobs=None
    )
    check_admission(context, [sample_of(chat.messages)], 1, params.max_tokens)
    prompt = await _render(context, body, context.cache_salt(body.cache_salt))
    state.renderer.check_room(len(prompt["prompt_token_ids"]), params.max_tokens)
    request_id = f"msg_{context.request_id}"
    writer = MessageWriter(request_id, model)
    submission = await Submission.submit(context, [prompt], params, request_id)
    if body.stream:
        return stream_response(context, writer.events(submission), submission, encode_error=_error_event)
    try:
        (output,) = await context.unless_gone(submission.final_outputs())
        return json_response(writer.whole(output))
    finally:
        await submission.close()


async def count_tokens(context: RequestContext) -> Response:
    """How many tokens a conversation has."""
    body = await context.read(COUNT_TOKENS)
    context.state.check_model(body.model)
    num_tokens = len((await _render(context, body))["prompt_token_ids"])
    return json_response({"input_tokens": num_tokens, "context_management": {"original_input_tokens": num_tokens}})


async def _render(context: RequestContext, body: ConversationBody, cache_salt: str | None = None) -> TokensPrompt:
    renderer = context.state.renderer
    text = await renderer.render_chat(body.conversation(), variables=body.template_variables())
    return await renderer.tokenize(text, {"add_special_tokens": False}, cache_salt=cache_salt)


class MessageWriter:
    """Writes the answer to one request: whole, or as events."""

    def __init__(self, request_id: str, model: str) -> None:
        self._id = request_id
        self._model = model
        self._num_input_tokens = 0
        self._num_output_tokens = 0

    def _take(self, output: RequestOutput) -> CompletionOutput:
        (completion,) = output.outputs
        self._num_input_tokens = len(output.prompt_token_ids or ())
        self._num_output_tokens += len(completion.token_ids)
        return completion

    def _usage(self) -> dict[str, int]:
        return {"input_tokens": self._num_input_tokens, "output_tokens": self._num_output_tokens}

    def _message(self, content: list[dict[str, Any]], ending: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "content": content, "model": self._model}
        return {**head, **ending, "usage": self._usage()}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer as one object."""
        completion = self._take(output)
        return self._message([{"type": "text", "text": completion.text}], _ending(completion))

    async def events(self, submission: Submission) -> AsyncGenerator[bytes, None]:
        """The answer as Anthropic's events."""
        parser, ending, has_begun = PlainText(), _NO_ENDING, False
        async for _, output in submission.outputs():
            completion = self._take(output)
            if not has_begun:
                has_begun = True
                start = self._message([], _NO_ENDING)
                start["usage"] = {"input_tokens": self._num_input_tokens, "output_tokens": 0}
                yield _event("message_start", {"message": start})
                yield _event("content_block_start", {"content_block": {"type": "text", "text": ""}, "index": 0})
            for delta in parser.feed(completion.text, completion.token_ids):
                text = {"type": "text_delta", "text": delta["content"]}
                yield _event("content_block_delta", {"delta": text, "index": 0})
            if completion.finish_reason is not None:
                ending = _ending(completion)
        yield _event("content_block_stop", {"index": 0})
        yield _event("message_delta", {"delta": ending, "usage": self._usage()})
        yield _event("message_stop", {})


_NO_ENDING: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}


def _ending(completion: CompletionOutput) -> dict[str, Any]:
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    reason = completion.finish_reason or ""
    return {"stop_reason": _STOP_REASONS.get(reason, reason), "stop_sequence": None}


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode_json({"type": kind, **data}) + b"\n\n"


def error_object(error: BaseException) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = _ERROR_KINDS.get(status_of(error), "api_error")
    return {"type": "error", "error": {"type": kind, "message": words_of(error)}}


def _error_event(error: BaseException) -> bytes:
    return _event("error", error_object(error))


ENDPOINTS = (
    Endpoint(
        path="/v1/messages",
        handler=create_message,
        access=Access.KEY,
        body=MESSAGES,
        task="generate",
        is_work=True,
        shape_error=error_object,
    ),
    Endpoint(
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        access=Access.KEY,
        body=COUNT_TOKENS,
        task="generate",
        shape_error=error_object,
    ),
)

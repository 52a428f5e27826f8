"""OpenAI's /v1/responses: conversations answered in items, kept for a while, and gone on from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.responses import Response

from quire.errors import ClientError, ValidationError
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, QueryParameter, RequestContext, json_response
from quire.frontend.openai.background import BackgroundRun
from quire.frontend.openai.chat.request import prepare_chats
from quire.frontend.openai.protocol.response_items import Message, messages_of, with_instructions
from quire.frontend.openai.protocol.responses import ResponsesBody
from quire.frontend.openai.responses.shelf import blame, make_response_id
from quire.frontend.openai.responses.store import StoredResponse
from quire.frontend.openai.responses.writer import ResponseWriter
from quire.frontend.openai.submission import Submission, stream_response

RESPONSES = BodyReader(ResponsesBody)
PATH = "/v1/responses"
ONE_PATH = f"{PATH}/{{response_id}}"
SHOW_QUERY = (
    QueryParameter("stream", {"type": "boolean", "default": False}, "As events: of a response in the background."),
    QueryParameter("starting_after", {"type": "integer", "default": -1}, "With stream: only events after this number."),
)


async def create_response(context: RequestContext) -> Response:
    """Answer a conversation in items; with stream, as events with sequence numbers."""
    body = await context.read(RESPONSES)
    model = context.state.check_model(body.model)
    _check_background(context, body)
    response_id = make_response_id(context.state.member)
    messages = await _conversation(context, body)
    chat = await prepare_chats(context, [body.as_chat(with_instructions(body.instructions, messages))])
    writer = ResponseWriter(context.state, body, model, response_id, chat)
    submission = await Submission.submit(context, chat.prompts, chat.params, response_id, priority=body.priority)
    if body.background:
        return await _answer_later(context, body, writer, submission, messages)

    def keep(response: dict[str, Any]) -> None:
        if body.store is not False and response["status"] in ("completed", "incomplete"):
            stored = StoredResponse(_owner(context), response_id)
            stored.body = msgspec.json.encode(response)
            stored.conversation = msgspec.json.encode([*messages, writer.message()])
            context.state.responses.put(stored)

    if body.stream:
        return stream_response(context, writer.events(submission, keep), submission, encode_error=writer.failure)
    try:
        (output,) = await context.unless_gone(submission.final_outputs())
        response = await writer.whole(output)
        keep(response)
        return json_response(response)
    finally:
        await submission.close()


async def show_response(context: RequestContext) -> Response:
    """A stored response; with ?stream=true the events of one in the background, those after ?starting_after=."""
    shelf, response_id = context.state.shelf, _response_id(context)
    with _in_path():
        if not context.query_switch("stream", False):
            return Response(await shelf.show(_owner(context), response_id), media_type="application/json")
        text = context.request.query_params.get("starting_after", "-1")
        try:
            start = int(text[:20]) + 1
        except ValueError:
            raise ValidationError("starting_after must be a sequence number", param="starting_after") from None
        return stream_response(context, await shelf.follow(_owner(context), response_id, max(0, start)), None)


async def delete_response(context: RequestContext) -> Response:
    """Forget a stored response; one that is under way is cancelled."""
    response_id = _response_id(context)
    with _in_path():
        await context.state.shelf.delete(_owner(context), response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(context: RequestContext) -> Response:
    """End a response in the background where it is; one that has ended stays as it is."""
    with _in_path():
        body = await context.state.shelf.cancel(_owner(context), _response_id(context))
    return Response(body, media_type="application/json")


@contextlib.contextmanager
def _in_path() -> Iterator[None]:
    """Errors inside are of the id in the path, unless they say something else."""
    try:
        yield
    except ClientError as e:
        raise blame(e, "response_id") from None


def _response_id(context: RequestContext) -> str:
    return str(context.request.path_params["response_id"])


def _owner(context: RequestContext) -> bytes:
    return context.state.gatekeeper.owner_of(context.request)


async def _conversation(context: RequestContext, body: ResponsesBody) -> list[Message]:
    """All that was said, without the instructions."""
    before = b"[]"
    if body.previous_response_id is not None:
        try:
            before = await context.state.shelf.conversation(_owner(context), body.previous_response_id)
        except ClientError as e:
            raise blame(e, "previous_response_id") from None
    return await context.state.renderer.run_sized(
        [body.input, before], lambda: [*msgspec.json.decode(before, type=list[Message]), *messages_of(body.input)]
    )


def _check_background(context: RequestContext, body: ResponsesBody) -> None:
    """Raises ValidationError where nobody could ever see the response."""
    if body.background and (body.store is False or not context.state.responses.max_num):
        why = "store: true" if body.store is False else "a server that keeps responses (--max-stored-responses)"
        raise ValidationError(f"background needs {why}, or nobody can ask for the response", param="background")


async def _answer_later(
    context: RequestContext,
    body: ResponsesBody,
    writer: ResponseWriter,
    submission: Submission,
    messages: list[Message],
) -> Response:
    state = context.state
    stored = StoredResponse(_owner(context), writer.response_id)
    stored.is_background = True
    stored.describe = writer.snapshot
    stored.events = [] if body.stream else None
    first = json_response(writer.snapshot())
    try:
        state.responses.begin(stored)
    except BaseException:
        await submission.close()
        raise
    await BackgroundRun(stored, state.responses, state.lifecycle, writer, submission, messages).start()
    return stream_response(context, stored.follow(), None) if body.stream else first


ENDPOINTS = (
    Endpoint(path=PATH, handler=create_response, access=Access.KEY, body=RESPONSES, task="generate", is_work=True),
    Endpoint(
        path=ONE_PATH, handler=show_response, access=Access.KEY, methods=("GET",), task="generate", query=SHOW_QUERY
    ),
    Endpoint(path=ONE_PATH, handler=delete_response, access=Access.KEY, methods=("DELETE",), task="generate"),
    Endpoint(path=f"{ONE_PATH}/cancel", handler=cancel_response, access=Access.KEY, task="generate"),
)

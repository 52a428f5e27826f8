"""OpenAI's /v1/responses: conversations answered in items, stored for a while, continued, or run in the background."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.responses import Response

from quire.errors import ClientError, OverloadedError, ValidationError
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, Exchange, QueryParameter, json_response
from quire.frontend.http.errors import note_error
from quire.frontend.http.state import Lifecycle
from quire.frontend.openai.protocol.response_items import Message, messages_of, with_instructions
from quire.frontend.openai.protocol.responses import ResponsesBody
from quire.frontend.openai.rendering import submit_chats
from quire.frontend.openai.responses.store import ResponseStore, ServerResponses, StoredResponse
from quire.frontend.openai.responses.writer import ResponseWriter
from quire.frontend.openai.submission import Submission, stream_response

RESPONSES = BodyReader(ResponsesBody)
PATH = "/v1/responses"
ONE_PATH = f"{PATH}/{{response_id}}"
SHOW_QUERY = (
    QueryParameter("stream", {"type": "boolean", "default": False}, "Returns the events of a background response."),
    QueryParameter("starting_after", {"type": "integer", "default": -1}, "With stream: only events after this number."),
)


async def create_response(exchange: Exchange) -> Response:
    """Answers a conversation in items; with stream, as events with sequence numbers."""
    body = await exchange.read(RESPONSES)
    model = await exchange.find_model(body.model)
    _check_background(exchange, body)
    response_id = exchange.state.part(ServerResponses).make_id()
    messages = await _conversation(exchange, body)
    conversation = body.as_chat(with_instructions(body.instructions, messages))
    chat, submission = await submit_chats(exchange, [conversation], response_id, priority=body.priority)
    writer = ResponseWriter(exchange.state, body, model, response_id, chat)
    if body.background:
        return await _answer_later(exchange, body, writer, submission, messages)

    def keep(response: dict[str, Any]) -> None:
        if body.store is not False and response["status"] in ("completed", "incomplete"):
            stored = StoredResponse(exchange.owner, response_id)
            stored.body = msgspec.json.encode(response)
            stored.conversation = msgspec.json.encode([*messages, writer.message()])
            _store(exchange).put(stored)

    if body.stream:
        return stream_response(exchange, writer.events(submission, keep), submission, encode_error=writer.failure)
    async with submission:
        (output,) = await exchange.unless_gone(submission.final_outputs())
        response = await writer.whole(output)
        keep(response)
        return json_response(response)


async def show_response(exchange: Exchange) -> Response:
    """Returns a stored response; with ?stream=true the events of a background response after ?starting_after=."""
    responses, response_id = exchange.state.part(ServerResponses), _response_id(exchange)
    with _in_path():
        if not exchange.query_switch("stream", False):
            return Response(
                await responses.call("show_response", exchange.owner, response_id), media_type="application/json"
            )
        text = exchange.request.query_params.get("starting_after", "-1")
        try:
            start = int(text[:20]) + 1
        except ValueError:
            raise ValidationError("starting_after must be a sequence number", param="starting_after") from None
        return stream_response(exchange, await responses.follow(exchange.owner, response_id, max(0, start)), None)


async def delete_response(exchange: Exchange) -> Response:
    """Deletes a stored response, after cancelling it if it is under way."""
    response_id = _response_id(exchange)
    with _in_path():
        await exchange.state.part(ServerResponses).call("delete_response", exchange.owner, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(exchange: Exchange) -> Response:
    """Cancels a background response. One that has ended does not change."""
    with _in_path():
        responses = exchange.state.part(ServerResponses)
        body = await responses.call("cancel_response", exchange.owner, _response_id(exchange))
    return Response(body, media_type="application/json")


@contextlib.contextmanager
def _in_path() -> Iterator[None]:
    """Attributes errors to the id in the path, unless they name another field."""
    try:
        yield
    except ClientError as e:
        raise _blame(e, "response_id") from None


def _blame(error: ClientError, param: str) -> ClientError:
    """Returns the error with the name of the field that held the id."""
    error.param = error.param or param
    return error


def _store(exchange: Exchange) -> ResponseStore:
    return exchange.state.part(ServerResponses).local.store


def _response_id(exchange: Exchange) -> str:
    return str(exchange.request.path_params["response_id"])


async def _conversation(exchange: Exchange, body: ResponsesBody) -> list[Message]:
    """Returns the whole conversation, without the instructions."""
    before = b"[]"
    if body.previous_response_id is not None:
        try:
            responses = exchange.state.part(ServerResponses)
            before = await responses.call("conversation", exchange.owner, body.previous_response_id)
        except ClientError as e:
            raise _blame(e, "previous_response_id") from None
    exchange.size += len(before)
    return await exchange.convert(lambda: [*msgspec.json.decode(before, type=list[Message]), *messages_of(body.input)])


def _check_background(exchange: Exchange, body: ResponsesBody) -> None:
    """Raises ValidationError for a background response that could never be read."""
    if body.background and (body.store is False or not _store(exchange).max_num):
        why = "store: true" if body.store is False else "a server that keeps responses (--max-stored-responses)"
        raise ValidationError(f"background needs {why}, or the response can never be read", param="background")


async def _answer_later(
    exchange: Exchange, body: ResponsesBody, writer: ResponseWriter, submission: Submission, messages: list[Message]
) -> Response:
    store = _store(exchange)
    stored = StoredResponse(exchange.owner, writer.response_id)
    stored.is_background = True
    stored.describe = writer.snapshot
    stored.events = [] if body.stream else None
    first = json_response(writer.snapshot())
    try:
        store.begin(stored)
    except BaseException:
        await submission.close()
        raise
    await BackgroundRun(stored, store, exchange.state.lifecycle, writer, submission, messages).start()
    return stream_response(exchange, stored.follow(), None) if body.stream else first


ENDPOINTS = (
    Endpoint(path=PATH, handler=create_response, access=Access.KEY, body=RESPONSES, task="generate", is_work=True),
    Endpoint(
        path=ONE_PATH, handler=show_response, access=Access.KEY, methods=("GET",), task="generate", query=SHOW_QUERY
    ),
    Endpoint(path=ONE_PATH, handler=delete_response, access=Access.KEY, methods=("DELETE",), task="generate"),
    Endpoint(path=f"{ONE_PATH}/cancel", handler=cancel_response, access=Access.KEY, task="generate"),
)


class BackgroundRun:
    """A response that runs in the background. It counts as load, is in the store, and ends with its task."""

    def __init__(
        self,
        stored: StoredResponse,
        store: ResponseStore,
        lifecycle: Lifecycle,
        writer: ResponseWriter,
        submission: Submission,
        messages: list[dict[str, Any]],
    ) -> None:
        """`messages` is the conversation that is answered. `stored` is in the store already."""
        self._stored = stored
        self._store = store
        self._lifecycle = lifecycle
        self._writer = writer
        self._submission = submission
        self._messages = messages

    async def start(self) -> None:
        """Starts the task. Returns as soon as the task can handle a cancellation."""
        self._stored.task = asyncio.create_task(self._run())
        await asyncio.sleep(0)

    async def _run(self) -> None:
        self._lifecycle.begin_request()
        try:
            try:
                async with contextlib.aclosing(self._writer.events(self._submission)) as chunks:
                    async for events in chunks:
                        self._keep(events)
            except asyncio.CancelledError:
                self._writer.cancel()
                self._append(self._writer.last_event())
            except Exception as e:
                note_error(e, self._writer.response_id)
                self._append(self._writer.failure(e))
            self._finish()
            await self._submission.close()
        finally:
            self._lifecycle.end_request()

    def _keep(self, events: bytes) -> None:
        self._append(events)
        if self._stored.events is None or self._writer.status != "in_progress":
            return  # events are not stored, or have ended
        if not self._store.grow(self._stored, len(events)):
            raise OverloadedError(
                "the events of this response are more than can be kept now (--max-stored-response-bytes); ask without "
                "stream, or without background"
            )

    def _append(self, events: bytes) -> None:
        if self._stored.events is not None:
            self._stored.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
            self._stored.note_news()

    def _finish(self) -> None:
        stored, writer = self._stored, self._writer
        stored.body = msgspec.json.encode(writer.snapshot())
        if writer.status in ("completed", "incomplete"):
            stored.conversation = msgspec.json.encode([*self._messages, writer.message()])
        stored.describe = stored.task = None
        self._store.finish(stored)
        stored.note_news()

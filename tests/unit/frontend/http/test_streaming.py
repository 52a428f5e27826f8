"""Streams whose clients disconnect or do not read, and failures on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from quire.errors import DeadlineExceededError, GenerationError
from quire.frontend.http.errors import anthropic_error
from quire.frontend.http.streaming import KEEP_ALIVE, EventStream, event

from ..openai.asgi import Call
from ..openai.serving import Server, check, events_of

LONG = {"prompt": [40, 41], "max_tokens": 500, "ignore_eos": True}


async def until_gone(server: Server) -> None:
    """Waits until the engine has no requests."""
    while server.engine.get_num_unfinished_requests():
        await asyncio.sleep(0)


def watch_aborts(server: Server) -> list[Any]:
    """The requests that are aborted from here on; a request may also be gone because it has ended."""
    aborted: list[Any] = []
    abort = server.engine.abort

    async def note(request_ids: Any, **options: Any) -> None:
        aborted.extend(request_ids)
        await abort(request_ids, **options)

    server.engine.abort = note  # type: ignore[method-assign]
    return aborted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_aborts_its_request(stream: bool, n: int) -> None:
    async def test(server: Server) -> None:
        aborted = watch_aborts(server)
        body = {**LONG, "stream": stream, "n": n, "temperature": 1}
        call = Call(server.app, "/v1/completions", body)
        while server.engine.get_num_unfinished_requests() < n:
            await asyncio.sleep(0)
        if stream:
            await call.wait_for(b"data: ")
        call.leave()
        await call.task
        await until_gone(server)
        assert aborted
        assert not call.is_complete or not stream

    check(test, executor="Leisurely")


def test_a_client_may_leave_before_anything_was_begun() -> None:
    async def test(server: Server) -> None:
        call = Call(server.app, "/v1/completions", {**LONG, "stream": True, "prompt": [[40], [41], [42]]})
        call.leave()
        await call.task
        await until_gone(server)

    check(test, executor="Leisurely")


def test_several_prompts_stream_side_by_side() -> None:
    async def test(server: Server) -> None:
        prompts = [[40 + i, 50] for i in range(5)]
        whole = await server.answer("/v1/completions", prompt=prompts, max_tokens=9)
        chunks = await server.stream("/v1/completions", prompt=prompts, max_tokens=9)
        for index in range(5):
            text = "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)
            assert text == whole["choices"][index]["text"]

    check(test)


def test_an_abort_by_the_operator_ends_the_stream() -> None:
    async def test(server: Server) -> None:
        call = Call(server.app, "/v1/completions", {**LONG, "stream": True, "request_id": "x"})
        await call.wait_for(b"data: ")
        await server.engine.abort("cmpl-x")
        await call.task
        assert events_of(call.text.decode())[-1]["choices"][0]["finish_reason"] == "abort"

    check(test, executor="Leisurely")


def test_a_server_that_ends_says_so_in_every_stream() -> None:
    async def test(server: Server) -> None:
        call = Call(
            server.app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}
        )
        whole = Call(server.app, "/v1/completions", LONG)
        await call.wait_for(b"data: ")
        server.state.lifecycle.is_stopping = True
        await server.engine.abort(list(server.engine.pipeline.output_processor.request_states), internal=True)
        await asyncio.gather(call.task, whole.task)
        error = events_of(call.text.decode())[-1]["error"]
        assert error["code"] == 503
        assert whole.status == 503

    check(test, executor="Leisurely")


# -- the response itself -----------------------------------------------------------------------------------------------


def run_stream(chunks: AsyncGenerator[bytes, None], **options: Any) -> Call:
    async def run() -> Call:
        stream = EventStream(chunks, request_id="x", **options)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await stream(scope, receive, send)

        call = Call(app, "/", {})
        await asyncio.wait_for(call.task, 30)
        return call

    return asyncio.run(run())


def test_a_failure_before_the_first_chunk_is_a_status() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        raise DeadlineExceededError("too late")
        yield b""

    call = run_stream(chunks())
    assert call.status == 504
    assert b"DeadlineExceededError" in call.text


def test_such_a_failure_has_the_shape_of_its_route() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        raise DeadlineExceededError("too late")
        yield b""

    call = run_stream(chunks(), shape_error=anthropic_error)
    assert json.loads(call.text) == {"type": "error", "error": {"type": "api_error", "message": "too late"}}


def test_a_later_failure_is_an_event() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield event({"a": 1})
        raise GenerationError("it broke")

    call = run_stream(chunks())
    assert call.status == 200
    first, last = events_of(call.text.decode())
    assert first == {"a": 1}
    assert last["error"]["code"] == 500
    assert call.is_complete


def test_silence_is_filled_with_comments() -> None:
    release = asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes, None]:
        await release.wait()
        yield event({"a": 1})

    async def run() -> None:
        stream = EventStream(chunks(), request_id="x", keep_alive_s=0.01)
        call = Call(lambda s, r, w: stream(s, r, w), "/", {})
        await call.wait_for(KEEP_ALIVE * 2)
        assert call.status == 200
        release.set()
        await call.task
        assert call.text.endswith(event({"a": 1}))

    asyncio.run(run())


def test_a_server_fills_silence_after_the_time_it_is_given() -> None:
    async def test(server: Server) -> None:
        call = Call(server.app, "/v1/completions", {**LONG, "stream": True})
        await call.wait_for(KEEP_ALIVE)
        call.leave()
        await call.task
        await until_gone(server)

    check(test, executor="Leisurely", sse_keep_alive_interval=0.001)


def test_a_client_that_does_not_read_is_left() -> None:
    closed = []

    async def chunks() -> AsyncGenerator[bytes, None]:
        while True:
            yield event({"a": 1})
            await asyncio.sleep(0)

    async def close() -> None:
        closed.append(True)

    async def run() -> None:
        stream = EventStream(chunks(), request_id="x", stall_s=0.01, on_close=close)
        call = Call(lambda s, r, w: stream(s, r, w), "/", {})
        await call.wait_for(b"data: ")
        call.reads.clear()
        await asyncio.wait_for(call.task, 30)
        assert not call.is_complete
        assert closed == [True]

    asyncio.run(run())


def test_a_cancelled_stream_is_cancelled() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield event({})
        await asyncio.Event().wait()

    async def run() -> None:
        stream = EventStream(chunks(), request_id="x")
        call = Call(lambda s, r, w: stream(s, r, w), "/", {})
        await call.wait_for(b"data: ")
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task

    asyncio.run(run())

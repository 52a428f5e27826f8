"""OpenAI's /v1/responses: objects, events, what is kept, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import openai
import pytest

from quire.frontend.openai.responses.store import ServerResponses

from ..http.test_streaming import until_gone, watch_aborts
from .asgi import Call
from .serving import Server, check, client_of
from .test_tool_calling import QUESTION, WEATHER

PATH = "/v1/responses"
HI: dict[str, Any] = {"input": "Hi", "max_output_tokens": 6}
LONG: dict[str, Any] = {"input": "Hi", "max_output_tokens": 400, "ignore_eos": True}
FUNCTION = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
ASK: dict[str, Any] = {"input": [QUESTION], "tools": [FUNCTION], "temperature": 0}


def events_in(text: str) -> list[dict[str, Any]]:
    """The events of a stream: named as they say, and numbered without a gap."""
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    response = await server.post(PATH, {**body, "stream": True})
    assert response.status_code == 200, response.text
    return events_in(response.text)


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """Returns the types of events, with repeated deltas once."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {**response, "id": None, "created_at": 0, "output": items}


def test_an_answer_has_every_field_and_says_what_the_chat_route_says() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer(PATH, **HI, instructions="Be short.", metadata={"a": "b"}, user="me")
        assert list(answer) == [
            "id", "created_at", "error", "incomplete_details", "instructions", "metadata", "model", "object", "output",
            "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p", "background", "max_output_tokens",
            "max_tool_calls", "previous_response_id", "prompt", "reasoning", "service_tier", "status", "text",
            "top_logprobs", "truncation", "usage", "user", "presence_penalty", "frequency_penalty",
            "kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages",
        ]  # fmt: skip
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
        chat = await server.answer("/v1/chat/completions", messages=messages, max_tokens=6)
        (item,) = answer["output"]
        assert list(item) == ["id", "content", "role", "status", "type", "phase"]
        assert item["content"] == [
            {
                "annotations": [],
                "text": chat["choices"][0]["message"]["content"],
                "type": "output_text",
                "logprobs": None,
            }
        ]
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (answer["instructions"], answer["metadata"], answer["user"]) == ("Be short.", {"a": "b"}, "me")
        usage = answer["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (chat["usage"]["prompt_tokens"], 6)
        assert usage["total_tokens"] == chat["usage"]["total_tokens"]

    check(test)


def test_a_stream_has_all_events_in_order_and_ends_as_the_whole_answer() -> None:
    async def test(server: Server) -> None:
        whole = await server.answer(PATH, **HI)
        events = await stream(server, **HI)
        assert kinds_of(events) == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "incomplete",
        ]  # fmt: skip
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert text == whole["output"][0]["content"][0]["text"]
        done = {event["type"].removeprefix("response."): event for event in events}
        assert done["output_item.added"]["item"]["content"] == []
        assert done["content_part.added"]["part"]["text"] == ""
        assert done["output_text.done"]["text"] == done["content_part.done"]["part"]["text"] == text
        last = events[-1]["response"]
        assert done["output_item.done"]["item"] == last["output"][0]
        assert without_ids(last) == without_ids(whole)
        assert list(done["output_text.delta"]) == [
            "content_index", "delta", "item_id", "logprobs", "output_index", "sequence_number", "type",
        ]  # fmt: skip
        assert {e["item_id"] for e in events if "item_id" in e} == {last["output"][0]["id"]}

    check(test)


def test_log_probabilities_come_with_the_text_they_are_of() -> None:
    async def test(server: Server) -> None:
        body = {**HI, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole = await server.answer(PATH, **body)
        events = await stream(server, **body)
        (part,) = whole["output"][0]["content"]
        assert len(part["logprobs"]) == 6
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
        (done,) = (event for event in events if event["type"] == "response.output_text.done")
        assert done["logprobs"] == events[-1]["response"]["output"][0]["content"][0]["logprobs"] == part["logprobs"]
        streamed = [e for event in events if event["type"] == "response.output_text.delta" for e in event["logprobs"]]
        assert streamed == part["logprobs"][: len(streamed)] != []

    check(test)


def test_a_function_is_called_and_its_output_answered() -> None:
    """The real demo model, in all three ways to go on: items, the output's own items, and a stored response."""

    async def test(server: Server) -> None:
        whole = await server.answer(PATH, **ASK)
        events = await stream(server, **ASK)
        assert kinds_of(events) == [
            "created", "in_progress", "output_item.added", "function_call_arguments.delta",
            "function_call_arguments.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert without_ids(events[-1]["response"]) == without_ids(whole)
        (call,) = whole["output"]
        assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
        assert json.loads(call["arguments"]) == {"city": "Oslo"}
        assert events[2]["item"]["arguments"] == ""
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"temperature": 7}'}
        texts = []
        for items in (
            {"input": [QUESTION, call, output]},
            {"input": [output], "previous_response_id": whole["id"]},
            {"input": [output], "previous_response_id": events[-1]["response"]["id"]},
        ):
            final = await server.answer(PATH, **{**ASK, **items})
            texts.append(final["output"][0]["content"][0]["text"])
        assert "7" in texts[0]
        assert texts == texts[:1] * 3
        forced = await server.answer(
            PATH, **{**ASK, "input": "Hi", "tool_choice": {"type": "function", "name": "get_weather"}}
        )
        assert [item["type"] for item in forced["output"]] == ["function_call"]
        assert forced["status"] == "completed"

    check(test, executor=None)


def test_text_in_the_form_of_a_schema() -> None:
    async def test(server: Server) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        form = {"type": "json_schema", "name": "x", "schema": {**schema, "additionalProperties": False}, "strict": True}
        answer = await server.answer(PATH, input="Hi", text={"format": form}, max_output_tokens=100)
        assert isinstance(json.loads(answer["output"][0]["content"][0]["text"])["a"], bool)
        assert answer["text"] == {"format": form}

    check(test, executor=None)


def test_responses_are_kept_for_their_key_and_nobody_else() -> None:
    keys = [hashlib.sha256(key).digest() for key in (b"mine", b"yours")]

    async def test(server: Server) -> None:
        mine, yours = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))
        made = (await server.post(PATH, HI, headers=mine)).json()
        path = f"{PATH}/{made['id']}"
        assert (await server.get(path, headers=mine)).json() == made
        assert (await server.get(path)).status_code == 401
        for method, place in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
            assert (await server.client.request(method, place, headers=yours)).status_code == 404
        follow = {**HI, "previous_response_id": made["id"]}
        refused = await server.post(PATH, follow, headers=yours)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
        assert (await server.post(PATH, follow, headers=mine)).status_code == 200
        assert (await server.client.delete(path, headers=mine)).json() == {
            "id": made["id"], "object": "response", "deleted": True,
        }  # fmt: skip
        assert (await server.get(path, headers=mine)).status_code == 404
        unstored = (await server.post(PATH, {**HI, "store": False}, headers=mine)).json()
        assert (await server.get(f"{PATH}/{unstored['id']}", headers=mine)).status_code == 404

    check(test, keys=keys)


def test_the_oldest_response_is_dropped_for_a_new_one() -> None:
    async def test(server: Server) -> None:
        ids = [(await server.answer(PATH, **HI))["id"] for _ in range(3)]
        statuses = [(await server.get(f"{PATH}/{response_id}")).status_code for response_id in ids]
        assert statuses == [404, 200, 200]

    async def nothing_kept(server: Server) -> None:
        answer = await server.answer(PATH, **HI)
        assert (await server.get(f"{PATH}/{answer['id']}")).status_code == 404
        assert (await server.refusal(PATH, **HI, background=True))["param"] == "background"

    check(test, max_stored_responses=2)
    check(nothing_kept, max_stored_responses=0)


async def until_ended(server: Server, response_id: str) -> dict[str, Any]:
    while True:
        response: dict[str, Any] = (await server.get(f"{PATH}/{response_id}")).json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0)


def test_a_response_in_the_background_is_asked_for_later() -> None:
    async def test(server: Server) -> None:
        first = await server.answer(PATH, **HI, background=True)
        assert (first["status"], first["output"], first["usage"]) == ("queued", [], None)
        ended = await until_ended(server, first["id"])
        whole = await server.answer(PATH, **HI)
        assert without_ids(ended) == without_ids({**whole, "background": True})
        await server.answer(PATH, **HI, previous_response_id=first["id"])
        assert (await server.get(f"{PATH}/{first['id']}?stream=true")).status_code == 400

    check(test)


def test_a_background_stream_can_be_left_and_taken_up_again() -> None:
    async def test(server: Server) -> None:
        call = Call(server.app, PATH, {**HI, "max_output_tokens": 30, "background": True, "stream": True})
        await call.wait_for(b"output_text.delta")
        call.leave()
        await call.task
        response_id = json.loads(call.text.split(b"\n")[1].removeprefix(b"data: "))["response"]["id"]
        rest = await server.get(f"{PATH}/{response_id}?stream=true")
        events = events_in(rest.text)
        assert kinds_of(events)[:3] == ["created", "queued", "in_progress"]
        assert kinds_of(events)[-1] == "incomplete"
        part = await server.get(f"{PATH}/{response_id}?stream=true&starting_after=4")
        assert [json.loads(b.split("data: ")[1]) for b in part.text.strip().split("\n\n")] == events[5:]
        assert (await server.get(f"{PATH}/{response_id}")).json() == events[-1]["response"]
        assert (await server.get(f"{PATH}/{response_id}?stream=1&starting_after=x")).status_code == 400

    check(test, executor="Steady")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("verb", ["cancel", "delete"])
def test_a_response_in_the_background_can_be_ended(verb: str, streams: bool) -> None:
    async def test(server: Server) -> None:
        aborted = watch_aborts(server)
        call = Call(server.app, PATH, {**LONG, "background": True, "stream": streams})
        await call.wait_for(b"resp_")
        (response_id,) = {key for _, key in server.state.part(ServerResponses).local.store._running}
        while not (await server.get(f"{PATH}/{response_id}")).json()["output"]:
            if not streams:
                break
            await asyncio.sleep(0)
        if verb == "cancel":
            cancelled = (await server.post(f"{PATH}/{response_id}/cancel")).json()
            assert (cancelled["status"], cancelled["id"]) == ("cancelled", response_id)
            assert (await server.post(f"{PATH}/{response_id}/cancel")).json() == cancelled
            assert (await server.get(f"{PATH}/{response_id}")).json() == cancelled
            refused = await server.refusal(PATH, **HI, previous_response_id=response_id)
            assert refused["param"] == "previous_response_id"
        else:
            assert (await server.client.delete(f"{PATH}/{response_id}")).status_code == 200
            assert (await server.get(f"{PATH}/{response_id}")).status_code == 404
            assert server.state.part(ServerResponses).local.store.num_bytes == 0
        await call.task
        await until_gone(server)
        assert aborted
        if streams:
            assert events_in(call.text.decode())[-1]["response"]["status"] == "cancelled"

    check(test, executor="Leisurely")


def test_only_the_background_can_be_cancelled() -> None:
    async def test(server: Server) -> None:
        made = await server.answer(PATH, **HI)
        assert (await server.refusal(f"{PATH}/{made['id']}/cancel"))["param"] == "response_id"
        assert (await server.refusal(PATH, **HI, background=True, store=False))["param"] == "background"

    check(test)


def test_the_background_is_bounded() -> None:
    async def test(server: Server) -> None:
        ids = [(await server.answer(PATH, **LONG, background=True))["id"] for _ in range(2)]
        assert (await server.refusal(PATH, 503, **HI, background=True))["param"] == "background"
        kept = await server.answer(PATH, **HI)
        assert (await server.get(f"{PATH}/{kept['id']}")).status_code == 404
        for response_id in ids:
            await server.client.delete(f"{PATH}/{response_id}")
        await until_gone(server)

    async def too_small(server: Server) -> None:
        made = await server.answer(PATH, **LONG, background=True)
        events = events_in((await server.post(PATH, {**LONG, "background": True, "stream": True})).text)
        assert events[-1]["response"]["error"]["code"] == "rate_limit_exceeded"
        assert "--max-stored-response-bytes" in events[-1]["response"]["error"]["message"]
        await server.client.delete(f"{PATH}/{made['id']}")
        await until_gone(server)

    check(test, executor="Leisurely", max_stored_responses=2)
    check(too_small, executor="Steady", max_stored_response_bytes=20_000)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_aborts_its_response(streams: bool) -> None:
    async def test(server: Server) -> None:
        aborted = watch_aborts(server)
        call = Call(server.app, PATH, {**LONG, "stream": streams})
        while not server.engine.get_num_unfinished_requests():
            await asyncio.sleep(0)
        if streams:
            await call.wait_for(b"output_text.delta")
        call.leave()
        await call.task
        await until_gone(server)
        assert aborted
        assert server.state.part(ServerResponses).local.store.num_responses == 0

    check(test, executor="Leisurely")


def test_a_server_that_ends_says_so_in_the_last_event() -> None:
    async def test(server: Server) -> None:
        streamed = Call(server.app, PATH, {**LONG, "stream": True})
        later = await server.answer(PATH, **LONG, background=True)
        await streamed.wait_for(b"output_text.delta")
        server.state.lifecycle.is_stopping = True
        await server.engine.abort(list(server.engine.pipeline.output_processor.request_states), internal=True)
        await streamed.task
        last = events_in(streamed.text.decode())[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "shut down" in last["response"]["error"]["message"]
        assert last["response"]["output"][0]["status"] == "incomplete"
        assert (await until_ended(server, later["id"]))["status"] == "failed"

    check(test, executor="Leisurely")


def test_what_is_refused_names_the_field() -> None:
    async def test(server: Server) -> None:
        async def refused(param: str, word: str = "", status: int = 400, **change: Any) -> None:
            error = await server.refusal(PATH, status, **{**HI, **change})
            assert (error["param"] or "").split(".")[0] == param, error
            assert word in error["message"], error

        image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
        await refused("input", "'input_image'", input=[image])
        await refused("input", "'web_search_call'", input=[{"type": "web_search_call", "id": "x"}])
        await refused("input", "item_reference", input=[{"type": "item_reference", "id": "x"}])
        await refused("input", "role", input=[{"role": "tool", "content": "x"}])
        await refused("input", "call_id", input=[{"type": "function_call_output", "output": "x"}])
        await refused("input", "arguments", input=[{"type": "function_call", "call_id": "x", "name": "f"}])
        await refused("input", "content", input=[{"type": "message", "role": "user"}])
        await refused("input", "a list", input=[{"type": ["message"], "role": "user"}])
        await refused("input", "", input=[])
        await refused("input", "x" * 40, input=[{"type": "x" * 5000}])
        await refused("input", "max_model_len", input="word " * 2000)
        await refused("max_output_tokens", "", max_output_tokens=0)
        await refused("max_output_tokens", "max_model_len", max_output_tokens=5000)
        await refused("temperature", "", temperature=9)
        await refused("tools", "'web_search'", tools=[{"type": "web_search"}])
        await refused("tools", "name", tools=[{"type": "function"}])
        await refused("tool_choice", "needs tools", tool_choice="required")
        await refused("tool_choice", "'mcp'", tool_choice={"type": "mcp"}, tools=[FUNCTION])
        await refused("tool_choice", "'g'", tool_choice={"type": "function", "name": "g"}, tools=[FUNCTION])
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
        await refused("tool_choice", "allows g", tool_choice=allowed, tools=[FUNCTION])
        await refused("text", "schema", text={"format": {"type": "json_schema", "name": "x"}})
        await refused("text", "", text={"format": {"type": "yaml"}})
        form = {"format": {"type": "json_object"}}
        await refused("text", "structured_outputs", text=form, structured_outputs={"regex": "a"})
        await refused("previous_response_id", "resp_x", 404, previous_response_id="resp_x")
        await refused("prompt", "", prompt={"id": "x"})
        await refused("conversation", "", conversation="conv_x")
        await refused("include", "", include=["everything"])
        await refused("metadata", "", metadata={str(i): "x" for i in range(17)})
        await refused("model", "", 404, model="other")

    check(test)


def test_openais_client_reads_what_it_gets() -> None:
    async def test(server: Server) -> None:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=client_of(server.app), max_retries=0
        )
        async with client, client.responses.stream(model="demo", **ASK) as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert kinds[-1] == "response.completed"
        (call,) = final.output
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"city": "Oslo"}
        assert final.usage is not None
        assert final.usage.total_tokens > 0

    check(test, executor=None)


def test_a_conversation_that_is_too_long_is_cut_only_when_asked() -> None:
    async def test(server: Server) -> None:
        long: dict[str, Any] = {"input": "word " * 600, "max_output_tokens": 7}
        assert (await server.refusal(PATH, **long))["param"] == "input"
        answer = await server.answer(PATH, **long, truncation="auto")
        assert answer["usage"]["input_tokens"] == 512 - 7
        chat = {"messages": [{"role": "user", "content": "word " * 600}], "truncate_prompt_tokens": -1}
        assert (await server.answer("/v1/chat/completions", **chat, max_tokens=9))["usage"]["total_tokens"] == 512

    check(test)

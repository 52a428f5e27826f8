"""Anthropic's /v1/messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.server import ServerConfig
from quire.frontend.http.bodies import BodyReader
from quire.frontend.openai.chat.format import ChatFormat
from quire.frontend.openai.protocol.messages import MessagesBody, conversation_of
from quire.frontend.openai.routes.messages import MessageWriter
from quire.outputs import CompletionOutput, RequestOutput
from tests.seeds import examples

from ..http.test_streaming import until_gone, watch_aborts
from .asgi import Call
from .serving import Server, check

PATH = "/v1/messages"
BODY: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 6,
    "system": [{"type": "text", "text": "Be short."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
}
AS_CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]


def test_an_answer_is_that_of_the_chat_route() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer(PATH, **BODY)
        chat = await server.answer("/v1/chat/completions", messages=AS_CHAT, max_tokens=6)
        assert list(answer) == [
            "id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage",
        ]  # fmt: skip
        assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
        assert answer["stop_reason"] == "max_tokens"
        counted = await server.answer(f"{PATH}/count_tokens", model="demo", messages=BODY["messages"])
        assert counted["input_tokens"] < answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
        assert answer["usage"]["output_tokens"] == 6

    check(test)


def test_a_stream_has_anthropics_events_in_their_order() -> None:
    async def test(server: Server) -> None:
        whole = await server.answer(PATH, **BODY)
        response = await server.post(PATH, {**BODY, "stream": True})
        events = [block.split("\n") for block in response.text.strip().split("\n\n")]
        data = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
        assert [lines[0] for lines in events] == [f"event: {d['type']}" for d in data]
        kinds = [d["type"] for d in data]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert "".join(d["delta"]["text"] for d in data[2:-3]) == whole["content"][0]["text"]
        assert data[-2]["usage"] == whole["usage"]
        assert data[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}

    check(test)


WEATHER = {
    "name": "get_weather",
    "description": "Current weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION = {"role": "user", "content": "What is the weather in Oslo?"}
ASK: dict[str, Any] = {"model": "demo", "max_tokens": 100, "messages": [QUESTION], "tools": [WEATHER]}


async def stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    response = await server.post(PATH, {**body, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(block.split("data: ")[1]) for block in response.text.strip().split("\n\n")]


def accumulate(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a stream's events add up to; blocks come one after the other."""
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            pieces = []
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            (piece,) = (value for key, value in event["delta"].items() if key != "type")
            pieces.append(piece)
        elif event["type"] == "content_block_stop":
            block = blocks[-1]
            text = "".join(pieces)
            if block["type"] == "tool_use":
                block["input"] = json.loads(text)
            else:
                block["text" if block["type"] == "text" else "thinking"] = text
    return blocks


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key != "id"} for block in content]


def test_the_demo_model_uses_a_tool_and_answers_from_its_result() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer(PATH, **ASK)
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
        (use,) = answer["content"]
        assert (use["type"], use["name"], use["input"]) == ("tool_use", "get_weather", {"city": "Oslo"})
        events = await stream(server, **ASK)
        assert without_ids(accumulate(events)) == without_ids(answer["content"])
        assert {e["delta"]["type"] for e in events if e["type"] == "content_block_delta"} == {"input_json_delta"}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        result = [{"type": "text", "text": '{"temperature": 7, "sky": "cloudy"}'}]
        back = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": result}]}
        messages = [QUESTION, {"role": "assistant", "content": answer["content"]}, back]
        final = await server.answer(PATH, **{**ASK, "messages": messages})
        assert final["stop_reason"] == "end_turn"
        assert "7" in final["content"][0]["text"]
        counted = await server.answer(f"{PATH}/count_tokens", model="demo", messages=messages, tools=[WEATHER])
        assert counted["input_tokens"] == final["usage"]["input_tokens"]

    check(test, executor=None)


def test_a_tool_can_be_demanded_or_forbidden() -> None:
    async def test(server: Server) -> None:
        hi = {**ASK, "messages": [{"role": "user", "content": "Hi"}]}
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
            forced = await server.answer(PATH, **hi, tool_choice=choice)
            assert {block["type"] for block in forced["content"]} == {"tool_use"}
            assert forced["stop_reason"] == "tool_use"
        free = await server.answer(PATH, **ASK, tool_choice={"type": "none"})
        assert [block["type"] for block in free["content"]] == ["text"]

    check(test, executor=None)


def test_the_last_words_of_the_assistant_are_gone_on_from() -> None:
    async def test(server: Server) -> None:
        turns = [QUESTION, {"role": "assistant", "content": "In Oslo it"}]
        answer = await server.answer(PATH, model="demo", max_tokens=5, messages=turns)
        chat = await server.answer(
            "/v1/chat/completions",
            messages=turns,
            max_tokens=5,
            add_generation_prompt=False,
            continue_final_message=True,
        )
        assert answer["content"][0]["text"] == chat["choices"][0]["message"]["content"]

    check(test)


def test_a_stop_sequence_is_named() -> None:
    async def test(server: Server) -> None:
        whole = (await server.answer(PATH, **BODY))["content"][0]["text"]
        word = whole[len(whole) // 2 :][:3]
        answer = await server.answer(PATH, **BODY, stop_sequences=[word])
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", word)
        assert whole.startswith(answer["content"][0]["text"])

    check(test)


def test_a_schema_is_kept_to() -> None:
    async def test(server: Server) -> None:
        schema = {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        }
        config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
        answer = await server.answer(PATH, **{**BODY, "max_tokens": 100}, output_config=config)
        assert isinstance(json.loads(answer["content"][0]["text"])["a"], bool)

    check(test, executor=None)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_aborts_its_message(streams: bool) -> None:
    async def test(server: Server) -> None:
        aborted = watch_aborts(server)
        call = Call(server.app, PATH, {**BODY, "max_tokens": 400, "stream": streams})
        while not server.engine.get_num_unfinished_requests():
            await asyncio.sleep(0)
        if streams:
            await call.wait_for(b"content_block_delta")
        call.leave()
        await call.task
        await until_gone(server)
        assert aborted

    check(test, executor="Leisurely")


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    (user({"type": "image"}), "messages[0].content[0] is a block of type 'image'"),
    (user({"type": "tool_use"}), "'tool_use'"),
    (user({"type": "tool_result"}), "tool_use_id"),
    (user({"type": "tool_result", "content": [{"type": "document"}]}), "content[0].content[0] is a block of type"),
    (user({"type": ["text"]}), "a list"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 3}]}]}, "input must be an object"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
]


def test_errors_have_anthropics_shape() -> None:
    async def refused(server: Server, change: dict[str, Any], word: str, status: int, kind: str) -> None:
        response = await server.post(PATH, {**BODY, **change})
        body = response.json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), change
        assert word in body["error"]["message"], body

    async def test(server: Server) -> None:
        for change, word in REFUSED:
            await refused(server, change, word, 400, "invalid_request_error")
        await refused(server, {"model": "x"}, "'x'", 404, "not_found_error")

    check(test)


# -- without an engine ------------------------------------------------------------------------------------------------

FORMAT = ChatFormat(ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"), None)
THOUGHT = '<think>Hm</think>Let me see.<tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>'


def output_of(text: str, finish_reason: str | None = None) -> RequestOutput:
    return RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        prompt_logprobs=None,
        outputs=[CompletionOutput(0, text, [0] * len(text), None, None, finish_reason)],
        finished=finish_reason is not None,
    )


class Pieces:
    """A submission whose answer comes in these pieces."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        for number, piece in enumerate(self._pieces, 1):
            yield 0, output_of(piece, "stop" if number == len(self._pieces) else None)


def writer_for(**fields: Any) -> MessageWriter:
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [QUESTION],
        "tools": [{"name": "f", "input_schema": {}}],
        **fields,
    }
    chat = BodyReader(MessagesBody).read(json.dumps(body).encode()).as_chat()
    return MessageWriter("msg_x", "m", FORMAT.plan(chat).make_parser(""))


def run_events(text: str, size: int) -> list[dict[str, Any]]:
    pieces: Any = Pieces([text[i : i + size] for i in range(0, len(text), size)] or [""])

    async def run() -> list[bytes]:
        return [chunk async for chunk in writer_for().events(pieces)]

    blocks = b"".join(asyncio.run(run())).decode().strip().split("\n\n")
    return [json.loads(block.split("data: ")[1]) for block in blocks]


def test_thinking_comes_before_what_is_said_and_done() -> None:
    whole = writer_for().whole(output_of(THOUGHT, "stop"))
    thinking, text, use = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert (use["name"], use["input"], whole["stop_reason"]) == ("f", {"a": [1]}, "tool_use")
    for size in (1, 7, 500):
        events = run_events(THOUGHT, size)
        assert without_ids(accumulate(events)) == without_ids(whole["content"])
        assert events[-2]["usage"] == whole["usage"]
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thinking_is_not_shown_to_who_does_not_want_it(thinking: dict[str, Any]) -> None:
    whole = writer_for(thinking=thinking).whole(output_of(THOUGHT, "stop"))
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]


def test_arguments_that_are_no_object_are_not_lost() -> None:
    cut = writer_for().whole(output_of('<tool_call>{"name": "f", "arguments": {"a": [', "length"))
    assert cut["content"][0]["input"] == {"INVALID_JSON": '{"a": ['}
    assert cut["stop_reason"] == "max_tokens"


@settings(max_examples=examples(100))
@given(
    text=st.lists(st.sampled_from([*THOUGHT.split("<"), "<", "{}", "é", "<think>", "</think>"])).map("".join),
    size=st.integers(1, 9),
)
def test_events_add_up_to_the_whole_answer(text: str, size: int) -> None:
    whole = writer_for().whole(output_of(text, "stop"))
    if all(block["type"] != "tool_use" or "INVALID_JSON" not in block["input"] for block in whole["content"]):
        assert without_ids(accumulate(run_events(text, size))) == without_ids(whole["content"])


def test_turns_become_messages_that_templates_know() -> None:
    turns: Any = [
        ("user", [{"type": "text", "text": "a"}]),
        ("assistant", [
            {"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "redacted_thinking", "data": "?"},
            {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        ]),
        ("user", [
            {"type": "tool_result", "tool_use_id": "1", "content": "r", "is_error": True},
            {"type": "tool_result", "tool_use_id": "2"},
            {"type": "text", "text": "c"},
        ]),
        ("user", "d"),
        ("assistant", "e"),
        ("assistant", [{"type": "text", "text": "f"}]),
    ]  # fmt: skip
    assert conversation_of("s", turns) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "b"}],
            "reasoning": "t",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "e"}, {"type": "text", "text": "f"}]},
    ]

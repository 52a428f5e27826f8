"""Events of /v1/responses: what they add up to is the response they end with, and the one that is not streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.server import ServerConfig
from quire.errors import GenerationError, ValidationError
from quire.frontend.http.bodies import BodyReader
from quire.frontend.new_request import ParsedPrompt
from quire.frontend.openai.protocol.responses import ResponsesBody
from quire.frontend.openai.rendering import PreparedChat
from quire.frontend.openai.responses.writer import ResponseWriter
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.sampling_params import SamplingParams
from tests.seeds import examples

from ..chat.test_blocks import CUTS, FORMAT, TEXTS, cut
from ..test_responses import events_in, without_ids

ANSWER = '<think>Hm</think>\nLet me see.<tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>'


async def count_words(text: str) -> int:
    return len(text.split())


def writer_for(**fields: Any) -> ResponseWriter:
    tools = [{"type": "function", "name": "f"}]
    body = BodyReader(ResponsesBody).read(json.dumps({"input": "x", "tools": tools, **fields}).encode())
    plan = FORMAT.plan(body.as_chat([]))
    state: Any = SimpleNamespace(
        config=ServerConfig(),
        engine=SimpleNamespace(tokenizer=None),
        part=lambda kind: SimpleNamespace(count_tokens=count_words),
    )
    chat = PreparedChat([ParsedPrompt("", [1, 2])], SamplingParams(logprobs=0), plan)
    return ResponseWriter(state, body, "m", "resp_x", chat)


def output_of(tokens: Sequence[str], finish_reason: str | None) -> RequestOutput:
    logprobs: Any = [{7: Logprob(-1.0, 1, token)} for token in tokens]
    completion = CompletionOutput(0, "".join(tokens), [7] * len(tokens), None, logprobs, finish_reason)
    return RequestOutput("x", None, [1, 2], None, [completion], finish_reason is not None)


class Answer:
    """A submission whose answer comes in these pieces, each of several tokens."""

    def __init__(self, pieces: Sequence[Sequence[str]], finish_reason: str = "stop") -> None:
        self._pieces = pieces
        self._finish_reason = finish_reason

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        for number, piece in enumerate(self._pieces, 1):
            yield 0, output_of(piece, self._finish_reason if number == len(self._pieces) else None)


def run_events(writer: ResponseWriter, answer: Any) -> list[dict[str, Any]]:
    async def run() -> bytes:
        return b"".join([chunk async for chunk in writer.events(answer)])

    return events_in(asyncio.run(run()).decode())


def accumulate(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client makes of events, which checks their order."""
    items: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        kind = event["type"].removeprefix("response.")
        item = items[event["output_index"]] if "output_index" in event and event["output_index"] < len(items) else None
        if kind == "output_item.added":
            assert not is_open
            assert event["output_index"] == len(items)
            items.append(event["item"])
            is_open = True
        elif kind == "content_part.added":
            assert item is not None
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            assert item is not None
            assert is_open
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            assert item is not None
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert item is not None
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item is not None
            assert event["text"] == item["content"][0]["text"]
        elif kind == "content_part.done":
            assert item is not None
            assert event["part"]["text"] == item["content"][0]["text"]
            item["content"][0] = event["part"]
        elif kind == "output_item.done":
            assert item is not None
            assert event["item"] == {**item, "status": event["item"]["status"]}
            items[-1] = event["item"]
            is_open = False
    assert not is_open
    return items


@settings(max_examples=examples(60))
@given(text=TEXTS, cuts=CUTS, reason=st.sampled_from(["stop", "length"]), wants_logprobs=st.booleans())
def test_however_an_answer_comes_its_events_are_the_whole_one(
    text: str, cuts: list[int], reason: str, wants_logprobs: bool
) -> None:
    fields: Any = {"include": ["message.output_text.logprobs"]} if wants_logprobs else {}
    tokens = list(text)
    whole = asyncio.run(writer_for(**fields).whole(output_of(tokens, reason)))
    pieces = [list(piece) for piece in cut(text, cuts)]
    events = run_events(writer_for(**fields), Answer(pieces, reason))
    last = events[-1]
    assert last["type"] == f"response.{'completed' if reason == 'stop' else 'incomplete'}"
    assert accumulate(events) == last["response"]["output"]
    assert without_ids(last["response"]) == without_ids(whole)
    for item in whole["output"]:
        if wants_logprobs and item["type"] == "message":
            (part,) = item["content"]
            if "<" in part["text"]:
                continue  # half a marker: which of two equal tokens was text is anybody's guess
            assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]


def test_reasoning_text_and_calls_are_items_in_their_order() -> None:
    writer = writer_for()
    response = asyncio.run(writer.whole(output_of([ANSWER], "stop")))
    reasoning, message, call = response["output"]
    assert list(reasoning) == ["id", "summary", "type", "content", "encrypted_content", "status"]
    assert reasoning["content"] == [{"text": "Hm", "type": "reasoning_text"}]
    assert message["content"][0]["text"] == "\nLet me see."
    assert (call["name"], call["arguments"], call["status"]) == ("f", '{"a": [1]}', "completed")
    assert [item["id"].partition("_")[0] for item in response["output"]] == ["rs", "msg", "fc"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 1
    assert writer.message()["reasoning"] == "Hm"
    hidden = asyncio.run(writer_for(include_reasoning=False).whole(output_of([ANSWER], "stop")))
    assert [item["type"] for item in hidden["output"]] == ["message", "function_call"]
    assert hidden["usage"]["output_tokens_details"]["reasoning_tokens"] == 1  # they were paid for all the same


def test_only_the_last_item_of_an_answer_that_is_cut_off_is_incomplete() -> None:
    response = asyncio.run(writer_for().whole(output_of([ANSWER[:-15]], "length")))
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (GenerationError("the engine failed"), "server_error", "the engine failed"),
        (KeyError("secret"), "server_error", "its log has the reason"),
        (ValidationError("too much", param="x"), "invalid_prompt", "too much"),
    ],
)
def test_a_failure_is_the_last_event(error: Exception, code: str, words: str) -> None:
    writer = writer_for()

    async def run() -> bytes:
        parts = []
        async for chunk in writer.events(Answer([["<think>", "H"], ["m"]])):  # type: ignore[arg-type]
            parts.append(chunk)
            if b"delta" in chunk:
                break
        return b"".join([*parts, writer.failure(error)])

    last = events_in(asyncio.run(run()).decode())[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == code
    assert words in last["response"]["error"]["message"]
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


def test_an_abort_is_a_failure() -> None:
    response = asyncio.run(writer_for().whole(output_of(["Hi"], "abort")))
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["output"][0]["status"] == "incomplete"

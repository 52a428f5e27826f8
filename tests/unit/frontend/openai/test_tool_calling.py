"""Tools through /v1/chat/completions: with the real demo model, and the answers that clients see."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from quire.config.server import ServerConfig
from quire.errors import ConfigError, ValidationError
from quire.frontend.http.bodies import BodyReader
from quire.frontend.openai.chat.format import ChatFormat
from quire.frontend.openai.chat.output import make_message
from quire.frontend.openai.parsers import reasoning as registry
from quire.frontend.openai.parsers.reasoning import ReasoningParserSpec, ReasoningTags
from quire.frontend.openai.protocol.chat import ChatBody
from quire.frontend.openai.protocol.sampling import make_sampling_params
from quire.frontend.openai.rendering import PromptRenderer
from quire.structured_outputs import ReasoningTokens

from .serving import Server, check, client_of

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: dict[str, Any] = {"role": "user", "content": "What is the weather in Oslo?"}
ASK: dict[str, Any] = {"messages": [QUESTION], "tools": [WEATHER]}


def openai_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=client_of(server.app), max_retries=0
    )


def test_the_demo_model_calls_a_tool_and_answers_from_its_result() -> None:
    async def test(server: Server) -> None:
        async with openai_client(server) as client:
            answer = await client.chat.completions.create(model="demo", **ASK)
            (choice,) = answer.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            (call,) = choice.message.tool_calls or ()
            assert call.type == "function"
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
            result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 7, "sky": "cloudy"}'}
            messages: Any = [QUESTION, choice.message.model_dump(exclude_none=True), result]
            final = await client.chat.completions.create(model="demo", messages=messages, tools=ASK["tools"])
            assert final.choices[0].finish_reason == "stop"
            assert "7" in (final.choices[0].message.content or "")
            assert final.choices[0].message.tool_calls is None

    check(test, executor=None)


def test_a_stream_has_name_and_id_first_then_arguments() -> None:
    async def test(server: Server) -> None:
        whole = await server.answer(PATH, **ASK)
        async with openai_client(server) as client:
            stream = await client.chat.completions.create(model="demo", stream=True, **ASK)
            chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        first, *more = calls
        assert first.id is not None
        assert first.id.startswith("chatcmpl-tool-")
        assert (first.index, first.type) == (0, "function")
        assert first.function is not None
        assert (first.function.name, first.function.arguments) == ("get_weather", "")
        assert more
        assert all(c.index == 0 and c.id is None and c.function and c.function.name is None for c in more)
        arguments = "".join((c.function.arguments or "") for c in more if c.function)
        (expected,) = whole["choices"][0]["message"]["tool_calls"]
        assert arguments == expected["function"]["arguments"]
        assert json.loads(arguments) == {"city": "Oslo"}
        assert not "".join(delta.content or "" for delta in deltas)
        assert [c.choices[0].finish_reason for c in chunks][-1] == "tool_calls"

    check(test, executor=None)


ZONE = {"type": "string", "enum": ["utc", "cet"]}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"$ref": "#/$defs/Zone"}},
            "required": ["zone"],
            "additionalProperties": False,
            "$defs": {"Zone": ZONE},
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_call_can_be_forced(choice: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TIME], "tool_choice": choice}

    async def test(server: Server) -> None:
        whole = (await server.answer(PATH, **body))["choices"][0]
        *chunks, last = [c["choices"][0] for c in await server.stream(PATH, **body)]
        for call in whole["message"]["tool_calls"]:
            assert call["function"]["name"] == "get_time"
            assert json.loads(call["function"]["arguments"])["zone"] in ZONE["enum"]
        assert whole["message"]["content"] is None
        assert whole["finish_reason"] == last["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        streamed = make_message("assistant", [chunk["delta"] for chunk in [*chunks, last]])
        assert [c["function"] for c in streamed["tool_calls"]] == [
            c["function"] for c in whole["message"]["tool_calls"]
        ]

    check(test, executor=None, tool_call_parser="none")


def test_tools_that_are_not_wanted_are_not_shown_to_the_model() -> None:
    async def test(server: Server) -> None:
        plain = await server.answer(PATH, messages=[QUESTION], max_tokens=1, return_token_ids=True)
        none = await server.answer(PATH, **ASK, tool_choice="none", max_tokens=1, return_token_ids=True)
        auto = await server.answer(PATH, **ASK, max_tokens=1, return_token_ids=True)
        assert none["prompt_token_ids"] == plain["prompt_token_ids"] != auto["prompt_token_ids"]
        tokens = await server.answer("/tokenize", **ASK)
        assert tokens["tokens"] == auto["prompt_token_ids"]

    check(test)


def test_they_may_be_shown_all_the_same() -> None:
    async def test(server: Server) -> None:
        none = await server.answer(PATH, **ASK, tool_choice="none", max_tokens=1, return_token_ids=True)
        auto = await server.answer(PATH, **ASK, max_tokens=1, return_token_ids=True)
        assert none["prompt_token_ids"] == auto["prompt_token_ids"]

    check(test, exclude_tools_when_tool_choice_none=False)


def test_requests_that_cannot_be_served_are_refused_by_field() -> None:
    async def test(server: Server) -> None:
        async def refused(param: str, **body: Any) -> str:
            error = await server.refusal(PATH, **{**ASK, **body})
            assert error["param"].startswith(param)
            return str(error["message"])

        assert "needs tools" in await refused("tool_choice", tools=None, tool_choice="required")
        named = {"type": "function", "function": {"name": "f"}}
        assert "get_weather" in await refused("tool_choice", tool_choice=named)
        await refused("tool_choice", tool_choice="sometimes")
        await refused("tools", tools=[{"type": "function"}])
        await refused("tools", tools=[{"type": "retrieval", "function": {"name": "f"}}])
        await refused("tools", tools=[{"function": {"name": "a b"}}])
        await refused("tools", tools=[{"function": {"name": "x" * 129}}])
        await refused("tools", tools=[WEATHER] * 1025)
        deep: Any = {}
        for _ in range(100):
            deep = {"properties": {"a": deep}}
        assert "64" in await refused("tools", tools=[{"function": {"name": "f", "parameters": deep}}])
        wide = {"enum": list(range(70_000))}
        assert "65536" in await refused("tools", tools=[{"function": {"name": "f", "parameters": wide}}])
        near: Any = {}
        for _ in range(31):
            near = {"properties": {"a": near}}
        forced: Any = {"tools": [{"function": {"name": "f", "parameters": near}}], "tool_choice": "required"}
        await refused("tools", **forced)
        await refused("tool_choice", tool_choice="required", response_format={"type": "json_object"})
        assistant = {"role": "assistant", "content": None, "tool_calls": 5}
        await refused("messages", messages=[QUESTION, assistant])

    check(test)


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, "1" * 5000, "null", ""])
def test_arguments_that_come_back_may_be_anything(arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}

    async def test(server: Server) -> None:
        messages = [QUESTION, {"role": "assistant", "tool_calls": [call]}, QUESTION]
        response = await server.post(PATH, {"messages": messages, "max_tokens": 1})
        assert response.status_code in (200, 400)

    check(test)


# -- without an engine ------------------------------------------------------------------------------------------------

HERMES = '<tool_call> "arguments"'
CALLS = (
    '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'
)


def answer_of(text: str, *, template: str = HERMES, prompt: str = "", size: int = 5, **fields: Any) -> dict[str, Any]:
    """The message that a server with `fields` of its config makes of a model's `text`."""
    names = {name for name in fields if hasattr(ServerConfig, name)}
    chat_format = ChatFormat(ServerConfig(**{name: fields.pop(name) for name in names}), template)
    request = {"messages": [QUESTION], "tools": [{"function": {"name": "f"}}], **fields}
    body = BodyReader(ChatBody).read(json.dumps(request).encode())
    parser = chat_format.plan(body).make_parser(prompt)
    deltas = [d for i in range(0, len(text), size) for d in parser.feed(text[i : i + size], ())]
    message = make_message("assistant", [*deltas, *parser.finish()])
    return {**message, "reason": parser.finish_reason("stop"), "cut": parser.finish_reason("length")}


def test_parallel_calls_have_indices_and_ids_of_their_own() -> None:
    message = answer_of(CALLS)
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    assert [c["function"] for c in (first, second)] == [
        {"name": "f", "arguments": "{}"},
        {"name": "g", "arguments": '{"a": 1}'},
    ]
    assert (message["content"], message["reason"], message["cut"]) == (None, "tool_calls", "length")


def test_values_in_tags_are_read_by_the_request_s_own_tools() -> None:
    text = "<tool_call><function=f><parameter=zip>0150</parameter><parameter=n>2</parameter></function></tool_call>"
    properties = {"zip": {"type": "string"}, "n": {"type": "integer"}}
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}]
    (call,) = answer_of(text, template="<function=f><parameter=a>", tools=tools)["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"zip": "0150", "n": 2}'}


def test_without_parallel_calls_only_the_first_counts() -> None:
    (call,) = answer_of(CALLS + "Bye", parallel_tool_calls=False)["tool_calls"]
    assert call["function"]["name"] == "f"


def test_without_tools_a_call_is_text() -> None:
    message = answer_of(CALLS, tools=None)
    assert message["content"] == CALLS
    assert message["reason"] == "stop"
    assert answer_of(CALLS, tool_choice="none")["content"] == CALLS


def test_a_call_after_reasoning_that_was_not_closed_is_a_call() -> None:
    message = answer_of(f"<think>Hm {CALLS}", reasoning_parser="qwen3")
    assert message["reasoning"] == "Hm "
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]


def test_reasoning_goes_before_calls() -> None:
    text = f"<think>Hm {CALLS}</think>\n{CALLS}"
    message = answer_of(text, reasoning_parser="qwen3")
    assert message["reasoning"] == f"Hm {CALLS}"
    assert "reasoning_content" not in message
    assert len(message["tool_calls"]) == 2
    assert (
        answer_of(text, reasoning_parser="qwen3", enable_reasoning_content=True)["reasoning_content"] == f"Hm {CALLS}"
    )
    hidden = answer_of(text, reasoning_parser="qwen3", include_reasoning=False)
    assert hidden["reasoning"] is None
    assert hidden["content"] is None


TOKENS = {"<think>": 8, "</think>": 9}
FORM = {"response_format": {"type": "json_object"}}


def place(parser: str, prompts: list[str], *, tokens: dict[str, int] = TOKENS, **fields: Any) -> tuple[Any, bool]:
    """(The tokens behind which the form begins, whether reasoning is read)."""
    chat_format = ChatFormat(ServerConfig(reasoning_parser=parser), HERMES)
    request = {"messages": [QUESTION], **fields}
    body = BodyReader(ChatBody).read(json.dumps(request).encode())
    params = make_sampling_params(body, {}, max_tokens=None, logprobs=None)
    plan = chat_format.plan(body)
    plan.adjust(params)
    plan = plan.place_form(params, prompts, tokens.get)
    form = params.structured_outputs
    return None if form is None else form.reasoning, plan.reasoning_spec is not None


def test_a_form_begins_where_the_reasoning_ends() -> None:
    inside, openable = ReasoningTokens(9), ReasoningTokens(9, 8)
    assert place("qwen3", ["Hi<think>\n"], **FORM) == (inside, True)
    assert place("qwen3", ["Hi"], **FORM) == (openable, True)
    assert place("deepseek_r1", ["Hi"], **FORM) == (inside, True)
    assert place("deepseek_r1", ["Hi", "Ho"], **FORM) == (inside, True)
    forced = {"tools": [WEATHER], "tool_choice": "required"}
    assert place("qwen3", ["Hi"], **forced) == (openable, True)


def test_a_form_begins_at_once_where_there_is_no_reasoning_or_its_end_cannot_be_told() -> None:
    assert place("qwen3", ["Hi<think>\n\n</think>\n\n"], **FORM) == (None, True)
    assert place("deepseek_r1", ["Hi"], tokens={}, **FORM) == (None, False)
    assert place("qwen3", ["Hi"], tokens={"</think>": 9}, **FORM) == (None, False)
    assert place("qwen3", ["Hi", "Hi<think>"], **FORM) == (None, False), "one form for all conversations"
    assert place("openai_gptoss", ["Hi"], **FORM) == (None, False)
    assert place("qwen3", ["Hi"]) == (None, True), "without a form"
    tag = {"structural_tag": '{"format": {"type": "any_text"}}'}
    assert place("qwen3", ["Hi"], structured_outputs=tag) == (None, True), "it says itself where its parts are"


def test_calls_are_read_behind_reasoning_where_they_are_forced() -> None:
    call = '[{"name": "f", "parameters": {}}]'
    message = answer_of(f"<think>Hm</think>{call}", tool_choice="required", reasoning_parser="qwen3")
    assert (message["reasoning"], len(message["tool_calls"])) == ("Hm", 1)


@pytest.fixture
def reasoning_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model's tags of tool calls stand for those of reasoning: --reasoning-parser demo."""
    tags = ReasoningTags("<tool_call>", "</tool_call>", begins_inside=True)
    rows = {"demo": ReasoningParserSpec(tags.make_program, tags=tags)}
    monkeypatch.setattr(registry, "REASONING_PARSERS", rows)


@pytest.mark.usefixtures("reasoning_demo")
def test_an_answer_in_json_after_reasoning() -> None:
    async def test(server: Server) -> None:
        close_id = server.state.part(PromptRenderer).find_token("</tool_call>")
        schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
        body = {"messages": [QUESTION], "response_format": form, "max_tokens": 60}
        closed = await server.answer(PATH, **body, logit_bias={str(close_id): 100})
        (choice,) = closed["choices"]
        assert (choice["finish_reason"], choice["message"]["reasoning"]) == ("stop", None)
        assert json.loads(choice["message"]["content"]) == {"city": "Oslo"}
        endless = await server.answer(PATH, **body, logit_bias={str(close_id): -100})
        (choice,) = endless["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
        assert choice["message"]["reasoning"]

    check(test, executor=None, reasoning_parser="demo")


def limited(parser: str, prompts: list[str], budget: int | None, wish: int | None = None) -> tuple[Any, Any]:
    """(The budget the engine is given, between which tokens)."""
    body = BodyReader(ChatBody).read(json.dumps({"messages": [QUESTION], "thinking_token_budget": budget}).encode())
    params = make_sampling_params(body, {}, max_tokens=None, logprobs=None)
    ChatFormat(ServerConfig(reasoning_parser=parser), HERMES).plan(body).limit_reasoning(
        params, prompts, TOKENS.get, wish
    )
    return params.thinking_token_budget, params.reasoning_tokens


def test_a_budget_of_reasoning_counts_between_the_models_tokens() -> None:
    assert limited("qwen3", ["Hi<think>\n"], 5) == (5, ReasoningTokens(9))
    assert limited("qwen3", ["Hi"], 0) == (0, ReasoningTokens(9, 8))
    assert limited("qwen3", ["Hi"], 7, wish=5) == (7, ReasoningTokens(9, 8))
    assert limited("qwen3", ["Hi"], None, wish=5) == (5, ReasoningTokens(9, 8))
    for none in (None, -1):
        assert limited("qwen3", ["Hi"], none) == (None, None)
    assert limited("qwen3", ["Hi<think>\n\n</think>\n\n"], 5, wish=5) == (None, None), "it is over"
    for parser, prompts in (("none", ["Hi"]), ("openai_gptoss", ["Hi"]), ("qwen3", ["Hi", "Hi<think>"])):
        assert limited(parser, prompts, None, wish=5) == (None, None)
        with pytest.raises(ValidationError, match="--reasoning-parser") as e:
            limited(parser, prompts, 5)
        assert e.value.param == "thinking_token_budget"


@pytest.mark.usefixtures("reasoning_demo")
def test_reasoning_ends_with_its_budget() -> None:
    async def test(server: Server) -> None:
        close_id = server.state.part(PromptRenderer).find_token("</tool_call>")
        body: dict[str, Any] = {"messages": [QUESTION], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        body |= {"logit_bias": {str(close_id): -100}, "return_token_ids": True}  # it would never end by itself
        (endless,) = (await server.answer(PATH, **body))["choices"]
        for budget in (0, 7, 29, 30):
            (choice,) = (await server.answer(PATH, **body, thinking_token_budget=budget))["choices"]
            assert choice["token_ids"][:budget] == endless["token_ids"][:budget]
            assert choice["token_ids"][budget : budget + 1] == [close_id] * (budget < 30)
            assert bool(choice["message"]["content"]) == (budget < 29)
        form = {"response_format": {"type": "json_object"}, "max_tokens": 60, "ignore_eos": False}
        (choice,) = (await server.answer(PATH, **{**body, **form}, thinking_token_budget=7))["choices"]
        assert choice["token_ids"].index(close_id) == 7
        assert choice["message"]["content"].startswith("{")
        message = {"model": "demo", "messages": [QUESTION], "max_tokens": 30, "temperature": 0}
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 7}}
        blocks = (await server.answer("/v1/messages", **message, **thinking))["content"]
        assert (
            blocks[0]["thinking"]
            == (await server.answer(PATH, **body, thinking_token_budget=7))["choices"][0]["message"]["reasoning"]
        )

    check(test, executor=None, reasoning_parser="demo")

    async def without_reasoning(server: Server) -> None:
        error = await server.refusal(PATH, messages=[QUESTION], thinking_token_budget=5)
        assert error["param"] == "thinking_token_budget"
        error = await server.refusal("/v1/completions", prompt="Hi", thinking_token_budget=5)
        assert error["param"] == "thinking_token_budget"
        message = {"model": "demo", "messages": [QUESTION], "max_tokens": 3}
        await server.answer("/v1/messages", **message, thinking={"type": "enabled", "budget_tokens": 7})

    check(without_reasoning)


@pytest.mark.usefixtures("reasoning_demo")
def test_usage_tells_the_tokens_of_thoughts_from_the_others() -> None:
    async def test(server: Server) -> None:
        close_id = server.state.part(PromptRenderer).find_token("</tool_call>")
        body = {"messages": [QUESTION], "max_tokens": 20, "n": 2, "seed": 1, "temperature": 1, "ignore_eos": True}
        endless = {**body, "logit_bias": {str(close_id): -100}}
        thought = await server.answer(PATH, **endless)
        texts = [choice["message"]["reasoning"] for choice in thought["choices"]]
        expected = sum([await server.state.part(PromptRenderer).count_tokens(text) for text in texts])
        assert thought["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
        assert abs(expected - thought["usage"]["completion_tokens"]) <= len(texts)  # half a character at the end
        hidden = await server.answer(PATH, **endless, include_reasoning=False)
        assert hidden["usage"] == thought["usage"]
        both = await server.answer(f"{PATH}/batch", **{**endless, "messages": [[QUESTION]] * 2})
        assert both["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * expected}
        *chunks, last = await server.stream(
            PATH, **endless, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
        assert last["usage"] == {key: thought["usage"][key] for key in last["usage"]}
        assert "completion_tokens_details" in last["usage"]
        assert all("completion_tokens_details" not in chunk["usage"] for chunk in chunks)  # not before it is known
        closed = await server.answer(
            PATH, **{**body, "n": 1}, logit_bias={str(close_id): 100}, stop_token_ids=[close_id]
        )
        assert closed["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}

    check(test, executor=None, reasoning_parser="demo")
    check(_without_reasoning)


async def _without_reasoning(server: Server) -> None:
    answer = await server.answer(PATH, messages=[QUESTION], max_tokens=3)
    assert answer["usage"]["completion_tokens_details"] is None


def test_harmony_is_read_by_one_parser() -> None:
    template = "<|start|><|channel|><|message|>functions."
    text = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    for fields in ({}, {"tools": None}):
        message = answer_of(text, template=template, **fields)
        assert (message["reasoning"], message["content"]) == ("Hm", "Hi")


def test_a_server_that_does_not_know_the_format_says_so() -> None:
    with pytest.raises(Exception, match="--tool-call-parser"):
        answer_of("x", template="")
    assert answer_of("Hi", template="", tool_choice="none")["content"] == "Hi"
    with pytest.raises(ConfigError, match="--enable-auto-tool-choice"):
        ChatFormat(ServerConfig(enable_auto_tool_choice=True), "")
    with pytest.raises(ConfigError, match="hermes"):
        ChatFormat(ServerConfig(tool_call_parser="zeus"), "")
    assert ChatFormat(ServerConfig(tool_call_parser="none"), HERMES).tool_spec is None

"""Ollama's API: its bodies, its lines, and the answers of the chat and completion routes in its form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.config.server import ServerConfig
from quire.frontend.http.bodies import BodyReader
from quire.frontend.openai.chat.format import ChatFormat
from quire.frontend.openai.protocol.ollama import OllamaChatBody, Options
from quire.frontend.openai.routes.ollama import AnswerWriter
from quire.outputs import CompletionOutput, RequestOutput

from ..http.test_streaming import until_gone, watch_aborts
from .asgi import Call
from .serving import Server, check

MESSAGES = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": "demo:latest", "messages": MESSAGES, "options": {"num_predict": 6, "num_ctx": 4096}}


async def lines_of(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await server.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_an_answer_is_that_of_the_chat_route() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer("/api/chat", **BODY, stream=False)
        chat = await server.answer("/v1/chat/completions", messages=MESSAGES, max_tokens=6)
        assert answer["message"] == {"role": "assistant", "content": chat["choices"][0]["message"]["content"]}
        assert (answer["model"], answer["done"], answer["done_reason"]) == ("demo:latest", True, "length")
        usage = chat["usage"]
        assert (answer["prompt_eval_count"], answer["eval_count"]) == (usage["prompt_tokens"], 6)
        assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"] > 0

    check(test)


def test_streaming_is_the_default_and_says_the_same_line_by_line() -> None:
    async def test(server: Server) -> None:
        whole = await server.answer("/api/chat", **BODY, stream=False)
        lines = await lines_of(server, "/api/chat", BODY)
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert len(lines) > 1
        assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
        assert {k: lines[-1][k] for k in ("done_reason", "eval_count", "prompt_eval_count")} == {
            k: whole[k] for k in ("done_reason", "eval_count", "prompt_eval_count")
        }

    check(test)


def test_a_prompt_is_a_conversation_of_one_message_and_raw_is_a_text() -> None:
    async def test(server: Server) -> None:
        options = {"num_predict": 5}
        answer = await server.answer(
            "/api/generate", model="demo", prompt="Hi", system="Be", options=options, stream=False
        )
        messages = [{"role": "system", "content": "Be"}, *MESSAGES]
        chat = await server.answer("/v1/chat/completions", messages=messages, max_tokens=5)
        assert answer["response"] == chat["choices"][0]["message"]["content"]
        raw = {"model": "demo", "prompt": "Hi", "raw": True, "options": options}
        lines = await lines_of(server, "/api/generate", raw)
        text = await server.answer("/v1/completions", prompt="Hi", max_tokens=5)
        assert "".join(line["response"] for line in lines) == text["choices"][0]["text"]
        longer = await server.answer("/api/generate", model="demo", prompt="Hi", raw=True, stream=False)
        assert longer["eval_count"] > 16, "without num_predict as many tokens as fit, not the 16 of completions"

    check(test)


def test_a_request_without_text_is_answered_at_once() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer("/api/generate", model="demo")
        assert (answer["response"], answer["done"], answer["done_reason"]) == ("", True, "load")
        assert (await server.answer("/api/chat", model="demo", messages=[]))["done_reason"] == "load"

    check(test)


def test_the_lists_name_the_served_model() -> None:
    async def test(server: Server) -> None:
        (card,) = (await server.get("/api/tags")).json()["models"]
        assert (card["name"], card["model"], card["details"]["family"]) == ("demo", "demo", "llama")
        assert card["details"]["quantization_level"] == "BF16"
        assert card["size"] > 1000
        (running,) = (await server.get("/api/ps")).json()["models"]
        assert running["context_length"] == server.state.max_model_len
        shown = await server.answer("/api/show", model="demo")
        assert shown["model_info"]["general.architecture"] == "llama"
        assert shown["model_info"]["llama.context_length"] == server.state.max_model_len
        assert {"completion", "tools"} <= set(shown["capabilities"])
        assert "messages" in shown["template"]
        assert (await server.get("/api/version")).json()["version"].count(".") == 2

    check(test)


def test_errors_have_ollamas_shape() -> None:
    async def test(server: Server) -> None:
        for path, body, status, words in [
            ("/api/chat", {"model": "other", "messages": MESSAGES}, 404, "'other' is not served here"),
            (
                "/api/chat",
                {"model": "demo", "messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]},
                400,
                "images",
            ),
            (
                "/api/generate",
                {"model": "demo", "prompt": "Hi", "options": {"temperature": -1}},
                400,
                "options.temperature",
            ),
            ("/api/generate", {"model": "demo", "prompt": "Hi", "context": [1, 2]}, 400, "context is not supported"),
            ("/api/generate", {"prompt": "Hi"}, 400, "model is missing"),
            ("/api/embed", {"model": "demo", "input": "Hi"}, 404, "not for this model"),
            ("/api/pull", {"model": "demo"}, 501, "quire serve MODEL"),
        ]:
            response = await server.post(path, body)
            assert response.status_code == status, path
            assert list(response.json()) == ["error"]
            assert words in response.json()["error"]
        assert (await server.client.request("DELETE", "/api/delete")).status_code == 501

    check(test)


def test_an_answer_must_match_the_format() -> None:
    async def test(server: Server) -> None:
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        answer = await server.answer("/api/chat", model="demo", messages=MESSAGES, format=schema, stream=False)
        assert json.loads(answer["message"]["content"])["a"] in (1, 2)

    check(test)


def test_a_client_that_leaves_ends_its_request() -> None:
    async def test(server: Server) -> None:
        aborted = watch_aborts(server)
        call = Call(server.app, "/api/chat", {"model": "demo", "messages": MESSAGES})
        await call.wait_for(b'"done":false')
        call.leave()
        await call.task
        await until_gone(server)
        assert aborted

    check(test)


# -- conversion -------------------------------------------------------------------------------------------------------


def as_chat(**body: Any) -> Any:
    return BodyReader(OllamaChatBody).read(json.dumps({"model": "demo", **body}).encode()).as_chat()


def test_calls_and_their_results_find_one_another() -> None:
    calls = [{"function": {"name": name, "arguments": {"city": name}}} for name in ("a", "b")]
    chat = as_chat(
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
            {"role": "tool", "tool_name": "b", "content": "2"},
            {"role": "tool", "content": "1"},
        ]
    )
    _, asked, second, first = chat.messages
    assert asked["reasoning"] == "hm"
    ids = [call["id"] for call in asked["tool_calls"]]
    assert [call["function"]["arguments"] for call in asked["tool_calls"]] == [{"city": "a"}, {"city": "b"}]
    assert (second["tool_call_id"], first["tool_call_id"]) == (ids[1], ids[0])


@pytest.mark.parametrize(
    ("think", "variables", "effort", "is_shown"),
    [
        (True, {"enable_thinking": True, "thinking": True}, None, True),
        (False, {"enable_thinking": False, "thinking": False}, None, False),
        ("low", {"enable_thinking": True, "thinking": True}, "low", True),
        (None, None, None, True),
    ],
)
def test_think_switches_reasoning(think: Any, variables: Any, effort: Any, is_shown: bool) -> None:
    chat = as_chat(messages=MESSAGES, think=think)
    assert chat.chat_template_kwargs == variables
    assert (chat.reasoning_effort, chat.include_reasoning) == (effort, is_shown)


def test_a_last_message_of_the_assistant_is_continued() -> None:
    chat = as_chat(messages=[*MESSAGES, {"role": "assistant", "content": "I"}])
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)
    assert chat.stream, "a stream is Ollama's default"


def test_options_that_mean_none_are_left_out() -> None:
    assert set(Options(num_predict=-1, seed=-1).as_fields().values()) == {None}
    fields = Options(num_predict=3, seed=2, repeat_penalty=1.5, stop=["a"]).as_fields()
    assert {k: v for k, v in fields.items() if v is not None} == {
        "max_tokens": 3, "seed": 2, "repetition_penalty": 1.5, "stop": ["a"],
    }  # fmt: skip


def test_calls_and_reasoning_in_answers() -> None:
    text = '<think>Hm.</think>Ok<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = as_chat(messages=MESSAGES, tools=[tool])
    plan = ChatFormat(config, None).plan(chat)

    def output(part: str, reason: str | None) -> RequestOutput:
        fields = {"cumulative_logprob": None, "logprobs": None, "finish_reason": reason}
        completion = CompletionOutput(index=0, text=part, token_ids=[1], **fields)
        return RequestOutput("r", None, [1, 2], None, [completion], finished=reason is not None)

    writer = AnswerWriter("demo", plan.make_parser(""), 0.0, is_chat=True)
    message = writer.whole(output(text, "stop"))["message"]
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    assert message == {"role": "assistant", "content": "Ok", "thinking": "Hm.", "tool_calls": [call]}
    writer = AnswerWriter("demo", plan.make_parser(""), 0.0, is_chat=True)
    pieces = [p for i, c in enumerate(text) for p in writer._read(output(c, "stop" if i == len(text) - 1 else None))]
    assert "".join(p.get("thinking", "") for p in pieces) == "Hm."
    assert "".join(p.get("content", "") for p in pieces) == "Ok"
    assert [p["tool_calls"] for p in pieces if "tool_calls" in p] == [[call]], "a call is sent once, whole"

"""The render routes: the same tokens as the routes that generate, and nothing of the engine."""

from __future__ import annotations

from typing import Any

from .serving import Server, check
from .test_tool_calling import ASK

HI = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["Hello there", "You"], "temperature": 0.5},
    "/v1/chat/completions": {**ASK, "max_tokens": 7, "cache_salt": "s", "stop": ["x"]},
    "/v1/messages": {"model": "demo", "messages": [HI], "max_tokens": 7, "system": "Be short."},
    "/v1/responses": {"input": [HI], "instructions": "Be short.", "max_output_tokens": 7},
}
FIELDS = [
    "request_id", "token_ids", "features", "sampling_params", "model", "stream", "stream_options", "cache_salt",
    "priority", "kv_transfer_params",
]  # fmt: skip


async def prompt_ids(server: Server, path: str) -> list[list[int]]:
    """The prompts of the requests that the route itself makes."""
    if path == "/v1/completions":
        prompts = BODIES[path]["prompt"]
        return [(await server.answer("/tokenize", prompt=prompt))["tokens"] for prompt in prompts]
    messages = BODIES[path].get("messages", [HI])
    if path != "/v1/chat/completions":
        messages = [{"role": "system", "content": "Be short."}, *messages]
    tools = BODIES[path].get("tools")
    return [(await server.answer("/tokenize", messages=messages, tools=tools))["tokens"]]


def test_rendered_requests_have_the_tokens_of_those_that_are_generated() -> None:
    async def test(server: Server) -> None:
        for path, body in BODIES.items():
            answer = await server.answer(f"{path}/render", **body)
            requests = answer if isinstance(answer, list) else [answer]
            assert all(list(request) == FIELDS for request in requests)
            assert [request["token_ids"] for request in requests] == await prompt_ids(server, path)
            assert {request["model"] for request in requests} == {"demo"}
            assert len({request["request_id"] for request in requests}) == len(requests)
            generated = await server.answer(path, **body)
            usage = generated["usage"]
            num_tokens = sum(len(request["token_ids"]) for request in requests)
            assert num_tokens == usage.get("prompt_tokens", usage.get("input_tokens"))

    check(test, enable_scale_out=True)


def test_sampling_parameters_are_what_the_engine_would_get() -> None:
    async def test(server: Server) -> None:
        first, _ = await server.answer("/v1/completions/render", **BODIES["/v1/completions"])
        assert (first["sampling_params"]["temperature"], first["sampling_params"]["max_tokens"]) == (0.5, 16)
        chat = await server.answer("/v1/chat/completions/render", **BODIES["/v1/chat/completions"])
        assert (chat["sampling_params"]["max_tokens"], chat["sampling_params"]["stop"]) == (7, ["x"])
        assert chat["cache_salt"] == "s"
        forced = await server.answer("/v1/chat/completions/render", **ASK, tool_choice="required")
        assert "get_weather" in forced["sampling_params"]["structured_outputs"]["json"]

    async def without_a_default(server: Server) -> None:
        free = await server.answer("/v1/chat/completions/render", messages=[HI])
        assert free["sampling_params"]["max_tokens"] == 512 - len(free["token_ids"])

    check(test, enable_scale_out=True)
    check(without_a_default, enable_scale_out=True, engine_flags={"generation_config": "vllm"})


def test_what_is_refused_there_is_refused_here() -> None:
    async def test(server: Server) -> None:
        for path, body in BODIES.items():
            for change in ({"model": "other"}, {"temperature": 9}, {"messages": [], "input": [], "prompt": []}):
                here = await server.post(f"{path}/render", {**body, **change})
                there = await server.post(path, {**body, **change})
                assert here.status_code == there.status_code >= 400
                assert here.json() == there.json()

    async def off(server: Server) -> None:
        for path, body in BODIES.items():
            response = await server.post(f"{path}/render", body)
            assert response.status_code == 403
            assert "--enable-scale-out" in response.text

    check(test, enable_scale_out=True)
    check(off)


def test_rendering_knows_no_stored_responses() -> None:
    async def test(server: Server) -> None:
        made = await server.answer("/v1/responses", input="Hi", max_output_tokens=1)
        error = await server.refusal("/v1/responses/render", input="x", previous_response_id=made["id"])
        assert error["param"] == "previous_response_id"

    check(test, enable_scale_out=True)

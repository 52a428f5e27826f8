"""/v1/chat/completions/batch: the answers of the chat route, all in one."""

from __future__ import annotations

import asyncio
from typing import Any

from ..http.test_streaming import until_gone, watch_aborts
from .asgi import Call
from .serving import Server, check

PATH = "/v1/chat/completions/batch"
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "And you?"}],
    [{"role": "user", "content": "Bye"}],
]


def test_choices_are_those_of_each_conversation_alone() -> None:
    async def test(server: Server) -> None:
        body: dict[str, Any] = {"max_tokens": 5, "n": 2, "seed": 3, "temperature": 1, "return_token_ids": True}
        answer = await server.answer(PATH, messages=CONVERSATIONS, **body, model="demo")
        alone = [await server.answer("/v1/chat/completions", messages=messages, **body) for messages in CONVERSATIONS]
        assert list(answer) == list(alone[0])
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        for index, choice in enumerate(answer["choices"]):
            expected = alone[index // 2]
            assert choice["prompt_token_ids"] == expected["prompt_token_ids"]
            assert choice["message"] == expected["choices"][index % 2]["message"]
            assert choice["token_ids"] == expected["choices"][index % 2]["token_ids"]
        assert answer["prompt_token_ids"] is None
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer["usage"][name] == sum(a["usage"][name] for a in alone)

    check(test)


def test_what_a_batch_cannot_have_is_refused_by_name() -> None:
    async def test(server: Server) -> None:
        async def refused(param: str, **change: Any) -> None:
            error = await server.refusal(PATH, **{"messages": CONVERSATIONS, **change})
            assert error["param"] == param, error

        await refused("messages", messages=[])
        await refused("messages", messages=CONVERSATIONS[0])
        await refused("messages", messages=[[]])
        await refused("messages", messages=CONVERSATIONS * 2)
        await refused("n", n=2)
        await refused("stream", stream=True)
        await refused("tools", tools=[{"function": {"name": "f"}}])
        await refused("tool_choice", tool_choice="auto")
        await refused("max_tokens", max_tokens=5000)

    check(test, max_prompts_per_request=4)


def test_a_batch_takes_its_room_at_once_and_who_leaves_aborts_it_whole() -> None:
    async def test(server: Server) -> None:
        aborted = watch_aborts(server)
        call = Call(server.app, PATH, {"messages": CONVERSATIONS, "max_tokens": 400, "ignore_eos": True})
        while not server.engine.admission.num_reqs:
            await asyncio.sleep(0)
        assert server.engine.admission.num_reqs == 3
        while server.engine.get_num_unfinished_requests() < 3:
            await asyncio.sleep(0)
        call.leave()
        await call.task
        await until_gone(server)
        assert len(aborted) == 3

    check(test, executor="Leisurely")

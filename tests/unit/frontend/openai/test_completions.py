"""/v1/completions, whole and in chunks."""

from __future__ import annotations

from typing import Any

import pytest

from .serving import Server, check

PATH = "/v1/completions"


def test_an_answer_has_every_field_in_vllms_order() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer(PATH, prompt="Hello there", max_tokens=3, ignore_eos=True)
        assert list(answer) == [
            "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
            "kv_transfer_params", "ec_transfer_params", "metrics",
        ]  # fmt: skip
        assert answer["id"].startswith("cmpl-")
        assert answer["object"] == "text_completion"
        assert answer["model"] == "demo"
        (choice,) = answer["choices"]
        assert list(choice) == [
            "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs",
            "prompt_token_ids", "routed_experts",
        ]  # fmt: skip
        assert choice["finish_reason"] == "length"
        usage = answer["usage"]
        assert usage["completion_tokens"] == 3
        assert usage["total_tokens"] == usage["prompt_tokens"] + 3

    check(test)


def test_a_stream_says_what_the_whole_answer_says() -> None:
    async def test(server: Server) -> None:
        body: dict[str, Any] = {"prompt": [40, 41, 42], "max_tokens": 12, "n": 2, "seed": 3, "logprobs": 1}
        body["temperature"] = 1
        whole = await server.answer(PATH, **body, return_token_ids=True)
        chunks = await server.stream(PATH, **body, return_token_ids=True, stream_options={"include_usage": True})
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"] == {key: whole["usage"][key] for key in last["usage"]}
        assert len({chunk["id"] for chunk in chunks}) == 1
        for index in range(2):
            choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            expected = whole["choices"][index]
            assert "".join(c["text"] for c in choices) == expected["text"]
            assert [t for c in choices for t in c["token_ids"]] == expected["token_ids"]
            for key in expected["logprobs"]:
                assert [v for c in choices for v in c["logprobs"][key]] == expected["logprobs"][key]
            assert [c["finish_reason"] for c in choices][-1] == expected["finish_reason"]
            assert all(c["finish_reason"] is None for c in choices[:-1])

    check(test)


def test_usage_in_every_chunk_grows_by_what_the_chunk_brings() -> None:
    async def test(server: Server) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await server.stream(PATH, prompt=[40, 41], max_tokens=5, stream_options=options, return_token_ids=True)
        seen = 0
        for chunk in chunks[:-1]:
            seen += len(chunk["choices"][0]["token_ids"])
            assert chunk["usage"] == {"prompt_tokens": 2, "total_tokens": 2 + seen, "completion_tokens": seen}
        assert seen == 5

    check(test)


NO_USAGE: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("options", NO_USAGE, ids=["no options", "counts without include_usage"])
def test_a_stream_has_counts_only_if_it_was_asked_for_them(route: str, options: dict[str, Any]) -> None:
    body = {"prompt": "x"} if route == PATH else {"messages": [{"role": "user", "content": "x"}]}

    async def test(server: Server) -> None:
        chunks = await server.stream(route, **body, max_tokens=3, **options)
        assert not any("usage" in chunk for chunk in chunks)

    async def test_forced(server: Server) -> None:
        chunks = await server.stream(route, **body, max_tokens=3, **options)
        assert all("usage" in chunk for chunk in chunks)
        assert chunks[-1]["choices"] == []

    check(test)
    check(test_forced, enable_force_include_usage=True)


def test_prompts_in_every_form() -> None:
    async def test(server: Server) -> None:
        ids = (await server.answer("/tokenize", prompt="Hello"))["tokens"]
        alone = await server.answer(PATH, prompt="Hello", return_token_ids=True, ignore_eos=True)
        as_ids = await server.answer(PATH, prompt=ids, return_token_ids=True, ignore_eos=True)
        assert as_ids["choices"] == alone["choices"]
        assert alone["choices"][0]["prompt_token_ids"] == ids
        for prompt in (["Hello", "Bye"], [ids, [60, 61]]):
            several = await server.answer(PATH, prompt=prompt, n=2, seed=1, temperature=1, ignore_eos=True)
            assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
            assert several["choices"][0]["text"] == alone["choices"][0]["text"]
            assert several["usage"]["completion_tokens"] == 4 * 16

    check(test)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_gives_the_prompt_back_with_its_logprobs(max_tokens: int) -> None:
    async def test(server: Server) -> None:
        body = {"prompt": [40, 41, 42], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        (choice,) = (await server.answer(PATH, **body))["choices"]
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == 3 + max_tokens
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        prompt = (await server.answer("/detokenize", tokens=[40, 41, 42]))["prompt"]
        assert choice["text"].startswith(prompt)
        assert logprobs["tokens"][0]
        assert prompt.startswith(logprobs["tokens"][0])
        assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
        assert (choice["text"] == prompt) is (max_tokens == 0)
        chunks = await server.stream(PATH, **body)
        assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]
        streamed = [token for c in chunks for token in c["choices"][0]["logprobs"]["tokens"]]
        assert streamed == logprobs["tokens"]

    check(test, executor=None)


def test_tokens_may_be_shown_as_ids() -> None:
    async def test(server: Server) -> None:
        body = {"prompt": [40], "max_tokens": 2, "logprobs": 0, "return_token_ids": True}
        (choice,) = (await server.answer(PATH, **body, return_tokens_as_token_ids=True))["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]

    check(test)


def test_prompt_logprobs_and_truncation() -> None:
    async def test(server: Server) -> None:
        body = {"prompt": [40, 41, 42], "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
        (choice,) = (await server.answer(PATH, **body, truncate_prompt_tokens=2))["choices"]
        assert choice["prompt_token_ids"] == [41, 42]
        first, second = choice["prompt_logprobs"]
        assert first is None
        assert list(second["42"]) == ["logprob", "rank", "decoded_token"]
        (choice,) = (await server.answer(PATH, **body, truncate_prompt_tokens=2, truncation_side="right"))["choices"]
        assert choice["prompt_token_ids"] == [40, 41]

    check(test, executor=None)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": True}, "n"),
    ({"prompt": "x", "max_tokens": "x"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 5000}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": [40] * 3000}, "prompt"),
    ({"prompt": [999999]}, "prompt"),
    ({"prompt": [40, "x"]}, "prompt"),
    ({"prompt": [[40], [-1]]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"include_usage": 2}}, "stream_options.include_usage"),
    ({"prompt": "x", "logit_bias": {"999999": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "x", "logprobs": 1000}, "logprobs"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "x", "cache_salt": "s" * 2000}, "cache_salt"),
    ({"prompt": "x", "n": 5000, "temperature": 1}, "n"),
    ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
]


def test_an_answer_shows_its_drafts_if_it_is_the_only_one() -> None:
    async def test(server: Server) -> None:
        body = {"prompt": [5, 6], "max_tokens": 7}
        drafts = (await server.answer(PATH, **body))["metrics"]
        assert drafts["speculative_decoding"]["num_accepted_draft_tokens"] == 4
        *others, last = await server.stream(PATH, **body)
        assert last["metrics"] == drafts
        assert not any("metrics" in chunk for chunk in others)
        *others, last = await server.stream(PATH, **body, stream_options={"include_usage": True})
        assert (last["metrics"], last["choices"]) == (drafts, [])
        assert not any("metrics" in chunk for chunk in others)
        for several in ({"prompt": [[5, 6], [7]]}, {"n": 2, "temperature": 1}):
            assert (await server.answer(PATH, **body | several))["metrics"] is None
            assert not any("metrics" in chunk for chunk in await server.stream(PATH, **body | several))

    speculation = {"spec_method": "ngram", "spec_tokens": 2, "per_request_spec_decode_metrics": "summary"}
    check(test, engine_flags=speculation)


def test_a_bad_field_is_named() -> None:
    async def test(server: Server) -> None:
        for body, param in BAD:
            error = await server.refusal(PATH, **body)
            assert error["param"] == param, body
            assert error["type"] == "BadRequestError"
            assert error["message"]

    check(test)


def test_fields_nobody_knows_are_ignored() -> None:
    async def test(server: Server) -> None:
        await server.answer(PATH, prompt="x", max_tokens=1, nonsense=1, response_format={"type": "text"})

    check(test)


def test_another_model_is_not_found() -> None:
    async def test(server: Server) -> None:
        error = await server.refusal(PATH, 404, prompt="x", model="nope")
        assert error["param"] == "model"
        assert "demo" in error["message"]

    check(test)

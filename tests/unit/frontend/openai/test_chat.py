"""/v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from typing import Any

from quire.testing.metrics_audit import read_exposition

from .serving import Server, check

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def test_an_answer_has_every_field_in_vllms_order() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer(PATH, messages=HI, max_tokens=3, model="demo")
        assert list(answer) == [
            "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
            "prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics",
        ]  # fmt: skip
        assert answer["object"] == "chat.completion"
        (choice,) = answer["choices"]
        assert list(choice) == [
            "index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts",
        ]  # fmt: skip
        assert list(choice["message"]) == [
            "role", "content", "refusal", "annotations", "audio", "function_call", "reasoning",
        ]  # fmt: skip
        assert choice["message"]["role"] == "assistant"
        assert list(answer["usage"]) == [
            "prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details",
        ]  # fmt: skip

    check(test)


def test_the_counts_of_a_stream_begin_at_0() -> None:
    """Clients that take differences between chunks count each token once."""

    async def test(server: Server) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await server.stream(PATH, messages=HI, max_tokens=5, stream_options=options, return_token_ids=True)
        first, *rest, last = chunks
        assert first["choices"][0]["delta"]["role"] == "assistant"
        assert first["usage"]["completion_tokens"] == 0
        assert first["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
        seen = 0
        for chunk in rest:
            seen += len(chunk["choices"][0]["token_ids"])
            assert chunk["usage"]["completion_tokens"] == seen
        assert last["usage"]["completion_tokens"] == seen == 5

    check(test)


def test_a_stream_says_what_the_whole_answer_says() -> None:
    async def test(server: Server) -> None:
        body: dict[str, Any] = {"messages": HI, "max_completion_tokens": 12, "n": 2, "seed": 3, "temperature": 1}
        body |= {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        whole = await server.answer(PATH, **body)
        *chunks, last = await server.stream(PATH, **body, stream_options={"include_usage": True})
        assert last["usage"] == {key: whole["usage"][key] for key in last["usage"]}
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        for index in range(2):
            first, *choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            expected = whole["choices"][index]
            assert first["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["delta"]["content"] for c in choices) == expected["message"]["content"]
            assert [t for c in choices for t in c["token_ids"]] == expected["token_ids"]
            streamed = [entry for c in choices for entry in c["logprobs"]["content"]]
            assert streamed == expected["logprobs"]["content"]
            assert choices[-1]["finish_reason"] == expected["finish_reason"]
            assert "stop_reason" in choices[-1]
        for entry in whole["choices"][0]["logprobs"]["content"]:
            assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
            assert len(entry["top_logprobs"]) == 2

    check(test)


def test_content_in_parts_is_the_same_conversation() -> None:
    async def test(server: Server) -> None:
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        a = await server.answer(PATH, messages=HI, max_tokens=2, return_token_ids=True)
        b = await server.answer(PATH, messages=parts, max_tokens=2, return_token_ids=True)
        assert a["prompt_token_ids"] == b["prompt_token_ids"]
        tokens = await server.answer("/tokenize", messages=HI)
        assert tokens["tokens"] == a["prompt_token_ids"]

    check(test)


def test_the_last_message_may_be_continued() -> None:
    async def test(server: Server) -> None:
        messages = [*HI, {"role": "assistant", "content": "Paging is"}]
        body = {"messages": messages, "max_tokens": 2, "continue_final_message": True, "add_generation_prompt": False}
        plain = await server.answer(PATH, **body, return_prompt_text=True)
        assert plain["prompt_text"].endswith("Paging is")
        echoed = await server.answer(PATH, **body, echo=True)
        content = echoed["choices"][0]["message"]["content"]
        assert content == "Paging is" + plain["choices"][0]["message"]["content"]
        chunks = await server.stream(PATH, **body, echo=True)
        assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == content

    check(test)


def test_a_template_of_ones_own_needs_trust() -> None:
    own = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}"

    async def refused(server: Server) -> None:
        error = await server.refusal(PATH, messages=HI, chat_template=own)
        assert error["param"] == "chat_template"

    async def taken(server: Server) -> None:
        answer = await server.answer(
            PATH,
            messages=HI,
            max_tokens=1,
            chat_template=own,
            chat_template_kwargs={"mark": "!"},
            return_prompt_text=True,
        )
        assert answer["prompt_text"] == "Hi!"

    check(refused)
    check(taken, trust_request_chat_template=True)


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [3]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    ({"messages": HI, "max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"messages": HI, "max_tokens": 5000, "max_completion_tokens": None}, "max_tokens"),
    ({"messages": HI, "max_tokens": 5000}, "max_tokens"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    ({"messages": HI, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"messages": HI, "reasoning_effort": "huge"}, "reasoning_effort"),
    ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
    ({"messages": HI, "stream_options": {}}, "stream_options"),
    ({"messages": HI, "prediction": {"type": "text", "content": "Hi"}}, "prediction.type"),
    ({"messages": HI, "prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"messages": HI, "prediction": {"type": "content"}}, "prediction.content"),
    ({"messages": HI, "vllm_xargs": {"num_speculative_tokens": -1}}, "vllm_xargs.num_speculative_tokens"),
    ({"messages": HI, "vllm_xargs": {"num_speculative_tokens": "many"}}, "vllm_xargs.num_speculative_tokens"),
]


def test_a_prediction_changes_no_token() -> None:
    async def test(server: Server) -> None:
        plain = await server.answer(PATH, messages=HI, max_tokens=4, seed=1, temperature=1, n=2, logprobs=True)
        for content in ("Hi there", [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]):
            body = {
                "prediction": {"type": "content", "content": content},
                "seed": 1,
                "temperature": 1,
                "n": 2,
                "logprobs": True,
            }
            assert (await server.answer(PATH, messages=HI, max_tokens=4, **body))["choices"] == plain["choices"]

    check(test)


SPECULATION = {"spec_method": "ngram", "spec_tokens": 3, "per_request_spec_decode_metrics": "detailed"}
"""With an engine that drafts what its model will write."""


def test_an_answer_shows_its_drafts() -> None:
    async def test(server: Server) -> None:
        body = {"messages": HI, "max_tokens": 9}
        whole = await server.answer(PATH, **body)
        drafts = whole["metrics"]["speculative_decoding"]
        assert list(drafts) == [
            "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
            "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens", "per_step_accepted", "per_step_drafted",
        ]  # fmt: skip
        assert drafts["num_accepted_draft_tokens"] == drafts["num_draft_tokens"] == 6
        assert (drafts["per_step_accepted"], drafts["acceptance_histogram"]) == ([3, 3], [0, 0, 0, 2])
        assert whole["usage"]["completion_tokens_details"] is None
        *others, last = await server.stream(PATH, **body)
        assert last["metrics"] == {"speculative_decoding": drafts}
        assert last["choices"][0]["finish_reason"] == "length"
        assert not any("metrics" in chunk for chunk in others)
        *others, last = await server.stream(PATH, **body, stream_options={"include_usage": True})
        assert (last["metrics"], last["choices"]) == ({"speculative_decoding": drafts}, [])
        assert not any("metrics" in chunk for chunk in others)
        several = {**body, "n": 2, "temperature": 1}
        assert (await server.answer(PATH, **several))["metrics"] is None
        assert not any("metrics" in chunk for chunk in await server.stream(PATH, **several))
        few = await server.answer(PATH, **body, vllm_xargs={"num_speculative_tokens": 1, "other": [1]})
        assert set(few["metrics"]["speculative_decoding"]["per_step_drafted"]) == {1}

    check(test, engine_flags=SPECULATION)


def test_the_cap_of_drafts_is_taken_by_every_route() -> None:
    async def test(server: Server) -> None:
        cap = {"vllm_xargs": {"num_speculative_tokens": 0}}
        one: dict[str, Any] = {"model": "demo", "messages": HI, "max_tokens": 9}
        for path, body in (
            (PATH, one),
            ("/v1/messages", one),
            ("/v1/responses", {"input": "Hi", "max_output_tokens": 9}),
        ):
            await server.answer(path, **body, **cap)
            assert read_exposition((await server.get("/metrics")).text).value("vllm:spec_decode_num_drafts") == 0, path
        await server.answer(PATH, **one)
        assert read_exposition((await server.get("/metrics")).text).value("vllm:spec_decode_num_drafts") == 2

    check(test, engine_flags=SPECULATION)


def test_a_batch_shows_the_drafts_of_each_conversation() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer(f"{PATH}/batch", messages=[HI, HI], max_tokens=5)
        assert answer["metrics"] is None
        for choice in answer["choices"]:
            assert choice["metrics"]["speculative_decoding"]["num_draft_tokens"] == 3

    check(test, engine_flags=SPECULATION)


def test_usage_has_the_tokens_of_a_prediction() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}

    async def test(server: Server) -> None:
        body: dict[str, Any] = {"messages": HI, "max_tokens": 20, "temperature": 0}
        found = await server.answer(PATH, **body)
        assert found["usage"]["completion_tokens_details"] is None
        text = found["choices"][0]["message"]["content"]
        right = {**body, "prediction": {"type": "content", "content": text}}
        usage = (await server.answer(PATH, **right))["usage"]
        details = usage["completion_tokens_details"]
        assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
        assert usage["completion_tokens"] / 2 < details["accepted_prediction_tokens"] < usage["completion_tokens"]
        assert usage["completion_tokens"] == found["usage"]["completion_tokens"], "rejected tokens are none of it"
        options = {"include_usage": True, "continuous_usage_stats": True}
        first, *_, last = await server.stream(PATH, **right, stream_options=options)
        assert last["usage"]["completion_tokens_details"].keys() == details.keys()
        assert "completion_tokens_details" not in first["usage"], "it is not known before the end"
        wrong = {**body, "prediction": {"type": "content", "content": "no " + text.replace(" ", " no ")}}
        details = (await server.answer(PATH, **wrong))["usage"]["completion_tokens_details"]
        assert details["rejected_prediction_tokens"] > 0

    check(test, executor=None, engine_flags={"speculative_config": drafts})


def test_without_speculation_a_prediction_has_no_effect() -> None:
    async def test(server: Server) -> None:
        body = {"messages": HI, "max_tokens": 4, "prediction": {"type": "content", "content": "Hi"}}
        answer = await server.answer(PATH, **body)
        details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        assert (answer["usage"]["completion_tokens_details"], answer["metrics"]) == (details, None)

    check(test)


def test_a_bad_field_is_named() -> None:
    async def test(server: Server) -> None:
        for body, param in BAD:
            error = await server.refusal(PATH, **body)
            assert error["param"] == param, body
            assert error["type"] == "BadRequestError"
            assert error["message"]

    check(test)

"""Prompts as embeddings over HTTP: their own rows of the table yield the answer to the text."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from safetensors.torch import load_file, save

from quire.config.model import ASSETS_DIR

from .serving import Server, check

QUESTION = "What is a block table?"
GREEDY = {"temperature": 0, "max_tokens": 12}
FLAGS: dict[str, Any] = {"executor": None, "engine_flags": {"enable_prompt_embeds": True}}


def rows_of(server: Server, text: str, *, special: bool = True) -> str:
    assert server.engine.tokenizer is not None
    table = load_file(ASSETS_DIR / "demo" / "model.safetensors")["model.embed_tokens.weight"]
    return b64encode(save({"rows": table[server.engine.tokenizer.encode(text, special)]})).decode()


def test_completions_and_chats_take_embeddings() -> None:
    async def test(server: Server) -> None:
        path, rows = "/v1/completions", rows_of(server, QUESTION)
        expected = await server.answer(path, prompt=QUESTION, **GREEDY)
        found = await server.answer(path, prompt_embeds=rows, **GREEDY, return_token_ids=True)
        assert found["choices"][0]["text"] == expected["choices"][0]["text"]
        assert found["usage"] == expected["usage"]
        assert set(found["choices"][0]["prompt_token_ids"]) == {0}
        both = await server.answer(path, prompt_embeds=[rows, rows], prompt="Hello", **GREEDY)
        assert [c["text"] for c in both["choices"][:2]] == [expected["choices"][0]["text"]] * 2
        assert [c["index"] for c in both["choices"]] == [0, 1, 2]
        chunks = await server.stream(path, prompt_embeds=rows, **GREEDY)
        assert "".join(c["choices"][0]["text"] for c in chunks) == expected["choices"][0]["text"]

        path, rows = "/v1/chat/completions", rows_of(server, QUESTION, special=False)
        text, part = {"type": "text", "text": "Answer this:"}, {"type": "prompt_embeds", "data": rows}
        as_text = [{"role": "user", "content": [text, {"type": "text", "text": QUESTION}]}]
        expected = await server.answer(path, messages=as_text, **GREEDY)
        found = await server.answer(path, messages=[{"role": "user", "content": [text, part]}], **GREEDY)
        assert found["choices"] == expected["choices"]
        assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]

    check(test, **FLAGS)


def test_what_is_refused_names_its_field() -> None:
    async def test(server: Server) -> None:
        path, rows = "/v1/completions", rows_of(server, QUESTION)
        for field, words, body in [
            ("prompt_embeds", "is no base64", {"prompt_embeds": "%"}),
            ("prompt_embeds", "never opened", {"prompt_embeds": b64encode(b"PK\x03\x04").decode()}),
            ("prompt_embeds", "at most", {"prompt_embeds": "A" * (1 << 20)}),
            ("echo", "repeats a text", {"prompt_embeds": rows, "echo": True}),
            ("prompt_logprobs", "score tokens", {"prompt_embeds": rows, "prompt_logprobs": 1}),
            ("prompt_embeds", "--max-prompts-per-request", {"prompt_embeds": [rows] * 3}),
            ("prompt", "missing or empty", {"prompt_embeds": []}),
        ]:
            error = await server.refusal(path, **body)
            assert (error["param"], words in error["message"]) == (field, True), error
        message = {"role": "user", "content": [{"type": "prompt_embeds", "data": rows}]}
        error = await server.refusal(
            "/v1/chat/completions",
            messages=[message],
            chat_template="{% for m in messages %}no content{% endfor %}",
        )
        assert "the chat template shows 0 of 1 parts" in error["message"]

    check(test, max_prompts_per_request=2, trust_request_chat_template=True, **FLAGS)


def test_without_the_flag_its_name_is_in_the_answer() -> None:
    async def test(server: Server) -> None:
        error = await server.refusal("/v1/completions", prompt_embeds=rows_of(server, QUESTION))
        assert "start it with --enable-prompt-embeds" in error["message"]

    check(test)

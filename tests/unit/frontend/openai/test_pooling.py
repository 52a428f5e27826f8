"""The routes of pooling models, over tiny encoders: embeddings, classes, scores, and the order of documents."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from quire.config.engine_args import EngineArgs
from quire.config.server import ServerConfig
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.openai.routes.pooling import PROMPT_NAMES, encode_vectors, prefix_of
from quire.testing.tiny_models import make_tiny_checkpoint

from .serving import Server

Test = Callable[[Server], Awaitable[None]]
Serve = Callable[..., None]
TEXTS = ["The engine keeps the keys", "the same words", "x"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    make = partial(make_tiny_checkpoint, family="bert")
    root = tmp_path_factory.mktemp("pooling")
    return {
        "embed": make(root / "embed", is_matryoshka=True),
        "classify": make(root / "classify", head="classify", num_labels=3),
        "score": make(root / "score", head="classify", num_labels=1),
    }


@pytest.fixture
def serve(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run a test against a server of one of them; afterwards nothing is left of any request."""
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")

    def run(model: str, test: Test, **flags: Any) -> None:
        async def with_server() -> None:
            args = EngineArgs(str(checkpoints[model]), served_model_name="tiny", device="cpu", dtype="float32")
            async with AsyncLLM.from_engine_args(args) as engine:
                server = Server(engine, ServerConfig(**flags), ())
                async with server.client:
                    await test(server)
                assert not engine.pipeline.output_processor.request_states
                assert (engine.admission.num_reqs, engine.admission.num_tokens) == (0, 0)

        asyncio.run(asyncio.wait_for(with_server(), 180))

    return run


def test_embeddings_in_every_form(serve: Serve) -> None:
    async def test(server: Server) -> None:
        answer = await server.answer("/v1/embeddings", model="tiny", input=TEXTS)
        assert list(answer) == ["id", "object", "created", "model", "data", "usage"]
        assert (answer["object"], answer["model"]) == ("list", "tiny")
        assert [(d["index"], d["object"]) for d in answer["data"]] == [(i, "embedding") for i in range(3)]
        vectors = np.array([d["embedding"] for d in answer["data"]])
        assert vectors.shape == (3, 48)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
        tokenizer = await server.engine.get_tokenizer()
        ids = [tokenizer.encode(text) for text in TEXTS]
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, ids))

        coded = await server.answer("/v1/embeddings", input=TEXTS, encoding_format="base64")
        for d, vector in zip(coded["data"], vectors, strict=True):
            np.testing.assert_array_equal(np.frombuffer(base64.b64decode(d["embedding"]), "<f4"), vector.astype("<f4"))
        for given in (ids, TEXTS[:1], ids[0], TEXTS[0]):
            same = await server.answer("/v1/embeddings", input=given)
            np.testing.assert_allclose(same["data"][0]["embedding"], vectors[0], atol=1e-6)
        raw = await server.answer("/v1/embeddings", input=TEXTS[0], dimensions=8, normalize=False)
        cut = await server.answer("/v1/embeddings", input=TEXTS[0], dimensions=8)
        short = np.array(raw["data"][0]["embedding"])
        assert short.shape == (8,)
        np.testing.assert_allclose(cut["data"][0]["embedding"], short / np.linalg.norm(short), atol=1e-6)

    serve("embed", test)


def test_ollamas_routes_give_the_same_embeddings(serve: Serve) -> None:
    async def test(server: Server) -> None:
        same = (await server.answer("/v1/embeddings", input=TEXTS))["data"]
        answer = await server.answer("/api/embed", model="tiny", input=TEXTS)
        np.testing.assert_allclose(answer["embeddings"], [d["embedding"] for d in same], atol=1e-6)
        assert (answer["model"], answer["prompt_eval_count"] > 3) == ("tiny", True)
        (one,) = (await server.answer("/api/embed", model="tiny", input=TEXTS[0], dimensions=8))["embeddings"]
        assert len(one) == 8
        older = await server.answer("/api/embeddings", model="tiny", prompt=TEXTS[0])
        np.testing.assert_allclose(older["embedding"], same[0]["embedding"], atol=1e-6)
        assert (await server.answer("/api/embed", model="tiny", input=[]))["embeddings"] == []

    serve("embed", test)


def test_openais_client_reads_them(serve: Serve) -> None:
    """The client asks for base64 by default."""

    async def test(server: Server) -> None:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="-", http_client=server.client)
        by_default = await client.embeddings.create(model="tiny", input=TEXTS)
        as_floats = await client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        for one, other in zip(by_default.data, as_floats.data, strict=True):
            np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-6)
        assert by_default.usage == as_floats.usage

    serve("embed", test)


def test_refusals_name_the_field(serve: Serve) -> None:
    async def test(server: Server) -> None:
        long = list(range(6, 300)) * 2
        for body, param, words in (
            ({}, "input", "is missing"),
            ({"input": []}, "input", "is missing or empty"),
            ({"input": ""}, None, None),
            ({"input": ["a", [1]]}, "input", "mixes"),
            ({"input": [999]}, "input", "outside the vocabulary"),
            ({"input": long}, "input", "takes 320"),
            ({"input": "a", "dimensions": 49}, "dimensions", "at most 48"),
            ({"input": "a", "dimensions": 0}, "dimensions", "0"),
            ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
            ({"input": "a", "embed_dtype": "fp8"}, "embed_dtype", "not supported"),
            ({"input": "a", "endianness": "big"}, "endianness", "not supported"),
            ({"input": ["a"] * 9}, "input", "--max-prompts-per-request"),
        ):
            if param is None:  # an empty text still has its special tokens
                await server.answer("/v1/embeddings", **body)
                continue
            error = await server.refusal("/v1/embeddings", **body)
            assert error["param"] == param, error
            assert words in error["message"], error
        cut = await server.answer("/v1/embeddings", input=long, truncate_prompt_tokens=-1)
        assert cut["usage"]["prompt_tokens"] == 320
        assert (await server.refusal("/v1/embeddings", 404, model="other", input="a"))["param"] == "model"

    serve("embed", test, max_prompts_per_request=8)


def test_other_routes_are_not_for_this_model(serve: Serve) -> None:
    async def test(server: Server) -> None:
        await server.refusal("/v1/completions", 404, prompt="a")
        await server.refusal("/v1/chat/completions", 404, messages=[{"role": "user", "content": "a"}])
        await server.refusal("/classify", 404, input="a")
        error = await server.refusal("/pooling", 404, input="a", task="classify")
        assert error["param"] == "task"

    serve("embed", test)


def test_pooling_of_every_token(serve: Serve) -> None:
    async def test(server: Server) -> None:
        (one,) = (await server.answer("/pooling", input=TEXTS[0]))["data"]
        assert (one["object"], np.array(one["data"]).shape) == ("pooling", (48,))
        (each,) = (await server.answer("/pooling", input=[6, 7, 8], task="token_embed"))["data"]
        assert np.array(each["data"]).shape == (3, 48)

    serve("embed", test)


def test_a_classification_names_its_classes(serve: Serve) -> None:
    async def test(server: Server) -> None:
        answer = await server.answer("/classify", input=TEXTS)
        assert answer["id"].startswith("classify-")
        for i, found in enumerate(answer["data"]):
            assert list(found) == ["index", "label", "probs", "num_classes"]
            assert (found["index"], found["num_classes"]) == (i, 3)
            assert abs(sum(found["probs"]) - 1) < 1e-5
            assert found["label"] == f"LABEL_{int(np.argmax(found['probs']))}"
        raw = await server.answer("/classify", input=TEXTS[:1], use_activation=False)
        weights = np.exp(raw["data"][0]["probs"])
        np.testing.assert_allclose(weights / weights.sum(), answer["data"][0]["probs"], atol=1e-5)
        await server.refusal("/score", 404, text_1="a", text_2="b")
        await server.refusal("/v1/embeddings", 404, input="a")

    serve("classify", test)


@pytest.mark.parametrize("model", ["score", "embed"])
def test_scores_and_the_order_of_documents(serve: Serve, model: str) -> None:
    async def test(server: Server) -> None:
        one_to_many = await server.answer("/score", text_1=TEXTS[0], text_2=TEXTS)
        assert [(d["index"], d["object"]) for d in one_to_many["data"]] == [(i, "score") for i in range(3)]
        scores = [d["score"] for d in one_to_many["data"]]
        pairs = await server.answer("/v1/score", data_1=TEXTS[:1] * 3, data_2=TEXTS)
        np.testing.assert_allclose([d["score"] for d in pairs["data"]], scores, atol=1e-6)
        order = sorted(range(3), key=lambda i: -scores[i])
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            answer = await server.answer(path, query=TEXTS[0], documents=[{"text": TEXTS[0]}, *TEXTS[1:]], top_n=2)
            assert [r["index"] for r in answer["results"]] == order[:2]
            for result in answer["results"]:
                assert result["document"] == {"text": TEXTS[result["index"]]}
                assert abs(result["relevance_score"] - scores[result["index"]]) < 1e-6
            assert answer["usage"]["total_tokens"] == one_to_many["usage"]["total_tokens"]
        if model == "embed":
            assert abs(scores[0] - 1) < 1e-5
        for body, param in (
            ({"text_1": "a"}, "text_2"),
            ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
            ({"text_1": "a", "text_2": []}, "text_2"),
        ):
            assert (await server.refusal("/score", **body))["param"] == param
        assert (await server.refusal("/rerank", query="a", documents=[]))["param"] == "documents"
        too_long = "word " * 400
        assert (await server.refusal("/score", text_1="a", text_2=too_long))["param"] == "text_2"
        await server.answer("/score", text_1="a", text_2=too_long, truncate_prompt_tokens=-1)

    serve(model, test)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


@pytest.mark.parametrize(
    ("model", "path", "key"),
    [("embed", "/v1/embeddings", "embedding"), ("embed", "/pooling", "data"), ("classify", "/classify", "probs")],
)
def test_a_conversation_is_one_prompt(serve: Serve, model: str, path: str, key: str) -> None:
    """The template's text, without special tokens but its own."""

    async def test(server: Server) -> None:
        tokenizer = await server.engine.get_tokenizer()
        for options in ({}, {"add_generation_prompt": True}):
            asked = {"add_generation_prompt": False, **options}
            text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, **asked)
            ids = tokenizer.encode(text, add_special_tokens=False)
            (found,) = (answer := await server.answer(path, messages=MESSAGES, **options))["data"]
            (expected,) = (await server.answer(path, input=ids))["data"]
            np.testing.assert_allclose(found[key], expected[key], atol=1e-6)
            assert answer["usage"]["prompt_tokens"] == len(ids)
        more = await server.answer(path, messages=MESSAGES, add_generation_prompt=True, add_special_tokens=True)
        assert more["usage"]["prompt_tokens"] == len(tokenizer.encode(text)) > len(ids)
        for body, param, words in (
            ({}, "input", "give it (texts or token ids), or messages"),
            ({"input": "a", "messages": MESSAGES}, "messages", "not both"),
            ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages", "takes 320"),
            ({"messages": MESSAGES, "chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
            (
                {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}},
                "chat_template_kwargs",
                "may not set tools",
            ),
            ({"messages": MESSAGES, "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "not supported"),
        ):
            error = await server.refusal(path, **body)
            assert error["param"] == param, error
            assert words in error["message"], error

    serve(model, test)


@pytest.mark.parametrize("model", ["score", "embed"])
def test_texts_of_pairs_as_objects(serve: Serve, model: str) -> None:
    def parts(text: str) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": text}]}

    async def test(server: Server) -> None:
        plain = await server.answer("/score", text_1=TEXTS[0], text_2=TEXTS)
        same = await server.answer("/score", data_1=parts(TEXTS[0]), data_2=[parts(TEXTS[0]), *TEXTS[1:]])
        assert [d["score"] for d in same["data"]] == [d["score"] for d in plain["data"]]
        order = await server.answer("/rerank", query=parts(TEXTS[0]), documents=[parts(TEXTS[1]), {"text": TEXTS[2]}])
        assert {r["document"]["text"] for r in order["results"]} == set(TEXTS[1:])
        for path, body, param in (
            ("/score", {"text_1": {}, "text_2": "a"}, "text_1"),
            ("/score", {"text_1": "a", "text_2": [{"text": "a", "content": []}]}, "text_2"),
            ("/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents"),
            ("/score", {"text_1": "a", "text_2": {"content": [{"type": "image_url", "image_url": {}}]}}, "text_2"),
        ):
            assert (await server.refusal(path, **body))["param"].partition(".")[0] == param

    serve(model, test)


def test_cohere_s_form_of_embeddings(serve: Serve) -> None:
    async def test(server: Server) -> None:
        plain = await server.answer("/v1/embeddings", input=TEXTS)
        vectors = np.array([d["embedding"] for d in plain["data"]])
        kinds = ["float", "base64", "binary", "ubinary"]
        asked = {"model": "tiny", "input_type": "search_document", "embedding_types": kinds}
        answer = await server.answer("/v2/embed", texts=TEXTS, **asked)
        assert list(answer) == ["id", "response_type", "embeddings", "texts", "meta"]
        assert answer["texts"] == TEXTS
        assert answer["meta"]["billed_units"] == {"input_tokens": plain["usage"]["prompt_tokens"]}
        found = answer["embeddings"]
        assert list(found) == kinds
        np.testing.assert_allclose(found["float"], vectors, atol=1e-6)
        for coded, vector in zip(found["base64"], found["float"], strict=True):
            np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), vector, atol=1e-6)
        signs = np.unpackbits(np.array(found["ubinary"], dtype=np.uint8), axis=1)
        np.testing.assert_array_equal(signs, vectors > 0)
        np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])
        inputs = [{"content": [{"type": "text", "text": "The engine"}, {"type": "text", "text": "keeps"}]}]
        joined = await server.answer("/v2/embed", inputs=inputs)
        again = await server.answer("/v2/embed", texts=["The engine\nkeeps"], output_dimension=8)
        assert list(joined["embeddings"]) == ["float"]
        assert joined["texts"] is None
        cut = np.array(joined["embeddings"]["float"][0][:8])
        np.testing.assert_allclose(again["embeddings"]["float"][0], cut / np.linalg.norm(cut), atol=1e-6)

    serve("embed", test)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 48, 385])
def test_bits_of_embeddings(size: int) -> None:
    """Against the definition: bit by bit, the first number in the highest bit, zeros behind the last."""
    rng = np.random.default_rng(size)
    vectors = [rng.standard_normal(size).astype(np.float32), np.zeros(size, np.float32), -np.zeros(size, np.float32)]
    vectors.append(np.full(size, np.finfo(np.float32).smallest_subnormal))
    expected = []
    for vector in vectors:
        bits = "".join("1" if number > 0 else "0" for number in vector.tolist()).ljust(-(-size // 8) * 8, "0")
        expected.append([int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)])
    assert encode_vectors(vectors, "ubinary") == expected
    assert encode_vectors(vectors, "binary") == [[byte - 128 for byte in row] for row in expected]
    assert all(-128 <= byte <= 127 for row in encode_vectors(vectors, "binary") for byte in row)


@pytest.mark.parametrize("model", ["embed", "classify", "score"])
def test_the_documents_examples_are_answered(serve: Serve, model: str) -> None:
    async def test(server: Server) -> None:
        found = [e for e in server.app.state.endpoints if e.body is not None and e.task != "generate"]
        answered = [(await server.post(e.path, e.body.kind.EXAMPLE)).status_code for e in found if e.task is not None]
        assert set(answered) <= {200, 404}, "404: not for this model"
        assert answered.count(200) >= {"embed": 3, "classify": 2, "score": 5}[model]

    serve(model, test)


def test_cohere_s_truncation_and_refusals(serve: Serve) -> None:
    async def test(server: Server) -> None:
        long = " ".join(f"w{i}" for i in range(400))

        async def embed(**body: Any) -> Any:
            answer = await server.answer("/v2/embed", **body)
            return answer["embeddings"]["float"][0], answer["meta"]["billed_units"]["input_tokens"]

        async def reference(text: str, **options: Any) -> Any:
            return (await server.answer("/v1/embeddings", input=text, **options))["data"][0]["embedding"]

        for body, side, keep in (
            ({}, "right", -1),
            ({"truncate": "START"}, "left", -1),
            ({"max_tokens": 9}, "right", 9),
            ({"max_tokens": 9, "truncate": "START"}, "left", 9),
            ({"max_tokens": 10**9}, "right", -1),
        ):
            vector, num_tokens = await embed(texts=[long], **body)
            assert num_tokens == (320 if keep == -1 else keep)
            expected = await reference(long, truncate_prompt_tokens=keep, truncation_side=side)
            np.testing.assert_allclose(vector, expected, atol=1e-6)
        for body, param, words in (
            ({}, "texts", "either texts or inputs"),
            ({"texts": ["a"], "inputs": []}, "texts", "either texts or inputs"),
            ({"texts": []}, "texts", "is empty"),
            ({"texts": ["a"] * 9}, "texts", "--max-prompts-per-request"),
            ({"texts": [long], "truncate": "NONE"}, "texts", "takes 320"),
            ({"texts": ["a"], "truncate": "NONE", "max_tokens": 3}, "max_tokens", "forbids"),
            ({"texts": ["a"], "input_type": "poem"}, "input_type", "one of search_query, search_document"),
            ({"texts": ["a"], "embedding_types": ["float", "int8"]}, "embedding_types", "ask for float, base64"),
            ({"texts": ["a"], "embedding_types": ["uint8"]}, "embedding_types", "holds uint8"),
            ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types", "int4"),
            ({"texts": ["a"], "images": ["data:"]}, "images", "not supported"),
            ({"texts": ["a"], "output_dimension": 49}, "output_dimension", "at most 48"),
        ):
            error = await server.refusal("/v2/embed", **body)
            assert error["param"] == param, error
            assert words in error["message"], error

    serve("embed", test, max_prompts_per_request=8)


@pytest.mark.parametrize(
    ("input_type", "prefix"),
    [
        (None, ""),
        ("query", "Question: "),
        ("search_query", "Question: "),
        ("search_document", "Text: "),
        ("classification", ""),
        ("clustering", "Group: "),
    ],
)
def test_what_a_text_is_for_chooses_what_stands_before_it(input_type: str | None, prefix: str) -> None:
    prompts = {"query": "Question: ", "passage": "Text: ", "clustering": "Group: "}
    assert prefix_of(input_type, prompts) == prefix
    if input_type in PROMPT_NAMES:
        assert prefix_of(input_type, {}) == ""


def test_prefixes_of_a_model_are_used(serve: Serve, checkpoints: dict[str, Path]) -> None:
    file = checkpoints["embed"] / "config_sentence_transformers.json"
    file.write_text('{"prompts": {"query": "Question: ", "document": ""}}')

    async def test(server: Server) -> None:
        asked = await server.answer("/v2/embed", texts=["why"], input_type="search_query")
        plain = await server.answer("/v1/embeddings", input="Question: why")
        np.testing.assert_allclose(asked["embeddings"]["float"][0], plain["data"][0]["embedding"], atol=1e-6)
        assert asked["texts"] == ["why"]
        assert "query, document" in (await server.refusal("/v2/embed", texts=["a"], input_type="x"))["message"]

    try:
        serve("embed", test)
    finally:
        file.unlink()

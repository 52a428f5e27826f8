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
                server.state.renderer.close()

        asyncio.run(asyncio.wait_for(with_server(), 60))

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


def test_openais_client_reads_them(serve: Serve) -> None:
    """It asks for base64 unless told otherwise."""

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


def test_classes(serve: Serve) -> None:
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

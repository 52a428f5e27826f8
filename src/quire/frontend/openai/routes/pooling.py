"""Routes of pooling models: /v1/embeddings, /pooling, /classify, /v2/embed (Cohere's API); pairs at /score and /rerank.

Texts come one by one, as a conversation, or in pairs. Paths are all those that clients use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from quire.errors import NotFoundError, ValidationError
from quire.frontend.admission import estimate_text_tokens
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.input_processor import parse_prompt
from quire.frontend.openai.pooling_work import (
    answer_head,
    count_tokens,
    embedding_data,
    encode_array,
    naming,
    pool_input,
    pool_texts,
    pooled_outputs,
    rank,
    score_data,
)
from quire.frontend.openai.protocol.pooling import (
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from quire.frontend.openai.rendering import cache_salt
from quire.frontend.openai.submission import admit
from quire.frontend.scoring import PairScorer, pair_texts
from quire.outputs import ScoringRequestOutput
from quire.pooling_params import POOLING_TASKS

EMBEDDING = BodyReader(EmbeddingBody)
POOL = BodyReader(PoolBody)
CLASSIFY = BodyReader(ClassifyBody)


async def create_embeddings(exchange: Exchange) -> Response:
    """Embeds one or more texts."""
    body = await exchange.read(EMBEDDING)
    return await _answer(exchange, body, "embed", "embd", "embedding")


async def pool(exchange: Exchange) -> Response:
    """Pools one or more texts for any task of the model, also per token."""
    body = await exchange.read(POOL)
    tasks = exchange.state.supported_tasks
    if body.task is not None and body.task not in tasks:
        raise NotFoundError(
            f"the task {body.task!r} is not for this model, which supports {', '.join(tasks)}", param="task"
        )
    return await _answer(exchange, body, body.task or tasks[0], "pool", "pooling")


async def _answer(exchange: Exchange, body: EmbeddingBody, task: str, prefix: str, kind: str) -> Response:
    model = await exchange.find_model(body.model)
    outputs = await pool_input(exchange, body, body.params(task))
    usage = count_tokens(outputs)
    head, data = answer_head(exchange, body, prefix, model), embedding_data(body, outputs, kind)
    return json_response({**head, **data, "usage": usage})


async def classify(exchange: Exchange) -> Response:
    """Returns the probability of each class for one or more texts."""
    body = await exchange.read(CLASSIFY)
    state = exchange.state
    model = await exchange.find_model(body.model)
    outputs = await pool_input(exchange, body, body.params("classify"))
    pooling = state.engine.model_config.pooling
    labels = pooling.labels if pooling is not None else ()
    data: list[dict[str, Any]] = []
    for index, output in enumerate(outputs):
        probs = output.outputs.data
        label = labels[int(probs.argmax())] if len(labels) == len(probs) else None  # an adapter may have others
        data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    usage = count_tokens(outputs)
    return json_response({**answer_head(exchange, body, "classify", model), "data": data, "usage": usage})


EMBED = BodyReader(CohereEmbedBody)
PROMPT_NAMES: Mapping[str, tuple[str, ...]] = {
    "search_query": ("query",),
    "search_document": ("document", "passage"),
    "classification": (),
    "clustering": (),
}
"""Cohere's names for the purpose of a text, and models' names for the same."""


async def embed(exchange: Exchange) -> Response:
    """Embeds texts, in Cohere's form."""
    body = await exchange.read(EMBED)
    state = exchange.state
    await exchange.find_model(body.model)
    texts, name = body.given_texts(), "texts" if body.inputs is None else "inputs"
    kinds = body.kinds()
    limit = state.config.max_prompts_per_request
    if len(texts) > limit:
        raise ValidationError(
            f"{name} holds {len(texts)} texts; a request may have {limit} (--max-prompts-per-request)", param=name
        )
    pooling = state.engine.model_config.pooling
    prefix = prefix_of(body.input_type, dict(pooling.prompts) if pooling is not None else {})
    texts = [prefix + text for text in texts]
    asked = body.as_embedding(state.max_model_len)
    with naming(name), naming("output_dimension", "dimensions"):
        outputs = await pool_texts(exchange, asked, texts, asked.params("embed"))
    vectors = [output.outputs.data for output in outputs]
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    answer = {
        "id": f"embd-{exchange.request_id}",
        "response_type": "embeddings_by_type",
        "embeddings": {kind: encode_vectors(vectors, kind) for kind in kinds},
        "texts": body.texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
    }
    return json_response(answer)


def prefix_of(input_type: str | None, prompts: Mapping[str, str]) -> str:
    """Returns the prefix of a text; "" for a model without prefixes. Raises ValidationError for unknown types."""
    if input_type is None:
        return ""
    for name in (input_type, *PROMPT_NAMES.get(input_type, ())):
        if name in prompts:
            return prompts[name]
    if input_type in PROMPT_NAMES:
        return ""
    known = dict.fromkeys([*PROMPT_NAMES, *prompts])
    raise ValidationError(
        f"input_type must be one of {', '.join(known)}, got {input_type[:60]!r}", param="input_type", value=input_type
    )


def encode_vectors(vectors: Sequence[npt.NDArray[np.float32]], kind: str) -> list[Any]:
    """Returns each vector in the form `kind` of embedding_types: numbers, base64, or the signs of eight in a byte."""
    if kind not in ("binary", "ubinary"):
        return [encode_array(vector, kind) for vector in vectors]
    packed = [np.packbits(vector > 0).astype(np.int16) for vector in vectors]
    return [(bits - 128 if kind == "binary" else bits).tolist() for bits in packed]


SCORE = BodyReader(ScoreBody)
RERANK = BodyReader(RerankBody)
SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
TASKS = ("score", "embed")


async def score(exchange: Exchange) -> Response:
    """Returns a score for each pair of texts."""
    body = await exchange.read(SCORE)
    model = await exchange.find_model(body.model)
    with naming("text_2"):
        outputs = await _score(exchange, body, pair_texts(*body.texts(), names=("text_1", "text_2")))
    usage = count_tokens(outputs)
    return json_response({**answer_head(exchange, body, "score", model), **score_data(outputs), "usage": usage})


async def rerank(exchange: Exchange) -> Response:
    """Orders documents by their relevance to a query, the best first."""
    body = await exchange.read(RERANK)
    model = await exchange.find_model(body.model)
    texts = body.texts()
    with naming("documents"):
        outputs = await _score(exchange, body, pair_texts(body.question(), texts, names=("query", "documents")))
    usage = count_tokens(outputs)
    head = answer_head(exchange, body, "rerank", model)
    return json_response({"id": head["id"], "model": model, "usage": usage, **rank(body, texts, outputs)})


async def _score(exchange: Exchange, body: PoolingBody, pairs: Sequence[tuple[str, str]]) -> list[ScoringRequestOutput]:
    state = exchange.state
    state.check_num_outputs(len(pairs))
    scorer = PairScorer(state.engine.pipeline.input_processor, state.engine.tokenizer, state.supported_tasks)
    if "score" in state.supported_tasks:
        params = body.params("score")
        sizes = [estimate_text_tokens(pair) for pair in pairs]
        async with admit(exchange, sizes, params) as submission:
            job = await exchange.convert(lambda: scorer.plan(pairs, params, body.tokenization()))
            salt = cache_salt(exchange, body.cache_salt)
            prompts = [replace(parse_prompt(prompt), cache_salt=salt) for prompt in job.prompts]
            request_id = body.request_id or exchange.request_id
            await submission.send(prompts, job.params, request_id, priority=body.priority)
        return job.results(await pooled_outputs(exchange, submission))
    job = await exchange.convert(lambda: scorer.plan(pairs, body.params("embed"), body.tokenization()))
    return job.results(await pool_texts(exchange, body, cast("list[str]", job.prompts), job.params[0]))


ENDPOINTS = (
    Endpoint(
        path="/v1/embeddings", handler=create_embeddings, access=Access.KEY, body=EMBEDDING, task="embed", is_work=True
    ),
    Endpoint(path="/pooling", handler=pool, access=Access.KEY, body=POOL, task=POOLING_TASKS, is_work=True),
    Endpoint(path="/classify", handler=classify, access=Access.KEY, body=CLASSIFY, task="classify", is_work=True),
    Endpoint(path="/v2/embed", handler=embed, access=Access.KEY, body=EMBED, task="embed", is_work=True),
    *(
        Endpoint(path=path, handler=score, access=Access.KEY, body=SCORE, task=TASKS, is_work=True)
        for path in SCORE_PATHS
    ),
    *(
        Endpoint(path=path, handler=rerank, access=Access.KEY, body=RERANK, task=TASKS, is_work=True)
        for path in RERANK_PATHS
    ),
)

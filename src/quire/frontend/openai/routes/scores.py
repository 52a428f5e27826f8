"""POST /score and /rerank, under every path that clients use: texts in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from starlette.responses import Response

from quire.frontend.admission import estimate_text_tokens
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.input_processor import parse_prompt
from quire.frontend.openai.pooling_work import (
    answer_head,
    count_tokens,
    naming,
    pool_texts,
    pooled_outputs,
    rank,
    score_data,
)
from quire.frontend.openai.protocol.pooling import PoolingBody, RerankBody, ScoreBody
from quire.frontend.openai.rendering import cache_salt
from quire.frontend.openai.submission import admit
from quire.frontend.scoring import PairScorer, pair_texts
from quire.outputs import ScoringRequestOutput

SCORE = BodyReader(ScoreBody)
RERANK = BodyReader(RerankBody)
SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
TASKS = ("score", "embed")


async def score(exchange: Exchange) -> Response:
    """Returns a score for each pair of texts."""
    body = await exchange.read(SCORE)
    model = exchange.state.check_model(body.model)
    with naming("text_2"):
        outputs = await _score(exchange, body, pair_texts(*body.texts(), names=("text_1", "text_2")))
    usage = count_tokens([output.prompt_token_ids for output in outputs])
    return json_response({**answer_head(exchange, body, "score", model), **score_data(outputs), "usage": usage})


async def rerank(exchange: Exchange) -> Response:
    """Orders documents by their relevance to a query, the best first."""
    body = await exchange.read(RERANK)
    model = exchange.state.check_model(body.model)
    texts = body.texts()
    with naming("documents"):
        outputs = await _score(exchange, body, pair_texts(body.question(), texts, names=("query", "documents")))
    usage = count_tokens([output.prompt_token_ids for output in outputs])
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
    *(
        Endpoint(path=path, handler=score, access=Access.KEY, body=SCORE, task=TASKS, is_work=True)
        for path in SCORE_PATHS
    ),
    *(
        Endpoint(path=path, handler=rerank, access=Access.KEY, body=RERANK, task=TASKS, is_work=True)
        for path in RERANK_PATHS
    ),
)

"""POST /score and /rerank, under every path that clients know: texts in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from starlette.responses import Response

from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, RequestContext, json_response
from quire.frontend.new_request import TokensPrompt
from quire.frontend.openai.pooling_work import answer_head, count_tokens, naming, pool_prompts, pool_texts
from quire.frontend.openai.protocol.pooling import PoolingBody, RerankBody, ScoreBody
from quire.frontend.openai.rendering import PromptRenderer
from quire.frontend.openai.submission import check_admission
from quire.frontend.scoring import PairScorer, pair_texts
from quire.outputs import ScoringRequestOutput

SCORE = BodyReader(ScoreBody)
RERANK = BodyReader(RerankBody)
SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
TASKS = ("score", "embed")


async def score(context: RequestContext) -> Response:
    """Say how well pairs of texts go together."""
    body = await context.read(SCORE)
    model = context.state.check_model(body.model)
    with naming("text_2"):
        outputs = await _score(context, body, pair_texts(*body.texts(), names=("text_1", "text_2")))
    data = [{"index": index, "object": "score", "score": output.outputs.score} for index, output in enumerate(outputs)]
    usage = count_tokens([output.prompt_token_ids for output in outputs])
    return json_response({**answer_head(context, body, "score", model), "data": data, "usage": usage})


async def rerank(context: RequestContext) -> Response:
    """Put documents in the order in which they go with a query, the best first."""
    body = await context.read(RERANK)
    model = context.state.check_model(body.model)
    texts = body.texts()
    with naming("documents"):
        outputs = await _score(context, body, pair_texts(body.question(), texts, names=("query", "documents")))
    order = sorted(range(len(texts)), key=lambda index: -outputs[index].outputs.score)
    results = [
        {
            "index": index,
            "document": {"text": texts[index]} if body.return_documents else None,
            "relevance_score": outputs[index].outputs.score,
        }
        for index in order[: body.top_n or None]
    ]
    usage = count_tokens([output.prompt_token_ids for output in outputs])
    head = answer_head(context, body, "rerank", model)
    return json_response({"id": head["id"], "model": model, "usage": usage, "results": results})


async def _score(
    context: RequestContext, body: PoolingBody, pairs: Sequence[tuple[str, str]]
) -> list[ScoringRequestOutput]:
    state = context.state
    state.check_num_outputs(len(pairs))
    scorer = PairScorer(state.engine.pipeline.input_processor, state.engine.tokenizer, state.supported_tasks)
    together = "score" in state.supported_tasks
    if together:
        check_admission(context, [first + second for first, second in pairs], 1, max_tokens=0)
    job = await state.part(PromptRenderer).run_sized(
        pairs, lambda: scorer.plan(pairs, body.params(TASKS[0] if together else TASKS[1]), body.tokenization())
    )
    if together:
        salt = context.cache_salt(body.cache_salt)
        prompts = [cast("TokensPrompt", {**prompt, "cache_salt": salt}) for prompt in job.prompts]  # type: ignore[dict-item]
        return job.results(await pool_prompts(context, body, prompts, job.params))
    return job.results(await pool_texts(context, body, cast("list[str]", job.prompts), job.params[0]))


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

"""POST /v1/embeddings, /pooling and /classify: texts one by one, or a conversation."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from quire.errors import NotFoundError
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, RequestContext, json_response
from quire.frontend.openai.pooling_work import answer_head, count_tokens, encode_array, pool_input
from quire.frontend.openai.protocol.pooling import ClassifyBody, EmbeddingBody, PoolBody
from quire.pooling_params import POOLING_TASKS

EMBEDDING = BodyReader(EmbeddingBody)
POOL = BodyReader(PoolBody)
CLASSIFY = BodyReader(ClassifyBody)


async def create_embeddings(context: RequestContext) -> Response:
    """Embed one or more texts."""
    body = await context.read(EMBEDDING)
    return await _answer(context, body, "embed", "embd", "embedding", "embedding")


async def pool(context: RequestContext) -> Response:
    """Pool one or more texts, in any way the model does: also per token."""
    body = await context.read(POOL)
    tasks = context.state.supported_tasks
    if body.task is not None and body.task not in tasks:
        raise NotFoundError(
            f"the task {body.task!r} is not for this model, which supports {', '.join(tasks)}", param="task"
        )
    return await _answer(context, body, body.task or tasks[0], "pool", "pooling", "data")


async def _answer(
    context: RequestContext, body: EmbeddingBody, task: str, prefix: str, kind: str, key: str
) -> Response:
    state = context.state
    model = state.check_model(body.model)
    outputs = await pool_input(context, body, body.params(task))
    data = [
        {"index": index, "object": kind, key: encode_array(output.outputs.data, body.encoding_format)}
        for index, output in enumerate(outputs)
    ]
    usage = count_tokens([output.prompt_token_ids for output in outputs])
    return json_response({**answer_head(context, body, prefix, model), "data": data, "usage": usage})


async def classify(context: RequestContext) -> Response:
    """Say how probable each class is, for one or more texts."""
    body = await context.read(CLASSIFY)
    state = context.state
    model = state.check_model(body.model)
    outputs = await pool_input(context, body, body.params("classify"))
    pooling = state.engine.model_config.pooling
    labels = pooling.labels if pooling is not None else ()
    data: list[dict[str, Any]] = []
    for index, output in enumerate(outputs):
        probs = output.outputs.data
        label = labels[int(probs.argmax())] if labels else None
        data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    usage = count_tokens([output.prompt_token_ids for output in outputs])
    return json_response({**answer_head(context, body, "classify", model), "data": data, "usage": usage})


ENDPOINTS = (
    Endpoint(
        path="/v1/embeddings",
        handler=create_embeddings,
        access=Access.KEY,
        body=EMBEDDING,
        task="embed",
        is_work=True,
    ),
    Endpoint(path="/pooling", handler=pool, access=Access.KEY, body=POOL, task=POOLING_TASKS, is_work=True),
    Endpoint(path="/classify", handler=classify, access=Access.KEY, body=CLASSIFY, task="classify", is_work=True),
)

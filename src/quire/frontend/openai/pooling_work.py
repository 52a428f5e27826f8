"""Pooling requests behind one HTTP request, and the common parts of their answers."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import ClientError
from quire.frontend.admission import estimate_num_tokens, estimate_text_tokens
from quire.frontend.http.endpoint import Exchange
from quire.frontend.openai.protocol.chat import check_template_variables
from quire.frontend.openai.protocol.completion import Prompt, as_prompts
from quire.frontend.openai.protocol.pooling import EmbeddingBody, InputBody, PoolingBody, RerankBody
from quire.frontend.openai.rendering import PromptRenderer, cache_salt, texts_of
from quire.frontend.openai.submission import Submission, admit
from quire.outputs import PoolingRequestOutput, ScoringRequestOutput
from quire.pooling_params import PoolingParams


@contextmanager
def naming(field: str, name: str = "prompt") -> Iterator[None]:
    """Renames the engine's parameter `name` to `field` of the body in errors."""
    try:
        yield
    except ClientError as e:
        if e.param == name:
            e.param = field
        raise


async def pool_input(exchange: Exchange, body: InputBody, params: PoolingParams) -> list[PoolingRequestOutput]:
    """Returns the results of a body's texts in order, or of its conversation. Raises as `pool_texts`, by the field's
    name."""
    body.check_form()
    if body.messages is None:
        with naming("input"):
            texts = as_prompts(body.input, "input", exchange.state.config.max_prompts_per_request)
            return await pool_texts(exchange, body, texts, params)
    messages, renderer = body.messages, exchange.state.part(PromptRenderer)
    with naming("messages"):
        size = estimate_text_tokens(texts_of(messages))
        async with admit(exchange, [size], params) as submission:
            variables = check_template_variables(body.chat_template_kwargs)

            def render() -> list[str]:
                text = renderer.render_chat(
                    messages,
                    chat_template=body.chat_template,
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    variables=variables,
                )
                return [text]

            await _send_texts(exchange, submission, body, render, params)
        return await pooled_outputs(exchange, submission)


async def pool_texts(
    exchange: Exchange, body: PoolingBody, texts: Sequence[Prompt], params: PoolingParams
) -> list[PoolingRequestOutput]:
    """Returns the results of some prompts, in order. Raises as `AsyncLLM.add_request`, and the engine's errors."""
    async with admit(exchange, list(map(estimate_num_tokens, texts)), params) as submission:
        await _send_texts(exchange, submission, body, lambda: texts, params)
    return await pooled_outputs(exchange, submission)


async def _send_texts(
    exchange: Exchange,
    submission: Submission,
    body: PoolingBody,
    render: Callable[[], Sequence[Prompt]],
    params: PoolingParams,
) -> None:
    renderer, salt = exchange.state.part(PromptRenderer), cache_salt(exchange, body.cache_salt)
    read = partial(renderer.read_prompt, options=body.tokenization(), cache_salt=salt)
    prompts = await exchange.convert(lambda: list(map(read, render())))
    request_id = body.request_id or exchange.request_id
    await submission.send(prompts, [params] * len(prompts), request_id, priority=body.priority)


async def pooled_outputs(exchange: Exchange, submission: Submission) -> list[PoolingRequestOutput]:
    """Returns the results of all prompts. Ends the submission."""
    async with submission:
        return await exchange.unless_gone(submission.pooled_outputs())


def answer_head(exchange: Exchange, body: PoolingBody, prefix: str, model: str) -> dict[str, Any]:
    """Returns the beginning of an answer with a list of data."""
    return {
        "id": f"{prefix}-{body.request_id or exchange.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
    }


def count_tokens(outputs: Sequence[PoolingRequestOutput | ScoringRequestOutput]) -> dict[str, Any]:
    """Returns the usage of a request that generates nothing."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def embedding_data(
    body: EmbeddingBody, outputs: Sequence[PoolingRequestOutput], kind: str = "embedding"
) -> dict[str, Any]:
    """Returns the `data` of an answer with arrays of `kind`."""
    key = "data" if kind == "pooling" else kind
    arrays = [encode_array(output.outputs.data, body.encoding_format) for output in outputs]
    return {"data": [{"index": index, "object": kind, key: array} for index, array in enumerate(arrays)]}


def score_data(outputs: Sequence[ScoringRequestOutput]) -> dict[str, Any]:
    """Returns the `data` of an answer with scores."""
    scores = [output.outputs.score for output in outputs]
    return {"data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]}


def rank(body: RerankBody, texts: Sequence[str], outputs: Sequence[ScoringRequestOutput]) -> dict[str, Any]:
    """Returns the `results` of an answer with documents, the best first."""
    order = sorted(range(len(texts)), key=lambda index: -outputs[index].outputs.score)
    results = [
        {
            "index": index,
            "document": {"text": texts[index]} if body.return_documents else None,
            "relevance_score": outputs[index].outputs.score,
        }
        for index in order[: body.top_n or None]
    ]
    return {"results": results}


def encode_array(data: npt.NDArray[np.float32], encoding_format: str) -> Any:
    """Returns an array as lists of numbers, or as base64 of little-endian float32."""
    if encoding_format == "base64":
        return base64.b64encode(np.ascontiguousarray(data, dtype="<f4").tobytes()).decode()
    return data.tolist()

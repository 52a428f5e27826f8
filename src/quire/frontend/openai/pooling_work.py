"""Pooling requests behind one HTTP request, and what all their answers have in common."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import ClientError
from quire.frontend.openai.endpoint import RequestContext
from quire.frontend.openai.protocol.pooling import PoolingBody
from quire.frontend.openai.submission import Submission, check_admission
from quire.frontend.prompts import TokensPrompt
from quire.outputs import PoolingRequestOutput
from quire.pooling_params import PoolingParams


@contextmanager
def naming(field: str) -> Iterator[None]:
    """What is wrong with a prompt is wrong with `field` of the body."""
    try:
        yield
    except ClientError as e:
        if e.param == "prompt":
            e.param = field
        raise


async def pool_texts(
    context: RequestContext, body: PoolingBody, texts: Sequence[str | Sequence[int]], params: PoolingParams
) -> list[PoolingRequestOutput]:
    """The results of some prompts, in order. Raises as `AsyncLLM.add_request`, and what the engine failed with."""
    check_admission(context, texts, 1, max_tokens=0)
    salt = context.cache_salt(body.cache_salt)
    prompts = await context.state.renderer.tokenize_all(texts, body.tokenization(), cache_salt=salt)
    return await pool_prompts(context, body, prompts, [params] * len(prompts))


async def pool_prompts(
    context: RequestContext, body: PoolingBody, prompts: Sequence[TokensPrompt], params: Sequence[PoolingParams]
) -> list[PoolingRequestOutput]:
    """The same of prompts that are tokenized, each with parameters of its own."""
    request_id = body.request_id or context.request_id
    submission = await Submission.submit(context, prompts, params, request_id, priority=body.priority)
    try:
        return await context.unless_gone(submission.pooled_outputs())
    finally:
        await submission.close()


def answer_head(context: RequestContext, body: PoolingBody, prefix: str, model: str) -> dict[str, Any]:
    """How an answer with a list of data begins."""
    return {
        "id": f"{prefix}-{body.request_id or context.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
    }


def count_tokens(prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The usage of a request that generates nothing."""
    num_tokens = sum(map(len, prompts))
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def encode_array(data: npt.NDArray[np.float32], encoding_format: str) -> Any:
    """As numbers in lists, or as base64 of little-endian float32."""
    if encoding_format == "base64":
        return base64.b64encode(np.ascontiguousarray(data, dtype="<f4").tobytes()).decode()
    return data.tolist()

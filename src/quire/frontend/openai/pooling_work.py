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
from quire.frontend.http.endpoint import RequestContext
from quire.frontend.new_request import TokensPrompt
from quire.frontend.openai.chat.request import sample_text
from quire.frontend.openai.protocol.chat import check_template_variables
from quire.frontend.openai.protocol.completion import as_prompts
from quire.frontend.openai.protocol.pooling import InputBody, PoolingBody
from quire.frontend.openai.rendering import PromptRenderer
from quire.frontend.openai.submission import Submission, check_admission
from quire.outputs import PoolingRequestOutput
from quire.pooling_params import PoolingParams


@contextmanager
def naming(field: str, name: str = "prompt") -> Iterator[None]:
    """What is wrong with the engine's `name` is wrong with `field` of the body."""
    try:
        yield
    except ClientError as e:
        if e.param == name:
            e.param = field
        raise


async def pool_input(context: RequestContext, body: InputBody, params: PoolingParams) -> list[PoolingRequestOutput]:
    """The results of a body's texts in order, or of its conversation. Raises as `pool_texts`, by the field's name."""
    body.check_form()
    if body.messages is None:
        with naming("input"):
            texts = as_prompts(body.input, "input", context.state.config.max_prompts_per_request)
            return await pool_texts(context, body, texts, params)
    with naming("messages"):
        check_admission(context, [sample_text(body.messages)], 1, max_tokens=0)
        text = await context.state.part(PromptRenderer).render_chat(
            body.messages,
            chat_template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=check_template_variables(body.chat_template_kwargs),
        )
        return await pool_texts(context, body, [text], params, reserves=False)


async def pool_texts(
    context: RequestContext,
    body: PoolingBody,
    texts: Sequence[str | Sequence[int]],
    params: PoolingParams,
    *,
    reserves: bool = True,
) -> list[PoolingRequestOutput]:
    """The results of some prompts, in order. With `reserves` their room is taken first. Raises as
    `AsyncLLM.add_request`, and what the engine failed with."""
    if reserves:
        check_admission(context, texts, 1, max_tokens=0)
    salt = context.cache_salt(body.cache_salt)
    prompts = await context.state.part(PromptRenderer).tokenize_all(texts, body.tokenization(), cache_salt=salt)
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

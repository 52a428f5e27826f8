"""From finished outputs to a line of the result file: OpenAI's response bodies in vLLM's spelling."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from quire.cli.batch_files import error_body
from quire.cli.batch_requests import BatchRequest
from quire.errors import QuireError
from quire.outputs import CompletionOutput, Logprob, RequestOutput


def result_row(custom_id: str, request: BatchRequest, outputs: Sequence[RequestOutput], model: str) -> dict[str, Any]:
    """The row of a request that ran; `outputs` in the order of its prompts."""
    choices = [
        _choice(request, output, sequence, position * request.params.n + sequence.index)
        for position, output in enumerate(outputs)
        for sequence in output.outputs
    ]
    kind, prefix = ("chat.completion", "chatcmpl") if request.is_chat else ("text_completion", "cmpl")
    body = {
        "id": f"{prefix}-{uuid.uuid4().hex[:16]}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": _usage(outputs),
    }
    return _row(f"batch_req_{uuid.uuid4().hex[:16]}", custom_id, 200, body, None)


def error_row(row_id: str | None, custom_id: str | None, error: QuireError) -> dict[str, Any]:
    """The row of a request that was refused or failed."""
    described = error_body(error)
    name = row_id or f"batch_req_{uuid.uuid4().hex[:16]}"
    return _row(name, custom_id, described["code"], {"error": described}, described)


def _row(row_id: str, custom_id: str | None, status: int, body: dict[str, Any], error: Any) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req-{uuid.uuid4().hex[:16]}", "body": body}
    return {"id": row_id, "custom_id": custom_id, "response": response, "error": error}


def _choice(request: BatchRequest, output: RequestOutput, sequence: CompletionOutput, index: int) -> dict[str, Any]:
    ending = {"finish_reason": sequence.finish_reason, "stop_reason": sequence.stop_reason}
    if request.is_chat:
        message = {"role": "assistant", "content": sequence.text}
        return {"index": index, "message": message, "logprobs": _chat_logprobs(request, sequence), **ending}
    text = (output.prompt or "") + sequence.text if request.echo else sequence.text
    return {"index": index, "text": text, "logprobs": _text_logprobs(sequence), **ending}


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt = sum(len(o.prompt_token_ids or ()) for o in outputs)
    completion = sum(len(sequence.token_ids) for o in outputs for sequence in o.outputs)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens or 0 for o in outputs)},
    }


def _chat_logprobs(request: BatchRequest, sequence: CompletionOutput) -> dict[str, Any] | None:
    if sequence.logprobs is None:
        return None
    content = []
    for token_id, position in zip(sequence.token_ids, sequence.logprobs, strict=True):
        # The sampled token comes first and may be among the top ones too; `rank` sorts it in or out.
        top = [x for x in position.values() if x.rank is not None and x.rank <= (request.params.logprobs or 0)]
        content.append({**_logprob(position[token_id]), "top_logprobs": [_logprob(x) for x in top]})
    return {"content": content}


def _logprob(value: Logprob) -> dict[str, Any]:
    token = value.decoded_token or ""
    return {"token": token, "logprob": value.logprob, "bytes": list(token.encode("utf-8", errors="replace"))}


def _text_logprobs(sequence: CompletionOutput) -> dict[str, Any] | None:
    if sequence.logprobs is None:
        return None
    tokens = [
        position[t].decoded_token or "" for t, position in zip(sequence.token_ids, sequence.logprobs, strict=True)
    ]
    return {
        "text_offset": list(accumulate((len(token) for token in tokens[:-1]), initial=0)),
        "token_logprobs": [p[t].logprob for t, p in zip(sequence.token_ids, sequence.logprobs, strict=True)],
        "tokens": tokens,
        "top_logprobs": [
            {x.decoded_token or "": x.logprob for x in position.values()} for position in sequence.logprobs
        ],
    }

"""POST /v1/completions: texts continued."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response

from quire.errors import ValidationError
from quire.frontend.admission import estimate_num_tokens
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.http.streaming import DONE, encode_json, event
from quire.frontend.new_request import ParsedPrompt
from quire.frontend.openai.protocol.answer_parts import (
    TokenCount,
    TokenNames,
    answer_metrics,
    prompt_logprobs,
    text_logprobs,
)
from quire.frontend.openai.protocol.completion import DEFAULT_MAX_TOKENS, CompletionBody, Prompt
from quire.frontend.openai.protocol.sampling import make_sampling_params
from quire.frontend.openai.rendering import PromptRenderer, cache_salt
from quire.frontend.openai.submission import Submission, admit, stream_response
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams

COMPLETION = BodyReader(CompletionBody)


async def create_completion(exchange: Exchange) -> Response:
    """Continues one or more texts."""
    body = await exchange.read(COMPLETION)
    model = await exchange.find_model(body.model)
    request_id = f"cmpl-{body.request_id or exchange.request_id}"
    prompts, params, submission = await submit_completion(exchange, body, request_id)
    writer = CompletionWriter(exchange, body, model, request_id, prompts, params)
    if body.stream:
        return stream_response(exchange, writer.chunks(submission), submission)
    async with submission:
        return json_response(writer.whole(await exchange.unless_gone(submission.final_outputs())))


async def submit_completion(
    exchange: Exchange, body: CompletionBody, request_id: str, *, default_limit: int | None = DEFAULT_MAX_TOKENS
) -> tuple[list[ParsedPrompt], SamplingParams, Submission]:
    """Hands the prompts of a body to the engine: plan, admit, tokenize, submit.

    `default_limit` is the number of output tokens where neither body nor model has one; None: as many as fit. Raises
    ValidationError, OverloadedError.
    """
    texts, params = await plan_completion(exchange, body, default_limit)
    async with admit(exchange, list(map(estimate_num_tokens, texts)), params) as submission:
        prompts = await tokenize_prompts(exchange, body, texts, params)
        await submission.send(prompts, params, request_id, priority=body.priority)
    return prompts, params, submission


async def plan_completion(
    exchange: Exchange, body: CompletionBody, default_limit: int | None = DEFAULT_MAX_TOKENS
) -> tuple[list[Prompt], SamplingParams]:
    """Returns (the prompts as the body has them, the parameters that they share). Raises ValidationError."""
    state = exchange.state
    processor = state.engine.pipeline.input_processor
    limit, defaults = state.config.max_prompts_per_request, processor.sampling_defaults
    texts = await exchange.convert(lambda: body.prompts(limit, processor.decode_embeds))
    params = await exchange.convert(lambda: _sampling_params(body, {"max_tokens": default_limit, **defaults}))
    state.check_num_outputs(len(texts) * params.n)
    return texts, params


async def tokenize_prompts(
    exchange: Exchange, body: CompletionBody, texts: Sequence[Prompt], params: SamplingParams
) -> list[ParsedPrompt]:
    """Returns the prompts with their token ids, and with a text where the answer repeats it. Raises ValidationError."""
    renderer, tokenizer = exchange.state.part(PromptRenderer), exchange.state.engine.tokenizer
    options = renderer.tokenization(body, params.max_tokens)
    salt = cache_salt(exchange, body.cache_salt)
    read = partial(renderer.read_prompt, options=options, cache_salt=salt, max_tokens=params.max_tokens)
    prompts = await exchange.convert(lambda: list(map(read, texts)))
    if body.echo and tokenizer is not None:
        prompts = [p if p.text is not None else replace(p, text=tokenizer.decode(p.token_ids or [])) for p in prompts]
    return prompts


def _sampling_params(body: CompletionBody, defaults: dict[str, Any]) -> SamplingParams:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ValidationError(
            f"best_of={body.best_of} is not supported; ask for n outputs and choose",
            param="best_of",
            value=body.best_of,
        )
    if body.max_tokens == 0 and not body.echo:
        raise ValidationError("max_tokens=0 asks for nothing; it needs echo: true", param="max_tokens", value=0)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        body.prompt_logprobs = body.logprobs
    return make_sampling_params(
        body,
        defaults,
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        logprobs=body.logprobs,
    )


class CompletionWriter:
    """Writes the answer to one request: whole, or in chunks."""

    def __init__(
        self,
        exchange: Exchange,
        body: CompletionBody,
        model: str,
        request_id: str,
        prompts: Sequence[ParsedPrompt],
        params: SamplingParams,
    ) -> None:
        config = exchange.state.config
        self._body = body
        self._prompts = prompts
        self._num_outputs = params.n
        self._fingerprint = exchange.state.fingerprint
        self._head = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model}
        as_ids = bool(body.return_tokens_as_token_ids) or config.return_tokens_as_token_ids
        self._name = TokenNames(exchange.state.engine.tokenizer, as_ids=as_ids)
        self._shows_nothing = body.max_tokens == 0
        self._usage = TokenCount(shows_cached=config.enable_prompt_tokens_details)
        self._sends_usage, self._counts_always = body.wants_usage(is_forced=config.enable_force_include_usage)

    def _text(self, index: int, completion: CompletionOutput, *, is_first: bool) -> str:
        text = "" if self._shows_nothing else completion.text
        return (self._prompts[index].text or "") + text if self._body.echo and is_first else text

    def _logprobs(
        self, index: int, output: RequestOutput, completion: CompletionOutput, offset: int, *, is_first: bool
    ) -> tuple[dict[str, Any] | None, int]:
        """Returns (log-probabilities, the offset of the next text)."""
        if self._body.logprobs is None or completion.logprobs is None:
            return None, offset
        token_ids, positions = list(completion.token_ids), list(completion.logprobs)
        if self._shows_nothing:
            token_ids, positions = [], []
        if not (self._body.echo and is_first):
            return text_logprobs(token_ids, positions, self._name, offset)
        prompt_ids = self._prompts[index].token_ids or []
        before = list(output.prompt_logprobs or [None] * len(prompt_ids))
        return text_logprobs([*prompt_ids, *token_ids], [*before, *positions], self._name, offset)

    # -- whole --------------------------------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the answer as one object."""
        choices = []
        for index, output in enumerate(outputs):
            self._usage.add(index, output)
            choices += [self._choice(index, output, completion) for completion in output.outputs]
        return {
            **self._head,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self._usage.in_answer(),
            "kv_transfer_params": next((o.kv_transfer_params for o in outputs if o.kv_transfer_params), None),
            "ec_transfer_params": None,
            "metrics": answer_metrics([completion for output in outputs for completion in output.outputs]),
        }

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        ids = bool(self._body.return_token_ids)
        return {
            "index": index * self._num_outputs + completion.index,
            "text": self._text(index, completion, is_first=True),
            "logprobs": self._logprobs(index, output, completion, 0, is_first=True)[0],
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": list(completion.token_ids) if ids else None,
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
            "prompt_token_ids": output.prompt_token_ids if ids else None,
            "routed_experts": None,
        }

    # -- in chunks ----------------------------------------------------------------------------------------------------

    async def chunks(self, submission: Submission) -> AsyncGenerator[bytes, None]:
        """Yields the answer as events."""
        head = encode_json(self._head)[:-1] + b',"choices":['
        offsets: dict[int, int] = {}
        metrics: dict[str, Any] | None = None
        is_single = self._num_outputs * len(self._prompts) == 1
        async for index, output in submission.outputs():
            self._usage.add(index, output)
            metrics = answer_metrics(output.outputs) if is_single else None
            tail = b'],"usage":' + encode_json(self._usage.in_chunk()) if self._counts_always else b"]"
            tail += (
                b"}\n\n" if metrics is None or self._sends_usage else b',"metrics":' + encode_json(metrics) + b"}\n\n"
            )
            for completion in output.outputs:
                choice = self._chunk_choice(index, output, completion, offsets)
                if choice is not None:
                    yield b"data: " + head + choice + tail
        if self._sends_usage:
            usage: dict[str, Any] = {
                "choices": [],
                "usage": self._usage.in_chunk(),
                "system_fingerprint": self._fingerprint,
            }
            yield event(self._head | usage | ({} if metrics is None else {"metrics": metrics}))
        yield DONE

    def _chunk_choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput, offsets: dict[int, int]
    ) -> bytes | None:
        """Returns one choice of a chunk; None if it would be empty. Joined from pieces for speed: every token passes
        here."""
        body = self._body
        number = index * self._num_outputs + completion.index
        is_first = number not in offsets
        text = self._text(index, completion, is_first=is_first)
        logprobs, offsets[number] = self._logprobs(index, output, completion, offsets.get(number, 0), is_first=is_first)
        if not text and logprobs is None and completion.finish_reason is None and not body.return_token_ids:
            return None
        ids = encode_json(completion.token_ids) if body.return_token_ids else b"null"
        prompt_ids = encode_json(output.prompt_token_ids) if body.return_token_ids and is_first else b"null"
        more = b""
        if is_first and body.prompt_logprobs is not None:
            more = b',"prompt_logprobs":' + encode_json(prompt_logprobs(output.prompt_logprobs))
        return b"".join(
            (
                b'{"index":%d,"text":' % number,
                encode_json(text),
                b',"logprobs":',
                b"null" if logprobs is None else encode_json(logprobs),
                b',"finish_reason":',
                encode_json(completion.finish_reason),
                b',"stop_reason":',
                encode_json(completion.stop_reason),
                b',"prompt_token_ids":',
                prompt_ids,
                b',"token_ids":',
                ids,
                more,
                b"}",
            )
        )


ENDPOINTS = (
    Endpoint(
        path="/v1/completions",
        handler=create_completion,
        access=Access.KEY,
        body=COMPLETION,
        task="generate",
        is_work=True,
    ),
)

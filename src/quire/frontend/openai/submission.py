"""The engine requests behind one HTTP request: admitted, sent, read and ended together, and their log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self, cast

from quire.config.server import ServerConfig
from quire.errors import GenerationError, ValidationError, make_error
from quire.frontend.admission import demand_of
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.endpoint import DEFAULT_SEED, Exchange
from quire.frontend.http.errors import ErrorShape, UnavailableError, error_body
from quire.frontend.http.streaming import SERVER_SENT_EVENTS, EventStream, error_event
from quire.frontend.new_request import NewRequest, ParsedPrompt
from quire.frontend.output_handler import Output, RequestOutputCollector
from quire.logger import init_logger
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

logger = init_logger("quire.requests")

TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers of a W3C trace context."""
MAX_TRACE_HEADER_CHARS = 512
RANK_HEADER = "x-data-parallel-rank"
"""Header that names the engine of a request."""
MAX_RANK_DIGITS = 6


def read_rank(text: str | None) -> int | None:
    """Returns the engine that a request names. Raises ValidationError."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_RANK_DIGITS):
        raise ValidationError(
            f"the header X-data-parallel-rank must be the number of an engine, got {text[:60]!r}",
            param="data_parallel_rank",
        )
    return int(text)


@dataclass(slots=True)
class _Output:
    num_tokens: int = 0
    num_chars: int = 0
    text: str = ""


class RequestLog:
    """Logs one HTTP request: --enable-log-requests, --enable-log-outputs. Lines hold text only with --max-log-len."""

    def __init__(self, config: ServerConfig, http_id: str, engine: AsyncLLM) -> None:
        self._facts = {"request_id": http_id}
        self._engine = engine
        self._max_len = config.max_log_len
        self._with_requests = config.enable_log_requests
        self._with_outputs = config.enable_log_outputs
        self._outputs: dict[tuple[str, int], _Output] = {}
        """Outputs of requests that have not ended, with no more text than is logged."""

    def note_request(self, request_id: str, new: NewRequest) -> None:
        """Logs a request that the engine has taken under this id."""
        if not self._with_requests:
            return
        prompt = new.prompt
        assert isinstance(prompt, ParsedPrompt)
        line = f"request {request_id}: {len(prompt.token_ids or ())} prompt tokens, {_describe(new.params)}"
        if self._max_len:
            line += f", prompt: {self._prompt_text(prompt)}"
        logger.info("%s", line, extra=self._facts)

    def note_output(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """Adds an output, a delta or a whole one, and logs it at its end."""
        if not self._with_outputs or isinstance(output, PoolingRequestOutput):
            return
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            kept = self._outputs.setdefault(key, _Output())
            kept.num_tokens += len(completion.token_ids)
            kept.num_chars += len(completion.text)
            kept.text += completion.text[: self._max_len - len(kept.text)]
            if completion.finish_reason is not None:
                self._outputs.pop(key)
                line = f"request {output.request_id}, output {completion.index}: {kept.num_tokens} tokens, "
                line += f"finish_reason={completion.finish_reason}"
                if self._max_len:
                    line += f", text: {_shown(kept.text, kept.num_chars)}"
                logger.info("%s", line, extra=self._facts)

    def _prompt_text(self, prompt: ParsedPrompt) -> str:
        """Returns the start of a prompt: as it came, or decoded from no more tokens than can be shown."""
        text = prompt.text
        if text is not None:
            return _shown(text[: self._max_len], len(text))
        token_ids = prompt.token_ids or []
        tokenizer = self._engine.pipeline.tokenizer
        if tokenizer is None:
            return _shown(str(token_ids[: self._max_len])[: self._max_len], len(token_ids), "tokens")
        text = tokenizer.decode(token_ids[: self._max_len])
        is_whole = len(token_ids) <= self._max_len and len(text) <= self._max_len
        return _shown(text[: self._max_len], self._max_len if is_whole else len(token_ids), "tokens")


def _shown(text: str, length: int, unit: str = "characters") -> str:
    """Returns a quoted text, which may be only the start of one of `length`."""
    return f'"{text}"' if length <= len(text) else f'"{text}"... ({length} {unit})'


def _describe(params: SamplingParams | PoolingParams) -> str:
    if isinstance(params, PoolingParams):
        return f"task={params.task}"
    form = "" if params.structured_outputs is None else f", {params.structured_outputs.source.kind}"
    return (
        f"max_tokens={params.max_tokens}, n={params.n}, temperature={params.temperature:g}, top_p={params.top_p:g}, "
        f"top_k={params.top_k}, seed={params.seed}{form}"
    )


class Submission:
    """The engine requests behind one HTTP request, one per prompt: admitted, sent, read and ended together.

    A context manager: at its end it aborts the requests that still run.
    """

    def __init__(self, exchange: Exchange, nums_tokens: Sequence[int], params: SamplingParams | PoolingParams) -> None:
        """Takes room in the engine's queue for prompts of about `nums_tokens` tokens each, and a part of what their key
        may have under way. Raises OverloadedError."""
        state = exchange.state
        self._exchange = exchange
        self._engine = state.engine
        demands = [demand_of(params, num_tokens, state.max_model_len) for num_tokens in nums_tokens]
        self._charges = state.tenants.charges(
            exchange.owner,
            sum(demand.num_reqs for demand in demands),
            sum(demand.num_reqs * (demand.num_tokens_each + demand.num_output_tokens_each) for demand in demands),
        )
        """The part of the key's limits; `close` gives it back."""
        self._rooms = deque(self._engine.admission.reserve_all(demands, self._charges))
        """Reservations of the prompts that were not sent, in order. The engine gives back those of the others."""
        is_logged = state.config.enable_log_requests or state.config.enable_log_outputs
        self._log = RequestLog(state.config, exchange.request_id, state.engine) if is_logged else None
        self._collectors: list[RequestOutputCollector] = []

    async def send(
        self,
        prompts: Sequence[ParsedPrompt],
        params: SamplingParams | Sequence[PoolingParams],
        request_id: str,
        *,
        priority: int = 0,
    ) -> None:
        """Hands all prompts to the engine. Each prompt to be pooled has its own parameters. Raises as
        `AsyncLLM.add_request`."""
        if isinstance(params, SamplingParams):
            params.skip_clone = len(prompts) == 1  # made for this request, and used once
            if params.seed is None:
                params.seed = self._exchange.request.scope.get(DEFAULT_SEED)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        headers = self._exchange.request.headers
        adapter, rank = self._exchange.adapter, read_rank(headers.get(RANK_HEADER))
        trace_headers = {name: headers[name][:MAX_TRACE_HEADER_CHARS] for name in TRACE_HEADERS if name in headers}
        for index, prompt in enumerate(prompts):
            if index > 1:
                await asyncio.sleep(0)  # others may go on between two prompts
            new = NewRequest(
                request_id=request_id,
                prompt=prompt,
                params=each[index],
                priority=priority,
                trace_headers=trace_headers or None,
                lora_request=None if adapter is None else adapter.request,
                data_parallel_rank=rank,
                reservation=self._rooms.popleft(),
            )
            collector = await self._engine.add_new(new)
            self._collectors.append(collector)
            if self._log is not None:
                self._log.note_request(collector.request_id, new)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields (index of the prompt, its output) as they come. Raises the engine's errors.

        A request that the server's shutdown has cut off raises UnavailableError: its output is no answer.
        """
        if len(self._collectors) == 1:
            async for output in self._collectors[0]:
                yield 0, self._checked(output)
            return
        async for index, output in self._read_all():
            yield index, output

    async def _read_all(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields the outputs of several requests, in turn among those that have some."""
        ready = deque(range(len(self._collectors)))
        has_ready = asyncio.Event()

        def note(index: int, _: asyncio.Future[None]) -> None:
            ready.append(index)
            has_ready.set()

        num_left = len(self._collectors)
        while num_left:
            while not ready:
                has_ready.clear()
                await has_ready.wait()
            index = ready.popleft()
            output = self._collectors[index].get_nowait()
            if output is None:
                self._collectors[index].wait().add_done_callback(partial(note, index))
                continue
            if output.finished:
                num_left -= 1
            else:
                ready.append(index)
            yield index, self._checked(output)

    def _checked(self, output: Output) -> RequestOutput:
        """Returns an output after checking it for errors. `pooled_outputs` restores the type of a pooling output."""
        if self._log is not None:
            self._log.note_output(output)
        for completion in (output,) if isinstance(output, PoolingRequestOutput) else output.outputs:
            if completion.finish_reason == "error":
                raise make_error(
                    completion.error_type,
                    completion.error_message or "the engine failed on this request; it may be retried",
                    GenerationError,
                )
            if completion.finish_reason == "abort" and self._exchange.state.lifecycle.is_stopping:
                raise UnavailableError("the server shut down before the answer was complete; ask another one")
        return cast("RequestOutput", output)

    async def final_outputs(self) -> list[RequestOutput]:
        """Returns the last output of every prompt, in order."""
        last = {index: output async for index, output in self.outputs()}
        return [last[index] for index in range(len(self._collectors))]

    async def pooled_outputs(self) -> list[PoolingRequestOutput]:
        """Returns the result of every prompt of a pooling request, in order."""
        outputs = cast("list[PoolingRequestOutput]", await self.final_outputs())
        if any(output.outputs.data is None for output in outputs):
            raise GenerationError("the request was ended before there was a result; it may be sent again")
        return outputs

    async def close(self, error: BaseException | None = None) -> None:
        """Aborts the requests that still run, and gives back what was taken for them; `error` is the reason that some
        were not sent. Idempotent."""
        while self._rooms:
            self._rooms.popleft().release(error)
        running = [collector.request_id for collector in self._collectors if not collector.is_final]
        if running:
            await self._engine.abort(running, internal=True)
        charges, self._charges = self._charges, []
        for quota, amount in charges:
            quota.change(-amount)


@asynccontextmanager
async def admit(
    exchange: Exchange, nums_tokens: Sequence[int], params: SamplingParams | PoolingParams
) -> AsyncGenerator[Submission, None]:
    """Gives a submission for prompts of about `nums_tokens` tokens each, to be sent in its context. An error there ends
    it: all prompts are sent, or none. Raises OverloadedError."""
    submission = Submission(exchange, nums_tokens, params)
    try:
        yield submission
    except BaseException as e:
        await submission.close(e)
        raise


def stream_response(
    exchange: Exchange,
    chunks: AsyncGenerator[bytes, None],
    submission: Submission | None,
    *,
    encode_error: Callable[[BaseException], bytes] = error_event,
    shape_error: ErrorShape = error_body,
    media_type: bytes = SERVER_SENT_EVENTS,
) -> EventStream:
    """Returns `chunks` as a streamed answer. At every end the requests of `submission` that still run are aborted.

    Only server-sent events have comments, and so are kept alive in pauses.
    """
    state = exchange.state
    return EventStream(
        chunks,
        on_close=None if submission is None else submission.close,
        request_id=exchange.request_id,
        keep_alive_s=state.config.sse_keep_alive_interval if media_type == SERVER_SENT_EVENTS else 0.0,
        stall_s=state.stall_s,
        encode_error=lambda error: encode_error(exchange.with_own_names(error)),
        shape_error=lambda error: shape_error(exchange.with_own_names(error)),
        media_type=media_type,
    )

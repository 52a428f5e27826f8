"""The engine requests behind one HTTP request: handed in together, read together, and ended together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import cast

from quire.errors import GenerationError, make_error
from quire.frontend.admission import estimate_num_tokens
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.endpoint import RequestContext
from quire.frontend.http.errors import ErrorShape, UnavailableError, error_body
from quire.frontend.http.state import Lifecycle
from quire.frontend.http.streaming import EventStream, error_event
from quire.frontend.http.tenants import TenantPlace
from quire.frontend.new_request import TokensPrompt
from quire.frontend.openai.request_log import RequestLog
from quire.frontend.output_handler import Output, RequestOutputCollector
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams


class Submission:
    """Live requests, one per prompt. Whoever has one calls `close` in the end, which aborts what still runs."""

    def __init__(
        self,
        engine: AsyncLLM,
        lifecycle: Lifecycle,
        collectors: Sequence[RequestOutputCollector],
        share: TenantPlace | None = None,
        log: RequestLog | None = None,
    ) -> None:
        """`share` is what the requests take of their key's limits; it is given back in the end."""
        self._engine = engine
        self._share = share
        self._log = log
        self._lifecycle = lifecycle
        self._collectors = collectors

    @classmethod
    async def submit(
        cls,
        context: RequestContext,
        prompts: Sequence[TokensPrompt],
        params: SamplingParams | Sequence[PoolingParams],
        request_id: str,
        *,
        priority: int = 0,
    ) -> Submission:
        """Hand in all prompts, or none: what fails on one aborts the others. Raises as `AsyncLLM.add_request`.

        Prompts to be pooled have parameters of their own.
        """
        engine = context.state.engine
        if isinstance(params, SamplingParams):
            params.skip_clone = len(prompts) == 1  # made for this request, and used once
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        log = RequestLog.from_config(context.state.config, context.request_id, engine)
        submission = cls(engine, context.state.lifecycle, collectors := [], context.take_share(), log)
        try:
            for index, prompt in enumerate(prompts):
                collectors.append(
                    await engine.add_request(
                        request_id,
                        prompt,
                        each[index],
                        trace_headers=context.trace_headers,
                        priority=priority,
                        reservation=context.take_place(),
                    )
                )
                if log is not None:
                    log.note_request(collectors[-1].request_id, prompt, each[index])
                if index:
                    await asyncio.sleep(0)  # others may go on between two prompts
        except BaseException:
            await submission.close()
            raise
        return submission

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, its output) as they come. Raises what the engine failed with.

        A request that the server's end has cut off raises UnavailableError, so that nobody takes it for an answer.
        """
        if len(self._collectors) == 1:
            async for output in self._collectors[0]:
                yield 0, self._checked(output)
            return
        async for index, output in self._read_all():
            yield index, output

    async def _read_all(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Of several, whichever has something, in turn."""
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
        """A request to pool has one output, which `pooled_outputs` takes for what it is."""
        if self._log is not None:
            self._log.note_output(output)
        for completion in (output,) if isinstance(output, PoolingRequestOutput) else output.outputs:
            if completion.finish_reason == "error":
                raise make_error(
                    completion.error_type,
                    completion.error_message or "the engine failed on this request; it may be retried",
                    GenerationError,
                )
            if completion.finish_reason == "abort" and self._lifecycle.is_stopping:
                raise UnavailableError("the server shut down before the answer was complete; ask another one")
        return cast("RequestOutput", output)

    async def final_outputs(self) -> list[RequestOutput]:
        """The last output of every prompt, in order."""
        last = {index: output async for index, output in self.outputs()}
        return [last[index] for index in range(len(self._collectors))]

    async def pooled_outputs(self) -> list[PoolingRequestOutput]:
        """The result of every prompt that was to be pooled, in order."""
        outputs = cast("list[PoolingRequestOutput]", await self.final_outputs())
        if any(output.outputs.data is None for output in outputs):
            raise GenerationError("the request was ended before there was a result; it may be sent again")
        return outputs

    async def close(self) -> None:
        """Abort what still runs. Idempotent."""
        running = [collector.request_id for collector in self._collectors if not collector.is_final]
        if running:
            await self._engine.abort(running, internal=True)
        if self._share is not None:
            self._share.release()


def check_admission(
    context: RequestContext, prompts: Sequence[str | Sequence[int]], n: int, max_tokens: int | None = None
) -> None:
    """Reserve room for the prompts, n outputs each of at most `max_tokens` (None: as many as the context has room
    for), which `Submission.submit` uses.

    Raises OverloadedError, before any work is done, if they are not taken now.
    """
    limit = context.state.max_model_len
    nums_tokens = [estimate_num_tokens(prompt) for prompt in prompts]
    nums_output = [min(max(0, limit - num), limit if max_tokens is None else max_tokens) for num in nums_tokens]
    context.reserve_places(nums_tokens, n, nums_output)


def stream_response(
    context: RequestContext,
    chunks: AsyncGenerator[bytes, None],
    submission: Submission | None,
    *,
    encode_error: Callable[[BaseException], bytes] = error_event,
    shape_error: ErrorShape = error_body,
) -> EventStream:
    """`chunks` as server-sent events; when they end, however they end, what still runs of `submission` is aborted."""
    state = context.state
    return EventStream(
        chunks,
        on_close=None if submission is None else submission.close,
        request_id=context.request_id,
        keep_alive_s=state.config.sse_keep_alive_interval,
        stall_s=state.stall_s,
        encode_error=lambda error: encode_error(context.in_own_words(error)),
        shape_error=lambda error: shape_error(context.in_own_words(error)),
    )

"""The way of a request into the engine from asyncio: admission, tokenizing, a reader, a deadline, the core. And its
end.

`RequestTimers` sets one timer of the event loop for the deadlines and stalled readers of all requests. `SessionFeed`
sends the inputs of a streaming-input session as its user's generator yields them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from quire.config.engine import EngineConfig
from quire.errors import EngineDeadError, QuireError, SlowClientError, ValidationError
from quire.frontend.admission import (
    AdmissionControl,
    Reservation,
    demand_of,
    estimate_num_tokens,
    max_output_tokens,
)
from quire.frontend.client.base import AsyncEngineCoreClient
from quire.frontend.input_processor import InputProcessor
from quire.frontend.new_request import NewRequest, ParsedPrompt
from quire.frontend.output_handler import RequestOutputCollector
from quire.frontend.request_pipeline import TIMEOUT_S, Deadlines, RequestPipeline, deadline_error
from quire.frontend.session import StreamingInput
from quire.frontend.text.tokenizer import LONG_TEXT_CHARS
from quire.wire.engine_core import EngineCoreRequest, FinishReason

T = TypeVar("T")
Inputs = AsyncGenerator[StreamingInput, None]

CHILDREN_PER_TURN = 64
"""Requests of a prompt with many outputs that are sent before the loop may do something else."""


class TextThread:
    """One thread for work on long texts, so that it does not block the event loop."""

    def __init__(self, input_processor: InputProcessor) -> None:
        self._input_processor = input_processor
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="quire-tokenizer")

    async def run(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, done on the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def tokenize_long(self, new: NewRequest) -> NewRequest:
        """Returns a request with the token ids of its prompt if that is a long text, which is tokenized here. Raises
        ValidationError."""
        prompt: object = new.prompt
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else None
        elif isinstance(prompt, ParsedPrompt):
            prompt = prompt.text if prompt.token_ids is None else None
        if not isinstance(prompt, str) or len(prompt) <= LONG_TEXT_CHARS:
            return new
        read = partial(self._input_processor.read_prompt, new.prompt, new.tokenization_kwargs)
        return replace(new, prompt=await self.run(read))

    def close(self) -> None:
        """Ends the thread. Work that has not begun is cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)


SWEEPS_PER_TIMEOUT = 10
"""Number of looks for stalled readers per timeout: a reader is cut at most two tenths of its time late."""

Expired = list[tuple[RequestOutputCollector, QuireError]]


class RequestTimers:
    """Calls `on_expired` with the requests that must end, and why. Requests that end by themselves need no call.

    A reader is stalled when output was ready and it took none for `slow_client_timeout_s` (0: no limit). The timers
    belong to the loop that is running at the first `watch`.
    """

    def __init__(self, slow_client_timeout_s: float, on_expired: Callable[[Expired], None]) -> None:
        self._slow_timeout_s = slow_client_timeout_s
        self._on_expired = on_expired
        self._deadlines: Deadlines[tuple[RequestOutputCollector, float]] = Deadlines(lambda item: item[0].is_final)
        """Requests and the time they were given."""
        self._readers: dict[RequestOutputCollector, tuple[int, float] | None] = {}
        """Live requests. With output ready: how many outputs their reader had taken when that was first seen, and
        when."""
        self._next_sweep = 0.0
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0
        """Time the timer is set to: timers of uvloop do not show it."""

    def watch(self, collector: RequestOutputCollector, start: float = 0.0, timeout_s: float | None = None) -> None:
        """Watches a request. It has `timeout_s` (None: no limit) from `start`, on the loop's clock, to its end."""
        loop = asyncio.get_running_loop()
        if timeout_s is not None:
            self._deadlines.add((collector, timeout_s), start + timeout_s)
        if self._slow_timeout_s:
            if not self._readers:
                self._next_sweep = loop.time() + self._slow_timeout_s / SWEEPS_PER_TIMEOUT
            self._readers[collector] = None
        self._set_timer(loop)

    def stop(self) -> None:
        """Stops watching."""
        if self._timer is not None:
            self._timer.cancel()
        self._readers.clear()

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        due = self._deadlines.next_due
        if self._readers:
            due = self._next_sweep if due is None else min(due, self._next_sweep)
        if due is None or (self._timer is not None and self._rings_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings_at = loop.call_at(due, self._ring, loop), due

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        expired: Expired = [
            (collector, deadline_error(timeout_s)) for collector, timeout_s in self._deadlines.take_due(now)
        ]
        if self._readers and now >= self._next_sweep:
            expired += self._sweep(now)
            self._next_sweep = now + self._slow_timeout_s / SWEEPS_PER_TIMEOUT
        if expired:
            self._on_expired(expired)
        self._set_timer(loop)

    def _sweep(self, now: float) -> Expired:
        stalled: Expired = []
        for collector, seen in list(self._readers.items()):
            if collector.is_final:
                del self._readers[collector]
            elif not collector.has_output:
                self._readers[collector] = None
            elif seen is None or seen[0] != collector.num_taken:
                self._readers[collector] = collector.num_taken, now
            elif now - seen[1] >= self._slow_timeout_s:
                stalled.append((collector, self._slow_client_error()))
        return stalled

    def _slow_client_error(self) -> SlowClientError:
        return SlowClientError(
            f"slow_client: nobody took the request's output for {self._slow_timeout_s:g} s "
            "(--slow-client-timeout-s); it was aborted"
        )


class RequestIntake:
    """Adds requests and ends them early. Whatever happens on the way, nothing of a request is left.

    Belongs to one event loop.
    """

    def __init__(self, config: EngineConfig, engine_core: AsyncEngineCoreClient, pipeline: RequestPipeline) -> None:
        scheduler, frontend = config.scheduler_config, config.frontend_config
        self.admission = AdmissionControl(
            scheduler.max_num_queued_reqs,
            scheduler.max_num_queued_tokens,
            scheduler.max_num_reserved_tokens,
            ledger=pipeline.ledger,
        )
        self._engine_core = engine_core
        self._pipeline = pipeline
        self.text_thread = TextThread(pipeline.input_processor)
        self._request_timeout_s = frontend.request_timeout_s
        self._timers = RequestTimers(frontend.slow_client_timeout_s, self._expire)
        self._aborts: set[asyncio.Task[None]] = set()
        """Tasks that abort expired requests in the core."""

    async def add(self, new: NewRequest, start: float | None = None) -> RequestOutputCollector:
        """Queues a request, or begins a streaming-input session. Returns the collector of its outputs.

        Its time counts from `start`, on the loop's clock; None: from now.
        """
        if start is None:
            start = asyncio.get_running_loop().time()
        if isinstance(new.prompt, AsyncGenerator):
            return await self._add_session(new, new.prompt, start)
        reservation = new.reservation or self._reserve(new)
        try:
            TIMEOUT_S.validate(new.timeout_s)
            timeout_s = self._request_timeout_s if new.timeout_s is None else new.timeout_s
            processor = self._pipeline.input_processor
            if new.lora_request is not None and not processor.adapters.knows(new.lora_request):
                await asyncio.to_thread(processor.adapters.check, new.lora_request)  # it reads files
            request, text = processor.process_inputs(await self.text_thread.tokenize_long(new))
            num_tokens = len(request.prompt_token_ids or ())
            reservation.correct(num_tokens, max_output_tokens(new.params, processor.max_model_len, num_tokens))
            if timeout_s is not None and start + timeout_s <= asyncio.get_running_loop().time():
                raise deadline_error(timeout_s)
            collector = RequestOutputCollector(new.params.output_kind)
            await self._submit(request, text, collector, reservation)
        except BaseException as e:
            reservation.release(e)
            raise
        if not collector.is_final:
            self._timers.watch(collector, start, timeout_s)
        return collector

    def _reserve(self, new: NewRequest) -> Reservation:
        num_tokens, max_model_len = estimate_num_tokens(new.prompt), self._pipeline.input_processor.max_model_len
        return self.admission.reserve(*demand_of(new.params, num_tokens, max_model_len))

    async def _add_session(self, new: NewRequest, inputs: Inputs, start: float) -> RequestOutputCollector:
        """Queues a session: its time begins with the wait for the first of `inputs`, whose size is admitted."""
        feed = SessionFeed(self._pipeline, self._engine_core, self.text_thread, inputs, new)
        timeout_s = new.timeout_s
        try:
            TIMEOUT_S.validate(timeout_s)
            timeout_s = self._request_timeout_s if timeout_s is None else timeout_s
            async with asyncio.timeout_at(None if timeout_s is None else start + timeout_s):
                first = await feed.first()
            params = new.params if first.sampling_params is None else first.sampling_params
            new = replace(new, prompt=first.prompt, params=params, resumable=True)
            collector = await self.add(new, start)
        except BaseException as e:
            if new.reservation is not None:
                new.reservation.release(e)
            await feed.close()
            if isinstance(e, TimeoutError) and timeout_s is not None:
                raise deadline_error(timeout_s) from None
            raise
        if not collector.is_final:
            feed.start(collector)
        return collector

    async def _submit(
        self,
        request: EngineCoreRequest,
        text: str | None,
        collector: RequestOutputCollector,
        reservation: Reservation,
    ) -> None:
        """Registers a request here, then sends it to the core. If that fails, neither keeps it."""
        self._pipeline.input_processor.assign_request_id(request)
        collector.request_id = request.request_id
        output_processor = self._pipeline.output_processor
        try:
            children = output_processor.register(request, text, reservation.receipt, collector, reservation)
            for index, child in enumerate(children, start=1):
                if child.request_id in output_processor.request_states:  # not aborted meanwhile
                    await self._engine_core.add_request_async(child)
                if index % CHILDREN_PER_TURN == 0:
                    await asyncio.sleep(0)
        except BaseException:
            await self.abort([request.request_id], internal=True)
            raise

    async def abort(self, request_ids: Iterable[str], internal: bool) -> None:
        """Forgets requests here, and aborts them in the core. Their readers get a last output."""
        await self._abort_in_core(self._pipeline.forget(request_ids, internal=internal))

    async def _abort_in_core(self, request_ids: list[str]) -> None:
        if request_ids and not self._engine_core.engine_dead:
            await self._engine_core.abort_requests_async(request_ids)

    def _expire(self, expired: Expired) -> None:
        """Ends requests whose deadline has passed, or whose reader is stalled: their readers get the error."""
        aborts: list[str] = []
        for collector, error in expired:
            reason = FinishReason.ABORT if isinstance(error, SlowClientError) else FinishReason.ERROR
            aborts += self._pipeline.fail([collector.request_id], error, reason).reqs_to_abort
        task = asyncio.get_running_loop().create_task(self._abort_in_core(aborts))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def close(self) -> None:
        """Ends all requests: every reader gets its last output, with finish reason "abort". The core ends, too."""
        self._pipeline.forget(list(self._pipeline.output_processor.request_states), internal=True)
        self._timers.stop()
        self.text_thread.close()


class SessionFeed:
    """One task per session, from its second input to its last one, or to its end. An error of an input, in the user's
    generator or here, ends the session, and its reader gets it."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        engine_core: AsyncEngineCoreClient,
        text_thread: TextThread,
        inputs: Inputs,
        new: NewRequest,
    ) -> None:
        """`new` is the request as its caller asked for it: its parameters are those of inputs without any."""
        self._pipeline = pipeline
        self._engine_core = engine_core
        self._text_thread = text_thread
        self._inputs = inputs
        self._new = replace(new, tokenization_kwargs={"add_special_tokens": False, **new.tokenization_kwargs})
        self._task: asyncio.Task[None] | None = None

    async def first(self) -> StreamingInput:
        """Returns the input the session begins with. Raises ValidationError if there is none."""
        try:
            return _checked(await anext(self._inputs))
        except StopAsyncIteration:
            raise ValidationError("a streaming-input session needs an input to begin with", param="prompt") from None

    def start(self, collector: RequestOutputCollector) -> None:
        """Sends the rest of the inputs of a session that was added."""
        collector.on_end = self._stop
        self._task = asyncio.get_running_loop().create_task(self._run(collector.request_id), name="quire-session-feed")

    def _stop(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    async def close(self) -> None:
        """Closes the user's generator."""
        await self._inputs.aclose()

    async def _run(self, session_id: str) -> None:
        try:
            async for item in self._inputs:
                checked, new = _checked(item), self._new
                params = checked.sampling_params or new.params
                await self._send(session_id, replace(new, prompt=checked.prompt, params=params, resumable=True))
            await self._send(session_id, replace(self._new, prompt=[]))
        except Exception as e:
            failed = self._pipeline.fail([session_id], e)
            if failed.reqs_to_abort and not isinstance(e, EngineDeadError):
                await self._engine_core.abort_requests_async(failed.reqs_to_abort)
        finally:
            await self.close()

    async def _send(self, session_id: str, new: NewRequest) -> None:
        new = await self._text_thread.tokenize_long(new)
        session = self._pipeline.output_processor.request_states[session_id]  # when it ends, this task is cancelled
        prepared = self._pipeline.prepare_input(session, new)
        for request in self._pipeline.add_input(session_id, prepared).reqs_to_add:
            await self._engine_core.add_request_async(request)


def _checked(item: Any) -> StreamingInput:
    if not isinstance(item, StreamingInput):
        raise ValidationError(
            f"the inputs of a session are StreamingInput objects, got {type(item).__name__}", param="prompt"
        )
    return item

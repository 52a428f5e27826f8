"""The outputs of the engine core on their way to the readers of an `AsyncLLM`.

`OutputHandler` is the task that processes what the core sends. `RequestOutputCollector` is the queue between that task
and the coroutine that awaits a request's outputs; a `Backlog` holds what that coroutine has not taken yet.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable

import msgspec

from quire.errors import EngineDeadError
from quire.frontend.client.base import AsyncEngineCoreClient
from quire.frontend.request_pipeline import RequestPipeline
from quire.logger import init_logger
from quire.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput, SampleLogprobs
from quire.sampling_params import RequestOutputKind
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequest

logger = init_logger(__name__)

OUTPUTS_PER_TURN = 16
"""Outputs that are processed before readers and sockets have their turn: a millisecond or less. With 32 or 128, or one
turn for both, a scrape beside 256 streams waited longer, and nothing else was better; with 8 it waited as long
(docs/performance.md)."""


class OutputHandler:
    """One task, started with the first call. An error in one batch of outputs costs the others nothing.

    When the core is gone for good the task ends, and every reader gets the error.
    """

    def __init__(self, engine_core: AsyncEngineCoreClient, pipeline: RequestPipeline) -> None:
        self._engine_core = engine_core
        self._pipeline = pipeline
        self._task: asyncio.Task[None] | None = None
        self.dead_error: EngineDeadError | None = None
        """The reason why no outputs will come any more; None while they do."""

    def start(self) -> None:
        """Starts the task on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="quire-output-handler")

    def note_shutdown(self) -> None:
        """Refuses requests from now on. From any thread."""
        self.dead_error = self.dead_error or EngineDeadError("the engine was shut down")

    def stop(self) -> None:
        """Stops taking outputs, too. Belongs to the loop's thread."""
        self.note_shutdown()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                outputs = await self._engine_core.get_output_async()
                try:
                    await self._process(outputs)
                except EngineDeadError:
                    raise
                except Exception:
                    logger.exception("%d outputs of the engine core were not processed", len(outputs.outputs))
        except EngineDeadError as e:
            self._die(e)
        except Exception as e:
            logger.exception("the link to the engine core failed")
            self._die(EngineDeadError(f"the link to the engine core failed: {type(e).__name__}: {e}"))

    async def _process(self, outputs: EngineCoreOutputs) -> None:
        num_left = len(outputs.outputs)
        for processed in self._pipeline.process(outputs, OUTPUTS_PER_TURN):
            if processed.reqs_to_abort:
                await self._engine_core.abort_requests_async(processed.reqs_to_abort)
            for request in processed.reqs_to_add:
                await self._add(request)
            num_left -= OUTPUTS_PER_TURN
            if num_left > 0:
                await asyncio.sleep(0)  # their readers
                await asyncio.sleep(0)  # and what came meanwhile, which else would wait for the next outputs' readers

    async def _add(self, request: EngineCoreRequest) -> None:
        """Sends a further request of a session; a failure ends that session."""
        try:
            await self._engine_core.add_request_async(request)
        except EngineDeadError:
            raise
        except Exception as e:
            self._pipeline.fail([request.request_id], e)

    def _die(self, error: EngineDeadError) -> None:
        self.dead_error = error
        self._pipeline.fail(list(self._pipeline.output_processor.request_states), error)


Output = RequestOutput | PoolingRequestOutput


class RequestOutputCollector:
    """Holds at most one output of a request: a reader that is slow gets one merged output, never a backlog.

    Deltas are joined; of cumulative outputs the latest counts. (Of a session it holds one per segment: at most as many
    as there were inputs.) After a finished output, or an exception, nothing more is taken in. An exception is raised to
    the reader when what came before it has been taken. Single-threaded: `put` and `get` belong to one event loop, and
    there is one reader.
    """

    __slots__ = (
        "_backlog",
        "_ended",
        "_error",
        "_is_delta",
        "_output",
        "_waiter",
        "is_final",
        "num_taken",
        "on_end",
        "request_id",
    )

    def __init__(self, output_kind: RequestOutputKind, request_id: str = "") -> None:
        self.request_id = request_id
        """Internal id of the request; of the parent, if there are n outputs."""
        self.num_taken = 0
        """Number of outputs the reader has taken."""
        self.is_final = False
        """True once the end has been put in, even if the reader has not taken it."""
        self.on_end: Callable[[], None] | None = None
        """Called when the end is put in."""
        self._is_delta = output_kind is RequestOutputKind.DELTA
        self._output: Output | None = None
        """The latest output that was not taken."""
        self._backlog: Backlog | None = None
        """`_output` and those before it, if there are any."""
        self._ended: deque[Output] = deque()
        """In a session: the last outputs of segments before that of `_output`."""
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_output(self) -> bool:
        """True if an output waits for the reader."""
        return self._output is not None

    def put(self, output: Output | Exception) -> None:
        """Makes an output available; merges it with one that was not taken yet. Ignored after the end."""
        if self.is_final:
            return
        if isinstance(output, Exception):
            self._error = output
            self.is_final = True
        else:
            held = self._output
            if isinstance(held, RequestOutput) and isinstance(output, RequestOutput):
                if _is_next_segment(held, output):
                    self._ended.append(self._take_held(held))
                else:
                    self._backlog = self._backlog or Backlog(held, self._is_delta)
                    self._backlog.add(output)
            self._output = output
            self.is_final = output.finished
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self.is_final and self.on_end is not None:
            self.on_end()

    def __aiter__(self) -> RequestOutputCollector:
        return self

    async def __anext__(self) -> Output:
        if self.is_final and self._output is None and self._error is None:
            raise StopAsyncIteration
        return await self.get()

    async def get(self) -> Output:
        """Returns the next output, when there is one. Raises the exception that was put in."""
        while (output := self.get_nowait()) is None:
            await self.wait()
        return output

    def wait(self) -> asyncio.Future[None]:
        """Returns a future that is done when something is put in. Called after `get_nowait` has returned None."""
        if self.is_final or (self._waiter is not None and not self._waiter.done()):
            why = "its last output was taken" if self.is_final else "another coroutine awaits it"
            raise RuntimeError(f"request {self.request_id} has no output to await: {why}")
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def get_nowait(self) -> Output | None:
        """Returns the next output; None if there is none yet. Raises the exception that was put in."""
        output = self._output
        if output is not None:
            if self._ended:
                output = self._ended.popleft()
            else:
                self._output = None
                if self._backlog is not None:
                    output = self._take_held(output)
            self.num_taken += 1
        elif self._error is not None:
            raise self._error
        return output

    def _take_held(self, latest: Output) -> Output:
        backlog, self._backlog = self._backlog, None
        return latest if backlog is None else backlog.join()


def _is_next_segment(held: RequestOutput, new: RequestOutput) -> bool:
    """Returns True if `new` has output after the end of `held`: a session has gone on."""
    ended = {completion.index for completion in held.outputs if completion.finish_reason is not None}
    return bool(ended) and any(completion.index in ended for completion in new.outputs)


JOIN_TEXTS_AT = 64


class Backlog:
    """The outputs of a request that were not taken yet, as one output; the n outputs of a prompt by index.

    Deltas are joined; of cumulative outputs the latest counts. However many there are, one more costs the same, and a
    token takes a few bytes: readers that take nothing slow nothing down (promise P10).
    """

    def __init__(self, first: RequestOutput, is_delta: bool) -> None:
        self._is_delta = is_delta
        self._latest = first
        self._prompt_logprobs = first.prompt_logprobs
        self._deltas: dict[int, _Delta] = {}
        self._completions: dict[int, CompletionOutput] = {}
        self.add(first)

    def add(self, output: RequestOutput) -> None:
        """Adds an output."""
        self._latest = output
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        for completion in output.outputs:
            self._completions[completion.index] = completion
            if self._is_delta:
                self._deltas.setdefault(completion.index, _Delta()).add(completion)

    def join(self) -> RequestOutput:
        """Returns all of them as one output."""
        completions = [self._completions[index] for index in sorted(self._completions)]
        if self._is_delta:
            completions = [self._deltas[completion.index].join(completion) for completion in completions]
        return msgspec.structs.replace(self._latest, outputs=completions, prompt_logprobs=self._prompt_logprobs)


class _Delta:
    """The parts of one of the n outputs that grow."""

    __slots__ = ("_logprobs", "_texts", "_token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids = array("i")
        self._logprobs: SampleLogprobs = []

    def add(self, completion: CompletionOutput) -> None:
        self._texts.append(completion.text)
        if len(self._texts) > JOIN_TEXTS_AT:
            self._texts = ["".join(self._texts)]
        self._token_ids.extend(completion.token_ids)
        self._logprobs += completion.logprobs or ()

    def join(self, latest: CompletionOutput) -> CompletionOutput:
        return msgspec.structs.replace(
            latest,
            text="".join(self._texts),
            token_ids=self._token_ids.tolist(),
            logprobs=None if latest.logprobs is None else self._logprobs,
        )

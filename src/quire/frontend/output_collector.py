"""The queue between the loop that makes outputs and a coroutine that awaits them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from quire.frontend.backlog import Backlog
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.sampling_params import RequestOutputKind

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
        """The internal id of what is awaited: of the parent, where there are n outputs."""
        self.num_taken = 0
        """How often the reader took something: a reader that reads makes it grow."""
        self.is_final = False
        """The end has been put in, whether or not the reader has taken it."""
        self.on_end: Callable[[], None] | None = None
        """Called when the end is put in."""
        self._is_delta = output_kind is RequestOutputKind.DELTA
        self._output: Output | None = None
        """The latest that was not taken."""
        self._backlog: Backlog | None = None
        """That and those before it, if there are any."""
        self._ended: deque[Output] = deque()
        """Of a session: the last outputs of segments before that of `_output`."""
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_output(self) -> bool:
        """Whether something waits for the reader."""
        return self._output is not None

    def put(self, output: Output | Exception) -> None:
        """Make an output available; merges it with one nobody has taken yet. Ignored after the end."""
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
        """The next output, when there is one. Raises the exception that was put in."""
        while (output := self.get_nowait()) is None:
            await self.wait()
        return output

    def wait(self) -> asyncio.Future[None]:
        """Done when something is put in. For a reader whom `get_nowait` has just told that there is nothing."""
        if self.is_final or (self._waiter is not None and not self._waiter.done()):
            why = "its last output was taken" if self.is_final else "another coroutine awaits it"
            raise RuntimeError(f"request {self.request_id} has no output to await: {why}")
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def get_nowait(self) -> Output | None:
        """The next output, None if there is none yet. Raises the exception that was put in."""
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
    """Whether `new` says more where `held` has come to an end: a session has gone on."""
    ended = {completion.index for completion in held.outputs if completion.finish_reason is not None}
    return bool(ended) and any(completion.index in ended for completion in new.outputs)

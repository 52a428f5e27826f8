"""Destinations of the outputs that a client's thread receives: a queue for a thread, a mailbox for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable

from quire.errors import EngineDeadError
from quire.wire.engine_core import EngineCoreOutputs

MAX_TURN_S = 0.005
"""Longest time that outputs which are ready are handed out before the rest of the loop has its turn."""


class QueueSink:
    """Outputs for one thread that waits for them."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[EngineCoreOutputs | EngineDeadError] = queue.SimpleQueue()

    def put_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Adds the outputs of a step."""
        self.queue.put(outputs)

    def put_end(self, error: EngineDeadError) -> None:
        """Ends the queue, because of `error`."""
        self.queue.put(error)


class LoopMailbox:
    """Outputs from one thread, which never blocks, for coroutines of one loop: that of the first `take`.

    Outputs that come while the loop is busy wake it once. `on_room` is called, on the loop, when a mailbox that was
    full (`capacity` outputs; it takes more all the same) is no longer.

    A core may put in faster than the loop takes out. What was ready when a turn began is handed out at once, so that
    slow readers get one merged output; then the rest of the loop has its turn, whatever came meanwhile. Without it no
    new request would be read, and no answer written, until the core is slower again.
    """

    def __init__(
        self,
        capacity: int = 0,
        on_room: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._on_room = on_room
        self._held: deque[EngineCoreOutputs] = deque()
        self._num_left_in_turn = 0
        """Number of outputs the present turn still hands out, if there is time."""
        self._turn_end = 0.0
        self._clock = clock
        self._end: EngineDeadError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wake_is_under_way = False

    @property
    def is_full(self) -> bool:
        """True if the thread should wait before it puts in more. From any thread."""
        return 0 < self._capacity <= len(self._held)

    def put_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Adds the outputs of a step. From the other thread."""
        self._held.append(outputs)
        self._notify()

    def put_end(self, error: EngineDeadError) -> None:
        """Ends the outputs, because of `error`. From the other thread."""
        self._end = error
        self._notify()

    def _notify(self) -> None:
        if self._loop is None or self._wake_is_under_way:
            return
        self._wake_is_under_way = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._wake_is_under_way = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> EngineCoreOutputs:
        """Returns the next outputs. Raises the error of the end, again and again, once all have been taken."""
        self._loop = asyncio.get_running_loop()
        if self._held and (not self._num_left_in_turn or self._clock() >= self._turn_end):
            self._num_left_in_turn = 0
            await asyncio.sleep(0)
        while not self._held:
            if self._end is not None:
                raise self._end
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        was_full = self.is_full
        if not self._num_left_in_turn:
            self._num_left_in_turn, self._turn_end = len(self._held), self._clock() + MAX_TURN_S
        self._num_left_in_turn -= 1
        outputs = self._held.popleft()
        if was_full and self._on_room is not None:
            self._on_room()
        return outputs

"""Answers to calls that workers begin at once and finish later, and reports of transfers: both come beside the steps.

Each worker sends its answer as one datagram, from whichever thread has it, on a socket that all workers of an engine
share. The executor's monitor reads them, because the core may wait for no step when they come.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from quire.errors import AdapterError, ServerError, make_error
from quire.wire.kv_transfer import KVConnectorOutput, TransferAggregator
from quire.wire.lora import AdapterInfo
from quire.wire.worker_calls import LateAnswer, TransferReport, decode_late, decode_reply, decode_result

T = TypeVar("T")

MAX_BYTES = 1 << 16
"""Longest datagram: the numbers of an adapter, the text of an error, or the ends of transfers."""


@dataclass
class _Waiting:
    """A call whose answers have not all come."""

    verb: str
    future: Future[Any]
    combine: Callable[[Sequence[Any]], Any]
    undo: Callable[[], None]
    results: dict[int, Any] = field(default_factory=dict)
    """Results by rank."""
    errors: dict[int, Exception] = field(default_factory=dict)


class TransferReports:
    """Passes on the reports of all workers as those of one. What comes before there is a callback waits for it."""

    def __init__(self, num_workers: int) -> None:
        self._lock = threading.Lock()
        self._aggregator = TransferAggregator(num_workers)
        self._early: list[KVConnectorOutput] = []
        self._callback: Callable[[KVConnectorOutput], None] = self._early.append

    def register_callback(self, callback: Callable[[KVConnectorOutput], None]) -> None:
        """Sets what gets the reports, on the thread that adds them."""
        with self._lock:
            self._callback = callback
            for report in self._early:
                callback(report)
            self._early.clear()

    def add(self, rank: int, report: KVConnectorOutput) -> None:
        """Takes the report of one worker."""
        with self._lock:
            if joined := self._aggregator.add(rank, report):
                self._callback(joined)


class LateAnswers:
    """Owns the socket, and the Futures of calls. A Future is done when all workers have answered."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        """`theirs`: the end that workers inherit."""
        self.transfers = TransferReports(num_workers)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._end: ServerError | None = None

    def fileno(self) -> int:
        """Returns the descriptor that can be read when there is an answer."""
        return self._ours.fileno()

    def expect(
        self,
        call_id: int,
        verb: str,
        combine: Callable[[Sequence[T]], T],
        undo: Callable[[], None] = lambda: None,
    ) -> Future[T]:
        """Returns the Future of a call that is about to be sent: `combine` of all results, by rank, or the error of the
        first worker that has one. `undo` is called if others have succeeded."""
        future: Future[T] = Future()
        with self._lock:
            if self._end is None:
                self._waiting[call_id] = _Waiting(verb, future, combine, undo)
        if self._end is not None and not future.done():
            future.set_exception(self._end)
        return future

    def take(self) -> None:
        """Takes in the answers and reports that have come."""
        with contextlib.suppress(BlockingIOError):
            while data := self._ours.recv(MAX_BYTES, socket.MSG_DONTWAIT):
                match decode_late(data):
                    case TransferReport(rank, output):
                        self.transfers.add(rank, output)
                    case answer:
                        self._note(answer)

    def _note(self, answer: LateAnswer) -> None:
        reply = decode_reply(answer.frames)
        with self._lock:
            waiting = self._waiting.get(reply.call_id)
            if waiting is None:
                return
            if reply.error is not None:
                message = reply.error if reply.error_type else f"worker {answer.rank}: {reply.error}"
                waiting.errors[answer.rank] = make_error(reply.error_type, message, ServerError)
            else:
                waiting.results[answer.rank] = decode_result(answer.frames, waiting.verb)
            if len(waiting.results) + len(waiting.errors) < self._num_workers:
                return
            del self._waiting[reply.call_id]
        _complete(waiting)

    def wake(self) -> None:
        """Makes the socket readable."""
        with contextlib.suppress(BlockingIOError):  # it is
            self.theirs.send(b"", socket.MSG_DONTWAIT)

    def fail_all(self, error: ServerError) -> None:
        """Ends all calls, and those to come, with an error: a worker is gone."""
        with self._lock:
            self._end = self._end or error
            waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.future.set_exception(error)

    def close(self) -> None:
        """Closes the socket."""
        self._ours.close()
        self.theirs.close()


def _complete(waiting: _Waiting) -> None:
    try:
        if waiting.errors:
            raise waiting.errors[min(waiting.errors)]
        result = waiting.combine([waiting.results[rank] for rank in sorted(waiting.results)])
    except Exception as e:
        if waiting.results:
            waiting.undo()
        waiting.future.set_exception(e)
    else:
        waiting.future.set_result(result)


def join_infos(infos: Sequence[AdapterInfo]) -> AdapterInfo:
    """Returns what all workers have of an adapter. Raises AdapterError if they have read different files."""
    first = infos[0]
    if any(info.digest != first.digest for info in infos):
        raise AdapterError(
            f"the files of adapter {first.lora_int_id} were changed while {len(infos)} workers read them; load it again"
        )
    return msgspec.structs.replace(first, num_bytes=sum(info.num_bytes for info in infos))

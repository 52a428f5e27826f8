"""What becomes of a message that has arrived at the core, before its loop sees it (checklist S3-EP-039…041).

Runs on the input thread. Whatever arrives, nothing is raised: a request that cannot be prepared is answered with an
error of its own, and a message that is none is dropped and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from queue import Queue, SimpleQueue
from typing import Any, NamedTuple

import msgspec

from quire.engine.heartbeat import HeartbeatWriter
from quire.engine.request import Request
from quire.errors import error_name
from quire.failpoints import failpoint
from quire.logger import init_logger
from quire.wire.engine_core import EngineCoreRequest, EngineCoreRequestType
from quire.wire.serial import Frame, MsgpackDecoder, WireError

logger = init_logger(__name__)

InputItem = tuple[EngineCoreRequestType, Any]
"""A type and what belongs to it: ADD (Request, wave) or RefusedRequest · ABORT ids · UTILITY UtilityCall ·
EXECUTOR_FAILED why · WAKEUP ClientLink or None."""


class RefusedRequest(NamedTuple):
    """An ADD that cannot be served: its client is to be told, unless the id is of a request that lives."""

    client_index: int
    request_id: str
    message: str
    error_type: str = ""
    """Its class in `quire.errors`."""


class ClientLink(NamedTuple):
    """A frontend is gone, and all its requests are to be aborted; or it is back."""

    client_index: int
    is_up: bool


class UtilityCall(NamedTuple):
    """A control call, and where its answer goes."""

    client_index: int
    call_id: int
    method: str
    args: tuple[Any, ...]


class DropCounter:
    """How many messages were dropped, by reason. Written by the input thread and the loop, read by anyone."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def drop(self, reason: str, detail: object) -> None:
        """Count one, and log it if it is the first, second, fourth, eighth … of its reason."""
        self.counts[reason] += 1
        count = self.counts[reason]
        if count & (count - 1) == 0:
            logger.warning("a message was dropped (%s, number %d): %s", reason, count, detail)


class MessageIntake:
    """Decodes messages, prepares requests, and queues both for the loop.

    An abort goes into both queues: `aborts_queue` is looked at even while a step runs, `input_queue` keeps its place
    after the request it aborts. Aborting twice does no harm.
    """

    def __init__(
        self,
        preprocess: Callable[[EngineCoreRequest], tuple[Request, int]],
        input_queue: SimpleQueue[InputItem],
        aborts_queue: Queue[str | list[str]],
        dropped: DropCounter,
        heartbeat: HeartbeatWriter | None = None,
    ) -> None:
        self._preprocess = preprocess
        self._input_queue = input_queue
        self._aborts_queue = aborts_queue
        self._dropped = dropped
        self._heartbeat = heartbeat if heartbeat is not None else HeartbeatWriter()
        self._add_decoder = MsgpackDecoder(EngineCoreRequest)
        self._abort_decoder = MsgpackDecoder(list[str])
        self._utility_decoder = MsgpackDecoder(tuple[int, int, str, tuple[Any, ...]])
        self._takers = {b"\x00": self._take_add, b"\x01": self._take_abort, b"\x03": self._take_utility}

    def take_message(self, client_index: int, frames: Sequence[Frame]) -> None:
        """Take in a message [type, msgpack, *arrays] of a client."""
        failpoint("core.input.decode")
        taker = self._takers.get(bytes(frames[0]) if frames and len(frames[0]) == 1 else b"")
        if taker is None:
            self._dropped.drop("unknown type", f"{len(frames)} frames from client {client_index}")
            return
        try:
            taker(client_index, frames[1:])
        except WireError as e:
            self._dropped.drop("corrupt", f"client {client_index}: {e}")

    def _take_add(self, client_index: int, frames: Sequence[Frame]) -> None:
        try:
            core_request = self._add_decoder.decode(frames)
        except WireError as e:
            request_id = _request_id_of(frames)
            if request_id is not None:
                self._refuse(client_index, request_id, e)
            raise
        core_request.client_index = client_index  # answers go where the question came from, whatever it says
        self._heartbeat.begin_intake(core_request.request_id)
        try:
            prepared = self._preprocess(core_request)
        except Exception as e:
            self._refuse(client_index, core_request.request_id, e)
        else:
            self._input_queue.put((EngineCoreRequestType.ADD, prepared))
            failpoint("core.input.queued", core_request.request_id)
        self._heartbeat.end_intake()

    def _refuse(self, client_index: int, request_id: str, error: Exception) -> None:
        refused = RefusedRequest(client_index, request_id, str(error) or type(error).__name__, error_name(error))
        self._input_queue.put((EngineCoreRequestType.ADD, refused))

    def _take_abort(self, client_index: int, frames: Sequence[Frame]) -> None:
        request_ids = self._abort_decoder.decode(frames)
        self._aborts_queue.put(request_ids)
        self._input_queue.put((EngineCoreRequestType.ABORT, request_ids))

    def _take_utility(self, client_index: int, frames: Sequence[Frame]) -> None:
        _, call_id, method, args = self._utility_decoder.decode(frames)
        self._input_queue.put((EngineCoreRequestType.UTILITY, UtilityCall(client_index, call_id, method, args)))


def _request_id_of(frames: Sequence[Frame]) -> str | None:
    """The id of a request that is no valid one otherwise, if as much can be read."""
    try:
        fields = msgspec.msgpack.decode(frames[0])
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError, OverflowError):
        return None
    is_list = isinstance(fields, list) and bool(fields)
    return fields[0] if is_list and isinstance(fields[0], str) else None

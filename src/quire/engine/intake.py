"""Decodes messages from clients before the core's loop takes them in, on the input thread.

Nothing is raised, whatever arrives: a request that cannot be prepared is answered with an error, and a message that
cannot be read is dropped and counted.
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
from quire.wire.handshake import COORDINATOR_READY
from quire.wire.serial import Frame, MsgpackDecoder, WireError

logger = init_logger(__name__)

InputItem = tuple[EngineCoreRequestType, Any]
"""A type and its payload: ADD (Request, wave) or RefusedRequest · ABORT ids · UTILITY UtilityCall · EXECUTOR_FAILED
reason · WAKEUP ClientLink or None · START_DP_WAVE wave, or None for a coordinator that is ready."""


class RefusedRequest(NamedTuple):
    """An ADD that cannot be served. Its client gets an error, unless the id belongs to a live request."""

    client_index: int
    request_id: str
    message: str
    error_type: str = ""
    """Name of the error's class in `quire.errors`."""


class ClientLink(NamedTuple):
    """A frontend has disconnected, and all its requests must be aborted; or it has reconnected."""

    client_index: int
    is_up: bool


class UtilityCall(NamedTuple):
    """A control call, and the client that its answer goes to."""

    client_index: int
    call_id: int
    method: str
    args: tuple[Any, ...]


class DropCounter:
    """Counts dropped messages by reason. Written by the input thread and the loop, read by any thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def drop(self, reason: str, detail: object) -> None:
        """Counts one, and logs it if it is the first, second, fourth, eighth … of its reason."""
        self.counts[reason] += 1
        count = self.counts[reason]
        if count & (count - 1) == 0:
            logger.warning("a message was dropped (%s, number %d): %s", reason, count, detail)


class MessageIntake:
    """Decodes messages, prepares requests, and queues both for the loop.

    An abort goes into both queues: `aborts_queue` is read even while a step runs, and `input_queue` keeps the order of
    an abort and the request it aborts. Aborting twice has no effect.
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
        """Handles one message [type, msgpack, *arrays] of a client."""
        failpoint("core.input.decode")
        taker = self._takers.get(bytes(frames[0]) if frames and len(frames[0]) == 1 else b"")
        if taker is None:
            self._dropped.drop("unknown type", f"{len(frames)} frames from client {client_index}")
            return
        try:
            taker(client_index, frames[1:])
        except WireError as e:
            self._dropped.drop("corrupt", f"client {client_index}: {e}")

    def take_order(self, frames: Sequence[Frame]) -> None:
        """Handles a message of the coordinator: that it is ready, or that a wave has begun."""
        if len(frames) == 1 and frames[0] == COORDINATOR_READY:
            self._input_queue.put((EngineCoreRequestType.START_DP_WAVE, None))
        elif len(frames) == 2 and frames[0] == EngineCoreRequestType.START_DP_WAVE.value:
            try:
                wave = msgspec.msgpack.decode(frames[1], type=int)
            except msgspec.MsgspecError as e:
                self._dropped.drop("corrupt", f"coordinator: {e}")
            else:
                self._input_queue.put((EngineCoreRequestType.START_DP_WAVE, wave))
        else:
            self._dropped.drop("unknown type", f"{len(frames)} frames from the coordinator")

    def _take_add(self, client_index: int, frames: Sequence[Frame]) -> None:
        try:
            core_request = self._add_decoder.decode(frames)
        except WireError as e:
            request_id = _request_id_of(frames)
            if request_id is not None:
                self._refuse(client_index, request_id, e)
            raise
        core_request.client_index = client_index  # answers go to the connection that the request came from
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
    """Returns the id in a request that is not valid otherwise, or None if it cannot be read."""
    try:
        fields = msgspec.msgpack.decode(frames[0])
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError, OverflowError):
        return None
    is_list = isinstance(fields, list) and bool(fields)
    return fields[0] if is_list and isinstance(fields[0], str) else None

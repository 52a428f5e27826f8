"""The body of /debug/state: the core's snapshot, the frontend's data on the same requests, and requests that ended.

A snapshot costs the engine's loop up to a millisecond, and the number of watchers must not matter: `SnapshotSource`
asks the core once for all calls within a quarter of a second, and never twice at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.errors import UnavailableError
from quire.frontend.http.membership import Peers
from quire.frontend.metrics.publish.stat_loggers import EndedRequest, RecentRequests
from quire.frontend.request_state import RequestState
from quire.wire.stats import BlockMap, EngineSnapshot, RequestSnapshot

MIN_INTERVAL_S = 0.25
ANSWER_TIMEOUT_S = 10.0
"""Time for the core to answer. It answers between two steps, and a step of a long prompt may take seconds."""
PAUSE_WORDS = ("no", "new requests wait", "everything waits")
STAMPS = ("queued", "scheduled", "first_token", "last_token")
Stamps = Sequence[float]
"""Times of a request on the core's clock, in the order of `STAMPS`; 0 for events that are still to come."""
Ints = npt.NDArray[np.integer[Any]]


class SnapshotSource:
    """Takes snapshots of one core. Belongs to the event loop of its first call."""

    def __init__(self, engine: AsyncLLM, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._asked_at = 0.0
        self._task: asyncio.Task[EngineSnapshot] | None = None
        """The latest call to the core, perhaps with its result."""

    async def get(self, timeout_s: float = ANSWER_TIMEOUT_S) -> EngineSnapshot:
        """Returns a snapshot that is at most `MIN_INTERVAL_S` old.

        Raises UnavailableError if the core does not answer in time, EngineDeadError if it is gone for good.
        """
        task = self._task
        if task is None or (task.done() and self._is_stale(task)):
            self._asked_at = self._clock()
            task = self._task = asyncio.create_task(self._engine.get_snapshot())
            task.add_done_callback(_note_result)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise UnavailableError("the engine did not answer: it is in a long step, or being restarted")
        return task.result()

    def _is_stale(self, task: asyncio.Task[EngineSnapshot]) -> bool:
        failed = task.cancelled() or task.exception() is not None
        return failed or self._clock() - self._asked_at >= MIN_INTERVAL_S


def _note_result(task: asyncio.Task[EngineSnapshot]) -> None:
    """Retrieves the error of a call that no caller awaits any more, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def describe_blocks(blocks: BlockMap) -> dict[str, Any]:
    """Returns the map with equal neighbours merged: `runs` are [listed blocks, references, 1 if they can be hit]."""
    cells = np.frombuffer(blocks.references, np.uint8) + 256 * np.frombuffer(blocks.is_cached, np.uint8).astype(int)
    starts, lengths = find_runs(cells, 0)
    values = cells[starts]
    return {
        "total": blocks.num_blocks,
        "free": blocks.num_free,
        "cached": blocks.num_cached,
        "touched": blocks.num_touched,
        "stride": blocks.stride,
        "runs": np.stack((lengths, values & 255, values >> 8), axis=1).tolist(),
    }


class RequestWatch:
    """Collects the frontends' data on requests, which the core does not have. Belongs to the event loop."""

    def __init__(self, engine: AsyncLLM, recent: RecentRequests, peers: Peers) -> None:
        self._engine = engine
        self._recent = recent
        self._peers = peers

    def look_here(self, request_ids: Sequence[str], after: int) -> tuple[dict[str, Stamps], list[EndedRequest]]:
        """Returns the stamps of those requests that belong to this process, and its requests that ended after number
        `after`."""
        states = self._engine.pipeline.output_processor.request_states
        stamps = {i: _stamps_of(states[i]) for i in request_ids if i in states}
        return stamps, self._recent.after(after)

    async def look(self, request_ids: Sequence[str], after: int) -> tuple[dict[str, Stamps], list[EndedRequest]]:
        """Returns the same for all processes of the server."""
        horizon = self._recent.now()
        stamps, ended = self.look_here(request_ids, after)
        others = await self._peers.gather("watch", request_ids, after)
        for their_stamps, their_ended in others:
            stamps |= their_stamps
            ended += msgspec.convert(their_ended, list[EndedRequest])
        if others:  # a caller that asks for later ones next must not miss one that another process reports late
            ended = sorted((e for e in ended if e.number <= horizon), key=lambda e: e.number)
        return stamps, ended


def _stamps_of(state: RequestState) -> Stamps:
    stats = state.stats
    return [getattr(stats, f"{name}_ts", 0.0) for name in STAMPS]


def describe_request(request: RequestSnapshot, stamps: Stamps | None, wall_offset: float) -> dict[str, Any]:
    """Returns one unfinished request. `blocks` are [first id, number of consecutive ids]."""
    ids = np.frombuffer(request.block_ids, "<u4").astype(int)
    starts, lengths = find_runs(ids, 1)
    times = [stamp + wall_offset if stamp else None for stamp in stamps or [0.0] * len(STAMPS)]
    return {
        "id": request.external_req_id,
        "key": request.request_id,
        "place": request.place,
        "prompt_tokens": request.num_prompt_tokens,
        "computed_tokens": request.num_computed_tokens,
        "cached_tokens": max(0, request.num_cached_tokens),
        "external_tokens": request.num_external_tokens,
        "external_source": request.external_source or None,
        "output_tokens": request.num_tokens - request.num_prompt_tokens,
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "preemptions": request.num_preemptions,
        "arrival_time": request.arrival_time,
        **{f"{name}_time": value for name, value in zip(STAMPS, times, strict=True)},
        "num_blocks": request.num_blocks,
        "blocks": np.stack((ids[starts], lengths), axis=1).tolist(),
    }


def find_runs(values: Ints, step: int) -> tuple[Ints, Ints]:
    """Returns (starts, lengths) of the runs in which each value is its predecessor + `step`."""
    if not len(values):
        return np.zeros(0, int), np.zeros(0, int)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(values) != step) + 1))
    return starts, np.diff(np.append(starts, len(values)))


def describe_engine(
    snapshot: EngineSnapshot, stamps: Mapping[str, Stamps], *, facts: Mapping[str, Any], ended: Sequence[Any]
) -> dict[str, Any]:
    """Returns the body of /debug/state. `stamps` are those of known requests by internal id; `facts` do not change. All
    times are wall clock."""
    wall_offset = snapshot.time - snapshot.timestamp
    return {
        **facts,
        "time": snapshot.time,
        "paused": PAUSE_WORDS[snapshot.pause_state],
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "max_num_seqs": snapshot.max_num_seqs,
        "max_num_scheduled_tokens": snapshot.max_num_scheduled_tokens,
        "kv_cache": {**describe_blocks(snapshot.blocks), "held": snapshot.held_blocks},
        "requests": [describe_request(r, stamps.get(r.request_id), wall_offset) for r in snapshot.requests],
        "requests_left_out": snapshot.num_left_out,
        "ended": ended,
    }

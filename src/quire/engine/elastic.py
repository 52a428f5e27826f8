"""Another number of engines that share experts, as one of the engines sees it.

The engines of the next group are prepared beside the steps of the present one: new ones start, the others read the
experts that they will have. Then each is ordered to switch. All pause at the same step (`waves.py`), leave the group,
put the new experts in place, and join the next group, which computes when all of its engines have joined. Requests and
KV cache stay where they are.

======== ======== =========================================================================
worker   scaling  stages
======== ======== =========================================================================
existing up       PREPARE → SYNC_KV_CACHE_MEMORY_SIZE → COMMIT_SCALE_UP → COMPLETE
existing down     PREPARE → COMMIT_SCALE_DOWN → COMPLETE
removing down     PREPARE → COMPLETE, and its process ends
new      up       PRE_KV_INIT → PREPARE → COMPLETE
======== ======== =========================================================================

An engine that dies after the order is started again in the next group, and never comes back to the present one. So an
engine that has the order does not wait for the joint pause once it is alone: between steps it may switch whenever the
present group is incomplete, because no step of that can succeed any more.
"""

from __future__ import annotations

from concurrent.futures import Future
from enum import Enum
from typing import Literal, NamedTuple

from quire.errors import ClientError
from quire.wire.elastic import ReconfigureDistributedRequest, ReconfigureRankType

WorkerType = Literal["new", "existing", "removing"]
ScaleType = Literal["up", "down"]


class Stage(Enum):
    """Stages of an engine, as in the table above."""

    PRE_KV_INIT = "pre_kv_init"
    """No KV cache yet: a new engine takes the size of the others'."""
    PREPARE = "prepare"
    """An existing engine reads its next experts, beside its steps; a new one starts."""
    SYNC_KV_CACHE_MEMORY_SIZE = "sync_kv_cache_memory_size"
    """Experts are there; new engines start, with a KV cache of the size of this one's."""
    COMMIT_SCALE_UP = "commit_scale_up"
    """Ordered to switch: the joint pause is awaited."""
    COMMIT_SCALE_DOWN = "commit_scale_down"
    COMPLETE = "complete"


class ScalingEffect(Enum):
    """Actions of the caller after progress, in the order given."""

    READY = "ready"
    """Answers that this engine is prepared."""
    PAUSE = "pause"
    """Pauses together with the other engines of the present group."""
    SWITCH = "switch"
    """Leaves the group, puts the prepared experts in place, joins the next group, and reports RECONFIGURE_FINISHED."""
    END = "end"
    """Leaves the group, reports SHUTDOWN_COMPLETE, and ends the process."""


class ElasticEPScalingState(NamedTuple):
    """The state of one engine. `progress` returns the next one. Pure."""

    worker_type: WorkerType
    scale_type: ScaleType
    stage: Stage = Stage.PREPARE
    is_pausing: bool = False
    """True once the joint pause has been asked for."""
    is_ready: bool = False
    """True once the engine was reported as prepared."""

    @classmethod
    def for_request(cls, request: ReconfigureDistributedRequest, rank: int, size: int) -> ElasticEPScalingState:
        """Returns the state of an engine of the present group, of `size` engines, that is asked to prepare."""
        asked, new_size = request.new_data_parallel_rank, request.new_data_parallel_size
        is_removed = asked == ReconfigureRankType.SHUTDOWN_CURRENT_RANK or rank >= new_size
        return cls("removing" if is_removed else "existing", "up" if new_size >= size else "down")

    @property
    def is_complete(self) -> bool:
        """True once nothing is left to do."""
        return self.stage is Stage.COMPLETE

    def on_kv_size(self) -> ElasticEPScalingState:
        """Handles that a new engine has taken the size of the KV cache of the others."""
        return self._replace(stage=Stage.PREPARE) if self.stage is Stage.PRE_KV_INIT else self

    def on_join(self) -> ElasticEPScalingState:
        """Handles that a new engine has joined the next group."""
        return self._replace(stage=Stage.COMPLETE) if self.stage is Stage.PREPARE else self

    def progress(self, *, has_experts: bool, is_ordered: bool, is_at_rest: bool) -> ScalingTurn:
        """Returns the state and the actions that follow, for an engine of the present group.

        `has_experts`: the next experts are there, or it needs none. `is_ordered`: it has been ordered to switch.
        `is_at_rest`: no step of the present group needs this engine: all are paused, or the group is incomplete.
        """
        state, effects = self, list[ScalingEffect]()
        if state.is_complete or not has_experts:
            return ScalingTurn(state)
        if not state.is_ready:
            state = state._replace(is_ready=True)
            effects.append(ScalingEffect.READY)
            if state.worker_type == "existing" and state.scale_type == "up":
                state = state._replace(stage=Stage.SYNC_KV_CACHE_MEMORY_SIZE)
        if not is_ordered:
            return ScalingTurn(state, tuple(effects))
        if state.worker_type == "existing":
            is_up = state.scale_type == "up"
            state = state._replace(stage=Stage.COMMIT_SCALE_UP if is_up else Stage.COMMIT_SCALE_DOWN)
        if is_at_rest:
            effects.append(ScalingEffect.END if state.worker_type == "removing" else ScalingEffect.SWITCH)
            state = state._replace(stage=Stage.COMPLETE)
        elif not state.is_pausing:
            effects.append(ScalingEffect.PAUSE)
            state = state._replace(is_pausing=True)
        return ScalingTurn(state, tuple(effects))


class ScalingTurn(NamedTuple):
    """The state after progress, and what is to be done."""

    state: ElasticEPScalingState
    effects: tuple[ScalingEffect, ...] = ()


class Resizing:
    """A change of the number of engines in which an engine of the present group takes part. Belongs to one thread."""

    def __init__(
        self, request: ReconfigureDistributedRequest, rank: int, size: int, experts: Future[None] | None
    ) -> None:
        """`experts` ends when the next experts are there. An engine that is removed needs none."""
        self.request = request
        self.is_ordered = False
        self.prepared: Future[str] = Future()
        """The answer to the request: a key that names the rank."""
        self.switched: Future[None] = Future()
        """The answer to the order."""
        self._rank, self._experts = rank, experts
        self._state = ElasticEPScalingState.for_request(request, rank, size)

    @staticmethod
    def is_removal(request: ReconfigureDistributedRequest, rank: int, size: int) -> bool:
        """Returns whether the request removes this engine."""
        return ElasticEPScalingState.for_request(request, rank, size).worker_type == "removing"

    @property
    def is_complete(self) -> bool:
        """True once this engine has switched, or ends."""
        return self._state.is_complete

    @property
    def is_prepared(self) -> bool:
        """True if this engine could switch."""
        return self.prepared.done() and self.prepared.exception() is None

    @property
    def is_leaving(self) -> bool:
        """True from the order until this engine has switched."""
        return self.is_ordered and not self.is_complete

    def progress(self, *, is_at_rest: bool) -> tuple[ScalingEffect, ...]:
        """Returns what this engine has to do now, as `ElasticEPScalingState.progress` does."""
        if self.prepared.done() and self.prepared.exception() is not None:
            return ()
        if self._experts is not None and self._experts.done() and (error := self._experts.exception()) is not None:
            self.prepared.set_exception(error)
            return ()
        has_experts = self._experts is None or self._experts.done()
        turn = self._state.progress(has_experts=has_experts, is_ordered=self.is_ordered, is_at_rest=is_at_rest)
        self._state = turn.state
        if ScalingEffect.READY in turn.effects:
            self.prepared.set_result(f"eep_ready/{self._rank}")
        return tuple(effect for effect in turn.effects if effect is not ScalingEffect.READY)

    def discard(self) -> None:
        """Gives the change up. Raises ClientError once this engine has the order to switch."""
        if self.is_ordered:
            raise ClientError("the number of engines is being changed: what is prepared cannot be discarded any more")
        if not self.prepared.done():
            self.prepared.set_exception(ClientError("the change of the number of engines was given up"))

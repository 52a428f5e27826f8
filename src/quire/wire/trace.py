"""What an engine core noted of its steps and its requests, for people to look at. Stamps are CLOCK_MONOTONIC."""

from __future__ import annotations

import msgspec


class StepTrace(msgspec.Struct, array_like=True, gc=False):
    """One step, from being decided on to its result."""

    start: float
    scheduled: float
    """The end of deciding; the forward pass begins."""
    forwarded: float
    """The end of the forward pass, and the start of sampling; as `updating` where the two are one."""
    updating: float
    """The result is there."""
    end: float
    num_tokens: int
    num_requests: int
    running: int
    waiting: int
    used_blocks: int


class PhaseTrace(msgspec.Struct, array_like=True, gc=False):
    """Part of the life of one request: it was queued, computed a chunk of its prompt, generated, was preempted."""

    request_id: str
    phase: str
    """"queued", "prefill", "decode", "preempted"."""
    start: float
    end: float
    num_tokens: int = 0
    """Computed in a chunk, or generated."""
    num_computed: int = 0
    """Tokens that were there before a chunk."""
    is_resumed: bool = False
    """A chunk that computes again what a preemption has taken."""


class TraceWindow(msgspec.Struct, array_like=True, gc=False):
    """What happened between `start` and `end`, as far as it was kept."""

    start: float
    end: float
    steps: list[StepTrace]
    phases: list[PhaseTrace]
    num_blocks: int = 0

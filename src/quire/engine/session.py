"""Streaming-input sessions in the core: requests whose prompt comes in several inputs.

A *segment* is one input and the outputs that answer it. It is scheduled, preempted and stopped like a request of its
own whose prompt is all that came before (`EngineCoreRequest.continued`), with its own sampling parameters and output
indices. When it has ended, the session rests: it keeps its blocks while nobody else needs them, and waits for the next
input. The worker hears nothing of sessions: it forgets the request and meets it again as a new one with tokens already
computed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from quire.wire.engine_core import EngineCoreRequest

if TYPE_CHECKING:
    from quire.engine.request import RequestStatus


class Session:
    """Inputs that wait for the current segment to end, in the order they came."""

    __slots__ = ("end_status", "is_closed", "queued")

    def __init__(self) -> None:
        self.queued: deque[EngineCoreRequest] = deque()
        self.is_closed = False
        """The last input has come."""
        self.end_status: RequestStatus | None = None
        """How the last segment ended."""

    @property
    def closes_next(self) -> bool:
        """Whether the next input is the empty one that says there will be no more."""
        return bool(self.queued) and not self.queued[0].prompt_token_ids

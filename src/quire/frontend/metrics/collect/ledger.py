"""The ledger of one frontend: every request that came, and what became of it (promise P12).

Its unit is the request as the engine core sees it: one that asks for n outputs counts n times, a session once. At every
moment between two turns of the frontend's loop

    received = accepted + rejected + in admission        accepted = finished + live
    generated tokens = delivered + discarded

where the live ones are counted by looking, not by subtracting. Counting costs nothing and is never off.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import msgspec

from quire.errors import (
    ClientError,
    DeadlineExceededError,
    EngineDeadError,
    OverloadedError,
    PromptTooLongError,
    SlowClientError,
)
from quire.wire.engine_core import FINISH_REASON_STRINGS, FinishReason

REJECTION_REASONS = (
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_num_reserved_tokens",
    "max_requests_per_key",
    "max_tokens_per_key",
    "invalid",
    "prompt_too_long",
    "deadline",
    "engine_dead",
    "cancelled",
    "error",
    "lost",
)
"""The last one: of a process of a server that ended before it had decided."""
FINISH_REASONS = (*FINISH_REASON_STRINGS, "deadline", "slow_client")
DISCARD_REASONS = ("stop_string", "error")


def add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Name by name; what is 0 in both may be missing."""
    counts = Counter(one)
    counts.update(other)
    return counts


class RequestLedger(msgspec.Struct, array_like=True, gc=False):
    """Plain numbers, by whoever sees a request come or go. Belongs to one thread."""

    num_received: int = 0
    num_in_admission: int = 0
    """Received, and neither accepted nor rejected yet."""
    num_accepted: int = 0
    rejected: dict[str, int] = msgspec.field(default_factory=Counter)
    """By one of REJECTION_REASONS."""
    finished: dict[str, int] = msgspec.field(default_factory=Counter)
    """By one of FINISH_REASONS."""
    num_delivered_tokens: int = 0
    """Part of an answer."""
    discarded_tokens: dict[str, int] = msgspec.field(default_factory=Counter)
    """Generated for a live request and no part of its answer, by one of DISCARD_REASONS."""
    num_late_tokens: int = 0
    """Generated for a request that had ended here."""

    def plus(self, other: RequestLedger) -> RequestLedger:
        """Both in one, which is new."""
        return RequestLedger(
            self.num_received + other.num_received,
            self.num_in_admission + other.num_in_admission,
            self.num_accepted + other.num_accepted,
            add_counts(self.rejected, other.rejected),
            add_counts(self.finished, other.finished),
            self.num_delivered_tokens + other.num_delivered_tokens,
            add_counts(self.discarded_tokens, other.discarded_tokens),
            self.num_late_tokens + other.num_late_tokens,
        )

    def receive(self, num_requests: int = 1) -> Receipt:
        """So many came, in one message. The receipt says what becomes of them."""
        self.num_received += num_requests
        self.num_in_admission += num_requests
        return Receipt(self, num_requests)

    def finish(self, finish_reason: FinishReason, error: Exception | None = None) -> None:
        """An accepted request has ended, with `error` if its time or its reader's was over."""
        if isinstance(error, DeadlineExceededError):
            self.finished["deadline"] += 1
        elif isinstance(error, SlowClientError):
            self.finished["slow_client"] += 1
        else:
            self.finished[FINISH_REASON_STRINGS[finish_reason]] += 1


class Receipt:
    """Requests that are in admission: each is accepted or rejected, once."""

    __slots__ = ("_ledger", "_num_undecided")

    def __init__(self, ledger: RequestLedger, num_undecided: int) -> None:
        self._ledger = ledger
        self._num_undecided = num_undecided

    def accept_one(self) -> None:
        """One of them is live from now on."""
        if not self._num_undecided:  # it asked for more outputs than was known when it came
            self._ledger.num_received += 1
        else:
            self._num_undecided -= 1
            self._ledger.num_in_admission -= 1
        self._ledger.num_accepted += 1

    def reject(self, error: BaseException | None) -> None:
        """What is undecided will not be served, because of `error`. Does nothing where all is decided."""
        if self._num_undecided:
            self._ledger.rejected[rejection_reason(error)] += self._num_undecided
            self._ledger.num_in_admission -= self._num_undecided
            self._num_undecided = 0


def rejection_reason(error: BaseException | None) -> str:
    """One of REJECTION_REASONS. None stands for a client that left."""
    match error:
        case OverloadedError():
            return str(error.param)
        case DeadlineExceededError():
            return "deadline"
        case EngineDeadError():
            return "engine_dead"
        case PromptTooLongError():
            return "prompt_too_long"
        case ClientError() | TypeError() | ValueError():
            return "invalid"
        case None | asyncio.CancelledError() | GeneratorExit():
            return "cancelled"
        case _:
            return "error"

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
)
FINISH_REASONS = (*FINISH_REASON_STRINGS, "deadline", "slow_client")
DISCARD_REASONS = ("stop_string", "error")


class RequestLedger:
    """Plain numbers, by whoever sees a request come or go. Belongs to one thread."""

    def __init__(self) -> None:
        self.num_received = 0
        self.num_in_admission = 0
        """Received, and neither accepted nor rejected yet."""
        self.num_accepted = 0
        self.rejected: Counter[str] = Counter()
        """By one of REJECTION_REASONS."""
        self.finished: Counter[str] = Counter()
        """By one of FINISH_REASONS."""
        self.num_delivered_tokens = 0
        """Part of an answer."""
        self.discarded_tokens: Counter[str] = Counter()
        """Generated for a live request and no part of its answer, by one of DISCARD_REASONS."""
        self.num_late_tokens = 0
        """Generated for a request that had ended here."""

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

"""The ledger of one frontend: counts of every request received and of its fate (promise P12).

Its unit is the request as the engine core sees it: a request for n outputs counts n times, a session once. At every
moment between two turns of the event loop

received = accepted + rejected + in admission accepted = finished + live generated tokens = delivered + discarded

where live requests are counted by looking at them, not by subtracting. Counting is cheap and never switched off.
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
"""The last one, `lost`, stands for a request whose API process exited before it was decided."""
FINISH_REASONS = (*FINISH_REASON_STRINGS, "deadline", "slow_client")
DISCARD_REASONS = ("stop_string", "error")


def add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Returns the sums by name. A name that is 0 in both may be missing."""
    counts = Counter(one)
    counts.update(other)
    return counts


class RequestLedger(msgspec.Struct, array_like=True, gc=False):
    """Counts of requests and tokens. Belongs to one thread."""

    num_received: int = 0
    num_in_admission: int = 0
    """Requests received and neither accepted nor rejected yet."""
    num_accepted: int = 0
    rejected: dict[str, int] = msgspec.field(default_factory=Counter)
    """Counts by the names in REJECTION_REASONS."""
    finished: dict[str, int] = msgspec.field(default_factory=Counter)
    """Counts by the names in FINISH_REASONS."""
    num_delivered_tokens: int = 0
    """Tokens that became part of an answer."""
    discarded_tokens: dict[str, int] = msgspec.field(default_factory=Counter)
    """Tokens generated for a live request that are no part of its answer, by the names in DISCARD_REASONS."""
    num_late_tokens: int = 0
    """Tokens generated for a request that had already finished here."""

    def plus(self, other: RequestLedger) -> RequestLedger:
        """Returns the sum of both as a new ledger."""
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
        """Counts requests received in one message. The receipt accepts or rejects each of them."""
        self.num_received += num_requests
        self.num_in_admission += num_requests
        return Receipt(self, num_requests)

    def finish(self, finish_reason: FinishReason, error: Exception | None = None) -> None:
        """Counts the end of an accepted request; `error` if it ran out of time or its client read too slowly."""
        if isinstance(error, DeadlineExceededError):
            self.finished["deadline"] += 1
        elif isinstance(error, SlowClientError):
            self.finished["slow_client"] += 1
        else:
            self.finished[FINISH_REASON_STRINGS[finish_reason]] += 1


class Receipt:
    """Requests that are in admission. Each is accepted or rejected, once."""

    __slots__ = ("_ledger", "_num_undecided")

    def __init__(self, ledger: RequestLedger, num_undecided: int) -> None:
        self._ledger = ledger
        self._num_undecided = num_undecided

    def accept_one(self) -> None:
        """Counts one of them as accepted."""
        if not self._num_undecided:  # it asked for more outputs than was known when it came
            self._ledger.num_received += 1
        else:
            self._num_undecided -= 1
            self._ledger.num_in_admission -= 1
        self._ledger.num_accepted += 1

    def reject(self, error: BaseException | None) -> None:
        """Rejects the undecided ones because of `error`. Does nothing if all are decided."""
        if self._num_undecided:
            self._ledger.rejected[rejection_reason(error)] += self._num_undecided
            self._ledger.num_in_admission -= self._num_undecided
            self._num_undecided = 0


def rejection_reason(error: BaseException | None) -> str:
    """Returns one of REJECTION_REASONS. None stands for a client that disconnected."""
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

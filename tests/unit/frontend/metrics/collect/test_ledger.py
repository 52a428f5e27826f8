from __future__ import annotations

import asyncio

import pytest

from quire.errors import (
    DeadlineExceededError,
    EngineDeadError,
    NotFoundError,
    OverloadedError,
    PromptTooLongError,
    QuotaExceededError,
    SlowClientError,
    ValidationError,
)
from quire.frontend.metrics.collect.ledger import FINISH_REASONS, REJECTION_REASONS, RequestLedger, rejection_reason
from quire.wire.engine_core import FinishReason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OverloadedError("full", param="max_num_queued_tokens"), "max_num_queued_tokens"),
        (QuotaExceededError("full", param="max_requests_per_key"), "max_requests_per_key"),
        (ValidationError("bad"), "invalid"),
        (NotFoundError("no such"), "invalid"),
        (TypeError("no str"), "invalid"),
        (PromptTooLongError("long"), "prompt_too_long"),
        (DeadlineExceededError("late"), "deadline"),
        (EngineDeadError("gone"), "engine_dead"),
        (asyncio.CancelledError(), "cancelled"),
        (None, "cancelled"),
        (RuntimeError("a fault of ours"), "error"),
    ],
)
def test_why_a_request_was_refused(error: BaseException | None, reason: str) -> None:
    assert rejection_reason(error) == reason
    assert reason in REJECTION_REASONS
    ledger = RequestLedger()
    receipt = ledger.receive(3)
    receipt.reject(error)
    receipt.reject(error)
    assert (ledger.num_received, ledger.num_in_admission, ledger.rejected) == (3, 0, {reason: 3})


def test_a_part_may_be_accepted_before_the_rest_is_refused() -> None:
    ledger = RequestLedger()
    receipt = ledger.receive(3)
    receipt.accept_one()
    assert (ledger.num_accepted, ledger.num_in_admission) == (1, 2)
    receipt.reject(EngineDeadError("gone"))
    assert ledger.num_received == ledger.num_accepted + sum(ledger.rejected.values()) == 3


def test_more_outputs_than_were_announced_are_received_when_they_are_accepted() -> None:
    ledger = RequestLedger()
    receipt = ledger.receive(1)
    receipt.accept_one()
    receipt.accept_one()
    assert (ledger.num_received, ledger.num_accepted, ledger.num_in_admission) == (2, 2, 0)


def test_how_requests_end() -> None:
    ledger = RequestLedger()
    for reason in FinishReason:
        ledger.finish(reason)
    ledger.finish(FinishReason.ERROR, DeadlineExceededError("late"))
    ledger.finish(FinishReason.ABORT, SlowClientError("slow"))
    ledger.finish(FinishReason.ERROR, RuntimeError("ours"))
    assert ledger.finished == {**dict.fromkeys(FINISH_REASONS, 1), "error": 2}

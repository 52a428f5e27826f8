"""Log lines of steps, and what they must not contain."""

from __future__ import annotations

import logging

import pytest

from quire.engine.tracing import describe_iteration, describe_step, log_error_detail
from quire.wire.execution import CachedRequestData, SchedulerOutput

from .harness import Engine, make_request, make_scheduler

SECRETS = [123456, 234567, 345678]


def make_step() -> SchedulerOutput:
    engine = Engine(make_scheduler(num_spec_tokens=2))
    engine.add(make_request("a", SECRETS))
    engine.step()
    engine.scheduler.requests["a"].spec_token_ids = [SECRETS[0]]
    engine.add(make_request("b", [*SECRETS, *SECRETS]))
    return engine.schedule()


def test_a_step_in_one_line_without_a_token_of_it() -> None:
    line = describe_step(make_step())
    assert line == ("8 tokens of 2 requests (computed+scheduled) [a: 3+2, b (new): 0+6], finished [], preempted []")


def test_an_iteration_is_described_in_one_line() -> None:
    assert describe_iteration(7, make_step(), 0.0123) == (
        "Iteration(7): 1 context requests, 6 context tokens, 1 generation requests, 2 generation tokens, "
        "elapsed 12.30 ms"
    )


def test_a_chunk_of_a_prompt_is_context() -> None:
    output = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(["a"], [None], [8]),
        num_scheduled_tokens={"a": 5},
        total_num_scheduled_tokens=5,
    )
    assert "1 context requests, 5 context tokens, 0 generation requests" in describe_iteration(0, output, 0.0)


def test_reporting_an_error_never_raises_another(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("quire.test")
    broken = SchedulerOutput(scheduled_cached_reqs=CachedRequestData(["a"], [], []))
    with caplog.at_level(logging.ERROR, logger="quire"):
        log_error_detail(logger, make_step(), (2, 1))
        log_error_detail(logger, broken, (0, 0))
    assert "[a: 3+2, b (new): 0+6]" in caplog.records[0].message
    assert "2 running, 1 waiting" in caplog.records[0].message
    assert caplog.records[1].message == "the step that failed could not be described"
    assert not any(str(token) in caplog.text for token in SECRETS)

"""The page docs/recipes/add_a_scheduling_policy.md is true: its code, as printed there, makes a working policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.engine.sched import policy, scheduler
from tests.unit.engine.harness import Engine, make_request, make_scheduler

PAGE = Path(__file__).resolve().parents[4] / "docs" / "recipes" / "add_a_scheduling_policy.md"


@pytest.fixture
def shortest(monkeypatch: pytest.MonkeyPatch) -> str:
    """The policy of the page, registered for one test."""
    rows = dict(policy.POLICIES)
    monkeypatch.setattr(policy, "POLICIES", rows)
    monkeypatch.setattr(scheduler, "POLICIES", rows)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    exec(compile(code, str(PAGE), "exec"), {**vars(policy), "POLICIES": rows})
    return "shortest"


def test_the_policy_of_the_recipe_admits_the_shortest_first_and_finishes_everyone(shortest: str) -> None:
    engine = Engine(make_scheduler(num_blocks=9, scheduling_policy=shortest, max_num_seqs=2))
    lengths = {"long": 20, "short": 3, "middle": 9, "shorter": 2}
    engine.add(*(make_request(request_id, length, max_tokens=6) for request_id, length in lengths.items()))
    admitted: list[str] = []
    while engine.scheduler.has_unfinished_requests():
        admitted += [new.req_id for new in engine.step().scheduled_new_reqs if new.req_id not in admitted]
    assert admitted == sorted(lengths, key=lengths.__getitem__)
    assert all(engine.last(request_id).finished for request_id in lengths)

"""The page docs/recipes/add_a_routing_policy.md is true: its code, as printed there, makes a working policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.config.engine_args import FLAGS
from quire.frontend.routing import policy
from quire.frontend.routing.router import Router
from tests.unit.frontend.client.model_core import expected_tokens, make_request
from tests.unit.frontend.client.set_driver import SetDriver

PAGE = Path(__file__).resolve().parents[4] / "docs" / "recipes" / "add_a_routing_policy.md"


def test_the_policies_are_those_of_the_flag() -> None:
    assert set(FLAGS["routing_policy"].choices) == set(policy.ROUTING_POLICIES)


def test_the_policy_of_the_recipe_fills_one_engine_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dict(policy.ROUTING_POLICIES)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    exec(compile(code, str(PAGE), "exec"), {**vars(policy), "ROUTING_POLICIES": rows})
    driver = SetDriver(3, router=Router(rows["fullest"]()))
    driver.start_all()
    requests = [make_request(f"r{i}", 5) for i in range(20)]
    assert [driver.add(request) for request in requests] == [0] * 8 + [1] * 8 + [2] * 4
    driver.die(0)
    driver.run()
    assert all(driver.delivered[request.request_id] == expected_tokens(request) for request in requests)

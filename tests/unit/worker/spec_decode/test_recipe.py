"""The page docs/recipes/add_a_drafter.md is true: its code, as printed there, keeps the contract of drafters."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from quire.resolve import resolve
from quire.worker.spec_decode import registry

from ..toy import make_runner
from .contract import check_forgetting, check_limits, check_sameness, make_context, make_row

PAGE = Path(__file__).resolve().parents[4] / "docs" / "recipes" / "add_a_drafter.md"


def test_the_drafter_of_the_recipe_keeps_to_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    source, row = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    rows = dict(registry.DRAFTERS)
    exec(compile(row, str(PAGE), "exec"), {**vars(registry), "DRAFTERS": rows})
    module = types.ModuleType(rows["echo"].factory.partition(":")[0])
    exec(compile(source, str(PAGE), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    make = resolve(rows["echo"].factory)

    for check in (check_sameness, check_limits, check_forgetting):
        check(make)
    drafter = make(make_context(make_runner()))
    prompt = [5, 6, 7, 8, 6, 9]
    assert drafter.propose([make_row("a", [*prompt, 6])._replace(num_prompt_tokens=6)])[0].token_ids == [7, 8, 6, 9]
    drafter.observe("a", [7, 8], 1)
    assert drafter.propose([make_row("a", [*prompt, 6, 7, 8])._replace(num_prompt_tokens=6)])[0].token_ids == [6, 9]

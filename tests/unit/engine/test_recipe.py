"""The page docs/recipes/add_a_control_verb.md is true: its code, as printed there, makes a working verb."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.engine import lifecycle as utility
from quire.frontend.client.base import EngineCoreClient
from quire.frontend.client.inproc import InprocClient
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.utility import UTILITIES, UtilitySpec

PAGE = Path(__file__).resolve().parents[3] / "docs" / "recipes" / "add_a_control_verb.md"


def test_the_verb_of_the_recipe_counts_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dict(UTILITIES)
    monkeypatch.setattr(utility, "UTILITIES", rows)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    page: dict[str, Any] = {"EngineCoreClient": EngineCoreClient, "UtilitySpec": UtilitySpec, "UTILITIES": rows}
    exec(compile(code, str(PAGE), "exec"), page)
    fake = "quire.testing.fake_executor:FakeExecutor"
    config = EngineArgs("demo", distributed_executor_backend=fake).create_engine_config()
    client = InprocClient(config, log_stats=False)
    get_request_counts = page["get_request_counts"]
    assert get_request_counts(client) == (0, 0)
    for request_id in "ab":
        client.add_request(EngineCoreRequest(request_id, [1, 2], SamplingParams(), None, 0.0))
    assert get_request_counts(client) == (0, 2)
    client.get_output()
    assert get_request_counts(client) == (2, 0)
    client.shutdown()

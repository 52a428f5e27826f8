"""The effects of control verbs on an engine core outlive the core."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.frontend.client.mp import SyncMPClient

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("demo", distributed_executor_backend="quire.testing.fake_executor:FakeExecutor", max_model_len=64) as made:
        yield made


def kill_core(llm: LLM) -> None:
    client = llm.llm_engine.engine_core
    assert isinstance(client, SyncMPClient)
    supervisor = client.resources.supervisor
    assert supervisor is not None
    assert supervisor.core_pid is not None
    os.kill(supervisor.core_pid, signal.SIGKILL)


def tokens(llm: LLM) -> list[int]:
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_a_core_that_died_asleep_with_new_weights_is_asleep_with_new_weights(llm: LLM, tmp_path: Path) -> None:
    first = tokens(llm)
    assert llm.update_weights(tmp_path, "step 1") == "step 1"
    second = tokens(llm)
    assert second != first
    llm.sleep(1)
    kill_core(llm)
    assert llm.is_sleeping() is True
    assert llm.get_weight_version() == "step 1"
    assert llm.wake_up(["weights"]) is False
    kill_core(llm)
    assert llm.wake_up(["kv_cache"]) is True
    assert tokens(llm) == second
    kill_core(llm)
    assert llm.is_sleeping() is False
    assert tokens(llm) == second

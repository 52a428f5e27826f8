"""Planned steps on whole models: the same bits as the model called module by module, for every batch; and a plan never
outlives the weights and the cache it was made with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.testing.tiny_models import FAMILIES
from quire.worker.attention import native_backend
from quire.worker.attention.backend import ForwardContext, KVCache, set_forward_context
from quire.worker.attention.native_backend import NativeAttentionBackend, StepPlanner
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.plan import Arena, Plan

from .conftest import MakeCheckpoint
from .test_row_invariance import MAX_REQS, LogitsOfRequests, make_prompts


def make_requests(path: Path, dtype: str, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> LogitsOfRequests:
    kernels = NativeKernels(Context(library, 2, library.instruction_sets()[0]))
    return LogitsOfRequests(path, dtype, kernels, monkeypatch)


def planner_of(requests: LogitsOfRequests) -> StepPlanner:
    planner = requests.worker.runner._run_model
    assert isinstance(planner, StepPlanner)
    return planner


@pytest.mark.parametrize("family", FAMILIES)
def test_a_planned_step_has_the_bits_of_the_model(
    family: str, tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(tiny_checkpoint(family), "bfloat16", library, monkeypatch)
    planned, _ = requests.run(make_prompts(), seed=3, max_num_reqs=MAX_REQS)
    assert planner_of(requests).is_planned
    monkeypatch.setattr(native_backend, "MAX_PLANNED_TOKENS", 0)
    by_modules, _ = requests.run(make_prompts(), seed=3, max_num_reqs=MAX_REQS)
    assert all(torch.equal(a, b) for a, b in zip(planned, by_modules, strict=True))


def test_new_weights_and_a_new_cache_get_a_new_plan(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)
    prompts = make_prompts()[:3]
    requests = make_requests(first, "bfloat16", library, monkeypatch)
    of_first, _ = requests.run(prompts, seed=3, max_num_reqs=2)
    again, _ = requests.run(prompts, seed=3, max_num_reqs=2)  # in a cache of its own
    assert all(torch.equal(a, b) for a, b in zip(of_first, again, strict=True))
    requests.worker.load_weights(str(second))
    found, _ = requests.run(prompts, seed=3, max_num_reqs=2)
    assert planner_of(requests).is_planned
    expected, _ = make_requests(second, "bfloat16", library, monkeypatch).run(prompts, seed=3, max_num_reqs=2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], of_first[0])


def test_weights_that_were_given_back_are_not_used(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(tiny_checkpoint("llama"), "bfloat16", library, monkeypatch)
    requests.run(make_prompts()[:1], seed=3, max_num_reqs=1)
    assert planner_of(requests).is_planned
    requests.worker.sleep(level=2)
    with pytest.raises(RuntimeError, match="were given back"):
        requests.worker.execute_dummy_batch()


class Bypass:
    """A model whose second kernel belongs to another context: that one is not recorded."""

    def __init__(self, kernels: NativeKernels, other: NativeKernels) -> None:
        self.table = kernels.embedding(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), None)
        self.linear = other.linear(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)), None)

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.linear(self.table.lookup(ids))


def test_a_plan_that_does_not_repeat_the_model_is_not_used(
    library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    kernels, other = (NativeKernels(Context(library, 1, library.instruction_sets()[0])) for _ in range(2))
    model = Bypass(kernels, other)
    backend = NativeAttentionBackend(kernels)
    planner = StepPlanner(model, backend)
    caches: dict[str, Any] = {"layer": KVCache(torch.empty(1), torch.empty(1))}
    ids = torch.tensor([3, 1])
    with set_forward_context(ForwardContext(backend, [], {}, caches)), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(planner(ids, ids), model(ids, ids))
            assert not planner.is_planned
    assert [r.message for r in caplog.records] == [
        "steps are not planned: the plan of this model does not repeat its results"
    ]


class TwoLayers:
    """A model of an embedding and a linear layer, both native."""

    def __init__(self, kernels: NativeKernels, dim: int = 32) -> None:
        self.table = kernels.embedding(torch.randn(8, dim, generator=torch.Generator().manual_seed(0)), None)
        self.linear = kernels.linear(torch.randn(dim, dim, generator=torch.Generator().manual_seed(1)), None)

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.linear(self.table.lookup(ids))


def make_planner(library: NativeLibrary) -> tuple[StepPlanner, ForwardContext]:
    kernels = NativeKernels(Context(library, 1, library.instruction_sets()[0]))
    backend = NativeAttentionBackend(kernels)
    caches: dict[str, Any] = {"layer": KVCache(torch.empty(1), torch.empty(1))}
    return StepPlanner(TwoLayers(kernels), backend), ForwardContext(backend, [], {}, caches)


def check_step(planner: StepPlanner, context: ForwardContext, num_tokens: int) -> None:
    """Run a step twice: as it is planned, and from the plan."""
    ids = torch.arange(num_tokens) % 8
    with set_forward_context(context):
        for _ in range(2):
            assert torch.equal(planner(ids, ids), planner._model(ids, ids))


def runs_of_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the steps that will have run from a plan."""
    runs: list[int] = []
    run = Plan.run

    def record(self: Plan, ids: Tensor, *others: Any) -> Tensor:
        runs.append(len(ids))
        return run(self, ids, *others)

    monkeypatch.setattr(Plan, "run", record)
    return runs


def test_a_step_of_1024_requests_is_planned(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, (planner, context) = runs_of_plans(monkeypatch), make_planner(library)
    check_step(planner, context, 1)
    check_step(planner, context, 1024)
    check_step(planner, context, 1025)
    assert runs == [1, 1, 1024, 1024]


def test_where_results_do_not_fit_shorter_steps_are_planned(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (1 << 17,)  # two results of 256 rows of 32 float32 fit, and two of 1,024 do not
    monkeypatch.setattr(Arena.__init__, "__defaults__", small)
    runs, (planner, context) = runs_of_plans(monkeypatch), make_planner(library)
    check_step(planner, context, 300)
    assert planner.is_planned is False
    check_step(planner, context, 256)
    check_step(planner, context, 257)
    assert runs == [256, 256]

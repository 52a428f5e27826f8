"""Planned steps on whole models: the same bits as the model called module by module, for every batch; and a plan never
outlives the weights and the cache it was made with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from quire.testing.tiny_models import FAMILIES
from quire.worker.attention import native_backend
from quire.worker.attention.backend import ForwardContext, KVCache, States, set_forward_context
from quire.worker.attention.native_backend import NativeAttentionBackend, StepPlanner
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.plan import Arena, Plan
from tests.checkpoints import MakeCheckpoint
from tests.rows import each_family

from .test_row_invariance import MAX_REQS, LogitsOfRequests, make_prompts


def make_requests(path: Path, dtype: str, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> LogitsOfRequests:
    kernels = NativeKernels(Context(library, 2, library.instruction_sets()[0]))
    return LogitsOfRequests(path, dtype, kernels, monkeypatch)


def planner_of(requests: LogitsOfRequests) -> StepPlanner:
    planner = requests.worker.runner._run_model
    assert isinstance(planner, StepPlanner)
    return planner


@pytest.mark.parametrize("family", each_family(FAMILIES))  # of the others tests/unit/worker/test_row_invariance.py
def test_a_planned_step_has_the_bits_of_the_model(
    family: str, tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(tiny_checkpoint(family), "bfloat16", library, monkeypatch)
    planned, _ = requests.run(make_prompts(), seed=3, max_num_reqs=MAX_REQS)
    assert planner_of(requests).is_planned
    monkeypatch.setattr(native_backend, "MAX_PLANNED_TOKENS", 0)
    by_modules, _ = requests.run(make_prompts(), seed=3, max_num_reqs=MAX_REQS)
    assert all(torch.equal(a, b) for a, b in zip(planned, by_modules, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma4_text", "deepseek_v2"])
def test_a_planned_step_returns_the_inputs_of_tapped_layers(
    family: str, tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(tiny_checkpoint(family), "bfloat16", library, monkeypatch)
    runner, model = requests.worker.runner, cast(Any, requests.worker.runner.model)
    run_model, prompts, steps = runner._run_model, make_prompts(), []  # type: ignore[var-annotated]

    def record(*inputs: Tensor) -> States:
        states = run_model(*inputs)
        steps.append([x.clone() for x in states])
        return states

    plain, _ = requests.run(prompts, seed=3, max_num_reqs=MAX_REQS)
    runner._run_model = run_model = runner.backend.plan_steps(model)
    model.model.taps = (0, 2)
    monkeypatch.setattr(runner, "_run_model", record)
    tapped, _ = requests.run(prompts, seed=3, max_num_reqs=MAX_REQS)
    assert isinstance(run_model, StepPlanner)
    assert run_model.is_planned
    assert all(torch.equal(a, b) for a, b in zip(plain, tapped, strict=True))
    planned = steps.copy()
    steps.clear()
    inputs: list[Tensor] = []
    for i in model.model.taps:
        model.model.layers[i].register_forward_pre_hook(lambda layer, args: inputs.append(args[0].clone()))
    monkeypatch.setattr(native_backend, "MAX_PLANNED_TOKENS", 0)
    requests.run(prompts, seed=3, max_num_reqs=MAX_REQS)
    for i, (a, b) in enumerate(zip(planned, steps, strict=True)):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(a[1:], inputs[2 * i : 2 * i + 2], strict=True))


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
            found = planner(ids, ids)
            assert isinstance(found, Tensor)
            assert torch.equal(found, model(ids, ids))
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


def make_planner(
    library: NativeLibrary, model: type[TwoLayers | SideBySide] = TwoLayers
) -> tuple[StepPlanner, ForwardContext]:
    kernels = NativeKernels(Context(library, 1, library.instruction_sets()[0]))
    backend = NativeAttentionBackend(kernels)
    caches: dict[str, Any] = {"layer": KVCache(torch.empty(1), torch.empty(1))}
    return StepPlanner(model(kernels), backend), ForwardContext(backend, [], {}, caches)


def check_step(planner: StepPlanner, context: ForwardContext, num_tokens: int) -> None:
    """Run a step twice: as it is planned, and from the plan."""
    ids = torch.arange(num_tokens) % 8
    with set_forward_context(context):
        for _ in range(2):
            found, expected = planner(ids, ids), planner._model(ids, ids)
            assert isinstance(found, Tensor)
            assert isinstance(expected, Tensor)
            assert torch.equal(found, expected)


class SideBySide(TwoLayers):
    """A model that reads states beside the ids and returns two results."""

    def __init__(self, kernels: NativeKernels, dim: int = 32) -> None:
        super().__init__(kernels, dim)
        self.wide = kernels.linear(torch.randn(dim, 2 * dim, generator=torch.Generator().manual_seed(2)), None)

    def __call__(self, ids: Tensor, positions: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.table.lookup(ids), *states], dim=-1)
        return self.wide(both), both[:, 8:16]


def test_a_plan_reads_states_and_returns_several(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, (planner, context) = runs_of_plans(monkeypatch), make_planner(library, SideBySide)
    for n in (1, 2, 1024, 5):
        ids, states = torch.arange(n) % 8, torch.randn(n, 32, generator=torch.Generator().manual_seed(n))
        with set_forward_context(context):
            for found, expected in zip(planner(ids, ids, states), planner._model(ids, ids, states), strict=True):
                assert torch.equal(found, expected)
    assert runs == [1, 2, 1024, 5]


def runs_of_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the steps that will have run from a plan."""
    runs: list[int] = []
    run = Plan.run

    def record(self: Plan, ids: Tensor, *others: Any) -> States:
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

"""Engines that share the experts of a mixture: each has some of them, and every request has the bits that it has at an
engine with all, whatever the other engines do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.errors import ConfigError, UnsupportedModelError
from quire.lora_request import LoRARequest
from quire.wire.shared_memory import begin_epoch, end_epoch, has_epoch_ended, make_experts_file
from quire.worker.attention.native_backend import StepPlanner
from quire.worker.kernels.barrier import BarrierError
from quire.worker.kernels.library import NativeLibrary
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.layers.moe import Experts
from quire.worker.lora import sites
from quire.worker.parallel.pool import Machines, Rows
from quire.worker.worker import Worker
from tests.checkpoints import MakeCheckpoint

from .test_adapters import targets_of, write_whole_adapter
from .together import EPOCH, OUTPUT_LEN, Run, in_threads, make_config, make_networks, run_together, use_native_kernels

Plan = tuple[tuple[int, ...], tuple[int, int]]
"""An engine's prompts, and the dummy steps before and after its own."""
TWO: list[Plan] = [((0, 2), (0, 2)), ((1,), (1, 1))]
THREE: list[Plan] = [((1,), (0, 1)), ((), (OUTPUT_LEN + 1, 0)), ((2, 0), (1, 0))]
BY_TURNS = {"expert_placement_strategy": "round_robin"}
QUICK: dict[str, tuple[str, dict[str, Any], list[Plan]]] = {
    "two engines": ("mixtral", {"dtype": "bfloat16"}, TWO),
    "three, one without requests": ("qwen3_moe", {"dtype": "float32", **BY_TURNS}, THREE),
    "a shared expert, 4 bits": ("qwen2_moe", {"dtype": "bfloat16", "quantization": "int4"}, TWO),
}


RESIZES: dict[str, tuple[int, dict[int, int]]] = {
    "two, three, two": (2, {2: 3, 3: 2}),
    "one, two": (1, {1: 2}),
    "two, two others": (2, {3: 2}),
}
"""Number of engines at first, and from which step on there are others."""


def make_workers(path: Path, size: int, parts: Sequence[int] | None = None, **flags: Any) -> list[Worker]:
    """`parts`: numbers of engines on each machine, which has a file of its own; None: there is one."""
    config, workers = make_config(path, data_parallel_size=size, enable_expert_parallel=True, **flags), list[Worker]()
    for count in parts or [size]:
        fd = make_experts_file()
        begin_epoch(fd, EPOCH)
        for _ in range(count):
            parallel = dataclasses.replace(config.parallel_config, engine_index=len(workers), experts_file=fd)
            workers.append(Worker(dataclasses.replace(config, parallel_config=parallel)))
    return workers


def run_engines(workers: list[Worker], plans: list[Plan], parts: Sequence[int] | None = None) -> list[Run]:
    sampled: list[list[Future[list[list[int]]]]] = [[Future() for _ in range(OUTPUT_LEN)] for _ in workers]
    networks: list[Any] = [None] * len(workers)
    if parts is not None:
        networks = [network for network in make_networks(parts) for _ in network.ranks()]
    return in_threads(
        [
            Run(worker, own, prompts, partial(worker.join_engines, EPOCH, network), dummies)
            for worker, own, (prompts, dummies), network in zip(workers, sampled, plans, networks, strict=True)
        ]
    )


def check_bits(
    path: Path,
    plans: list[Plan],
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    parts: Sequence[int] | None = None,
    **flags: Any,
) -> list[Worker]:
    """Compares engines with one that has all experts. Returns their workers. `parts`: see `make_workers`."""
    placement = {k: flags.pop(k) for k in BY_TURNS if k in flags}
    logits, tokens, (whole,) = run_together(path, 1, library, monkeypatch, **flags)
    workers = make_workers(path, len(plans), parts, **flags, **placement)
    for (prompts, _), run in zip(plans, run_engines(workers, plans, parts), strict=True):
        for step in range(OUTPUT_LEN if prompts else 0):
            rows = logits[step][list(prompts)]
            assert torch.equal(run.logits[step].view(torch.int32), rows.view(torch.int32)), (prompts, step)
            assert run.tokens[step] == [tokens[step][i] for i in prompts]
        assert is_planned(run.worker) or parts
    assert sum(map(num_weights, workers)) == num_weights(whole)
    assert all(map(num_weights, workers))
    for pool in [worker._pool for worker in workers] if parts else []:
        assert pool is not None
        pool.close()
    return workers


def is_planned(worker: Worker) -> bool:
    """Returns whether the last step ran from a plan."""
    planner = worker.runner._run_model
    return isinstance(planner, StepPlanner) and planner.is_planned


def num_weights(worker: Worker) -> int:
    mixtures = [m for m in worker.get_model().modules() if isinstance(m, Experts) and m.spec.num_experts > 1]
    return sum(m.gate_up_proj.numel() + m.down_proj.numel() for m in mixtures)


@pytest.mark.parametrize("case", QUICK)
def test_logits_do_not_depend_on_what_other_engines_do(
    case: str, tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, flags, plans = QUICK[case]
    check_bits(tiny_checkpoint(family), plans, library, monkeypatch, **flags)


@pytest.mark.parametrize("parts", [(2, 1), pytest.param((1, 1, 1), marks=pytest.mark.slow)])
def test_engines_on_several_machines_have_the_bits_of_one(
    parts: tuple[int, ...], tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"dtype": "bfloat16", **BY_TURNS}
    check_bits(tiny_checkpoint("mixtral"), THREE, library, monkeypatch, parts, **flags)


def test_a_lost_exchange_ends_the_epoch_of_its_machine() -> None:
    networks, file = make_networks((1, 1)), make_experts_file()
    first, second = (Machines(network, True, (file, 1 + i, 0)) for i, network in enumerate(networks))
    rows = [Rows(torch.zeros(2, 3), lambda machine: slice(machine, machine + 1))]
    in_threads([lambda: first.pass_on(rows), lambda: second.pass_on(rows)])
    first.close()
    with pytest.raises(BarrierError, match="the connection to the first machine's workers has ended"):
        second.pass_on(rows)
    assert (has_epoch_ended(file, 1), has_epoch_ended(file, 2)) == (False, True)
    second.close()
    end_epoch(file, 1)
    with pytest.raises(BarrierError, match="another engine of the step has ended"):
        first.pass_on(rows)
    taken = Machines(msgspec.structs.replace(networks[0], address="tcp://192.0.2.1:9"), True, (file, 3, 0))
    with pytest.raises(ConfigError, match="the first of seven free ports there"):
        taken.pass_on(rows)
    follower = Machines(networks[0], False, (file, 1, 0))
    follower.pass_on(rows)  # another engine of its machine does


@pytest.mark.slow
@pytest.mark.parametrize("parts", [(1, 1), (1, 2), (1, 1, 1)])
@pytest.mark.parametrize("flags", [{}, {"quantization": "int8"}, {"dtype": "float32"}, BY_TURNS])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_nor_do_the_bits_of_any_family_depend_on_machines(
    family: str,
    flags: dict[str, Any],
    parts: tuple[int, ...],
    tiny_checkpoint: MakeCheckpoint,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = TWO if sum(parts) == 2 else THREE
    check_bits(tiny_checkpoint(family), plans, library, monkeypatch, parts, **{"dtype": "bfloat16", **flags})


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"quantization": "int8"}, {"dtype": "float32"}, BY_TURNS])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe", "olmoe"])
def test_nor_do_those_of_any_family(
    family: str,
    flags: dict[str, Any],
    tiny_checkpoint: MakeCheckpoint,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for plans in (TWO, THREE):
        check_bits(tiny_checkpoint(family), plans, library, monkeypatch, **{"dtype": "bfloat16", **flags})


def run_resized(
    path: Path,
    size: int,
    sizes: dict[int, int],
    whole: list[torch.Tensor],
    adapters: Sequence[LoRARequest] = (),
    **flags: Any,
) -> list[Worker]:
    """Changes the number of engines between steps, and compares with the logits of one engine with all experts. The
    first engines have the requests, the others come and go. Returns the workers of the last group."""
    workers = make_workers(path, size, enable_elastic_ep=True, **flags)
    config = workers[0].config
    prompts = [(0, 1, 2)] if size == 1 else [(0, 2), (1,)]

    def between(worker: Worker, step: int) -> None:
        if step in sizes:
            worker.prepare_experts(sizes[step], step).result(60)
            worker.install_experts()
            worker.join_engines(EPOCH)

    runs: list[Callable[[], Any]] = []
    for worker, own in zip(workers, prompts, strict=True):
        sampled: list[Future[list[list[int]]]] = [Future() for _ in range(OUTPUT_LEN)]
        join = partial(worker.join_engines, EPOCH)
        runs.append(Run(worker, sampled, own, join, adapters=adapters, between=partial(between, worker)))
    ends = [*list(sizes)[1:], OUTPUT_LEN]
    for (step, count), end in zip(sizes.items(), ends, strict=True):
        begin_epoch(config.parallel_config.experts_file, EPOCH, step)
        for index in range(size, count):
            parallel = dataclasses.replace(config.parallel_config.with_engines(count, step), engine_index=index)
            worker = Worker(dataclasses.replace(config, parallel_config=parallel))
            runs.append(Run(worker, [], (), partial(worker.join_engines, EPOCH), (end - step, 0)))
    done = in_threads(runs)
    for own, run in zip(prompts, done, strict=False):
        for step in range(OUTPUT_LEN):
            assert torch.equal(run.logits[step].view(torch.int32), whole[step][list(own)].view(torch.int32)), (
                own,
                step,
            )
        assert is_planned(run.worker)
    return [run.worker for run in done][: list(sizes.values())[-1]]


@pytest.mark.parametrize("case", RESIZES)
def test_logits_stay_the_same_when_the_number_of_engines_changes(
    case: str, tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (size, sizes) = tiny_checkpoint("mixtral"), RESIZES[case]
    logits, _, (whole,) = run_together(path, 1, library, monkeypatch, dtype="bfloat16")
    placement = BY_TURNS if size == 1 else {}
    workers = run_resized(path, size, sizes, list(logits), dtype="bfloat16", **placement)
    assert sum(map(num_weights, workers)) == num_weights(whole), "no expert is left over, and none is missing"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "float32"}, BY_TURNS])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "olmoe"])
def test_nor_do_those_of_any_family_when_it_changes(
    family: str,
    flags: dict[str, Any],
    tiny_checkpoint: MakeCheckpoint,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, flags = tiny_checkpoint(family), {"dtype": "bfloat16", **flags}
    placement = {k: flags.pop(k) for k in BY_TURNS if k in flags}
    logits, _, _ = run_together(path, 1, library, monkeypatch, **flags)
    for size, sizes in RESIZES.values():
        run_resized(path, size, sizes, list(logits), **flags, **placement)


def test_experts_that_cannot_be_shared_so_widely_leave_an_engine_as_it_is(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_native_kernels(library, monkeypatch)
    worker = make_workers(tiny_checkpoint("mixtral"), 1, enable_elastic_ep=True)[0]
    worker.init_device()
    worker.load_model()
    with pytest.raises(ConfigError, match="6 experts are too few for --data-parallel-size 9 engines"):
        worker.prepare_experts(9, 1).result(60)
    worker.prepare_experts(2, 1)
    worker.discard_experts()
    assert worker.config.parallel_config.data_parallel_size == 1


@pytest.mark.parametrize(
    ("family", "size", "error", "message"),
    [
        ("llama", 2, UnsupportedModelError, "LlamaForCausalLM has no experts that --data-parallel-size 2 engines"),
        ("gpt_oss", 2, UnsupportedModelError, "the experts of this model are stored in one tensor"),
        ("mixtral", 9, ConfigError, "experts are too few for --data-parallel-size 9 engines"),
    ],
)
def test_models_that_engines_cannot_share_are_refused(
    family: str,
    size: int,
    error: type[Exception],
    message: str,
    tiny_checkpoint: MakeCheckpoint,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_native_kernels(library, monkeypatch)
    worker = make_workers(tiny_checkpoint(family), size)[0]
    worker.init_device()
    with pytest.raises(error, match=message):
        worker.load_model()


def test_adapters_change_experts_that_other_engines_have(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also when the number of engines changes."""
    path, targets = tiny_checkpoint("mixtral"), targets_of(tiny_checkpoint("mixtral"))
    adapters = [write_whole_adapter(tmp_path / f"{rank}", targets, rank, i) for i, rank in enumerate((5, 36), start=1)]
    logits, _, _ = run_together(path, 1, library, monkeypatch, dtype="bfloat16", adapters=adapters)
    flags = {"dtype": "bfloat16", "enable_lora": True}
    run_resized(path, 2, {2: 3}, list(logits), adapters, **flags)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"quantization": "int8"}, {"dtype": "float32"}])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe"])
def test_nor_do_adapters_of_any_family_change_other_requests(
    family: str,
    flags: dict[str, Any],
    tiny_checkpoint: MakeCheckpoint,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sites, "NamedWeights", ())  # adapters have the model's own names
    path, targets, flags = tiny_checkpoint(family), targets_of(tiny_checkpoint(family)), {"dtype": "bfloat16", **flags}
    adapters = [write_whole_adapter(tmp_path / f"{rank}", targets, rank, i) for i, rank in enumerate((5, 36), start=1)]
    logits, _, _ = run_together(path, 1, library, monkeypatch, adapters=adapters, **flags)
    for placement in ({}, BY_TURNS):
        run_resized(path, 2, {1: 3, 3: 2}, list(logits), adapters, enable_lora=True, **flags, **placement)


def test_drafters_that_engines_which_share_experts_cannot_have_are_refused(tiny_checkpoint: MakeCheckpoint) -> None:
    path = tiny_checkpoint("mixtral")
    with pytest.raises(ConfigError, match="a model or a class that drafts"):
        make_workers(path, 2, speculative_config={"model": str(path), "num_speculative_tokens": 2})


def test_the_torch_kernels_share_experts_too(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bits depend on the batch, so texts are compared."""
    use_native_kernels(library, monkeypatch)
    monkeypatch.setattr("quire.worker.worker.choose_kernels", lambda *_: TORCH_KERNELS)
    (whole,) = [Worker(make_config(tiny_checkpoint("mixtral"), dtype="float32"))]
    sampled: list[Future[list[list[int]]]] = [Future() for _ in range(OUTPUT_LEN)]
    expected = Run(whole, sampled)().logits
    workers = make_workers(tiny_checkpoint("mixtral"), 2, dtype="float32")
    for (prompts, _), run in zip(TWO, run_engines(workers, TWO), strict=True):
        for step in range(OUTPUT_LEN):
            torch.testing.assert_close(run.logits[step], expected[step][list(prompts)], rtol=1e-3, atol=1e-3)
    pool = workers[0]._pool
    assert pool is not None
    row = 4 * 48 + 2 * 8 + 2 * 4 * 48
    assert pool.num_bytes == row * 2 * workers[0]._max_rows, "inputs, choices, and answers for each choice"


def test_a_step_without_one_engine_fails(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the epoch ends a wait; an engine that has given a step up can go on in the next epoch."""
    use_native_kernels(library, monkeypatch)
    workers = make_workers(tiny_checkpoint("mixtral"), 2, dtype="bfloat16")
    fd, failed = workers[0].config.parallel_config.experts_file, Future[BaseException]()
    begin_epoch(fd, EPOCH + 1)

    def first() -> None:
        Run(workers[0], [], (), lambda: workers[0].join_engines(EPOCH))()
        try:
            workers[0].execute_dummy_batch()
        except BarrierError as e:
            failed.set_result(e)
        workers[0].join_engines(EPOCH + 1)
        workers[0].execute_dummy_batch()

    def second() -> None:
        Run(workers[1], [], ())()
        end_epoch(fd, EPOCH)
        assert "another worker of the step has failed" in str(failed.result(60))
        workers[1].join_engines(EPOCH + 1)
        workers[1].execute_dummy_batch()

    in_threads([first, second])

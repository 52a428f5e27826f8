"""The promise of the native kernels, on whole models: the logits of a request are the same to the last bit alone or in
a batch, in one prompt or in chunks, preempted and added again with its output tokens, on any number of threads, as
rows after drafts that one step verifies, and in planned steps or module by module."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine_args import EngineArgs
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.testing.tiny_models import FAMILIES, VOCAB_SIZE
from quire.wire.execution import CachedRequestData, NewRequestData, SchedulerOutput
from quire.worker import step_sampler
from quire.worker.attention import native_backend
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.sample.sampler import sample
from quire.worker.sample.verify import verify
from quire.worker.worker import Worker
from tests.adapters import tensors as adapter_tensors
from tests.adapters import write_adapter
from tests.checkpoints import MakeCheckpoint
from tests.lora_worker import LoRAWorker, Work
from tests.rows import ALL_ROWS, EVERY_KIND, family_rows

from .conftest import INSTRUCTION_SETS
from .quantization.test_checkpoints import CASES
from .quantization.writers import mxfp4_checkpoint, quantize_checkpoint
from .toy import RandomScheduler, ToyRequest, make_cache_config, run_step

NUM_BLOCKS, MAX_REQS, OUTPUT_LEN, VERIFIED_LEN = 400, 6, 6, 18
PROMPT_LENS = (1, 2, 15, 17, 33, 50, 70, 261)
"""Around the block size, beyond the window of 32, beyond a chunk of 256 keys."""


class LogitsOfRequests:
    """Runs requests under a random scheduler and keeps the logits each output was sampled from."""

    def __init__(self, path: Path, dtype: str, kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
        flags: dict[str, Any] = {
            "max_model_len": 512,
            "max_num_seqs": MAX_REQS,
            "device": "cpu",
            "dtype": dtype,
            "weight_cache": False,
        }
        self.worker = Worker(EngineArgs(str(path), **flags).create_engine_config())
        monkeypatch.setattr("quire.worker.worker.choose_kernels", lambda *_: kernels)
        monkeypatch.setattr(step_sampler, "sample", self._sample)
        monkeypatch.setattr(step_sampler, "verify", self._verify)
        self.worker.init_device()
        assert self.worker.backend.name == "native"
        self._config, self._windows = make_cache_config(self.worker.get_kv_cache_spec(), NUM_BLOCKS)
        self._step_logits = torch.empty(0)

    def _sample(self, logits: torch.Tensor, *args: Any) -> Any:
        self._step_logits = logits.clone()
        return sample(logits, *args)

    def _verify(self, logits: torch.Tensor, *args: Any) -> Any:
        self._step_logits = logits.clone()
        return verify(logits, *args)

    def decode(self, prompt: list[int], num_drafts: int, known: list[int]) -> tuple[torch.Tensor, list[int]]:
        """The logits and tokens of VERIFIED_LEN outputs. Each step verifies `num_drafts` of the `known` tokens."""
        self.worker.initialize_from_config(self._config)
        num_blocks = (len(prompt) + VERIFIED_LEN) // 16 + 1
        blocks = tuple(list(range(1 + 40 * g, 1 + 40 * g + num_blocks)) for g in range(len(self._windows)))
        new = NewRequestData("v", prompt, blocks, 0, SamplingParams(temperature=0, ignore_eos=True))
        step = SchedulerOutput([new], num_scheduled_tokens={"v": len(prompt)}, total_num_scheduled_tokens=len(prompt))
        rows, tokens = [], list[int]()
        while True:
            (found,) = run_step(self.worker.runner, step).sampled_token_ids
            rows += list(self._step_logits)[: len(found)]
            tokens += found
            if len(tokens) >= VERIFIED_LEN:
                return torch.stack(rows), tokens
            drafts = known[len(tokens) : len(tokens) + num_drafts][: VERIFIED_LEN - len(tokens) - 1]
            step = SchedulerOutput(
                scheduled_cached_reqs=CachedRequestData(["v"], [None], [len(prompt) + len(tokens) - 1]),
                num_scheduled_tokens={"v": 1 + len(drafts)},
                total_num_scheduled_tokens=1 + len(drafts),
                scheduled_spec_decode_tokens={"v": drafts} if drafts else {},
            )

    def run(self, prompts: list[list[int]], seed: int, max_num_reqs: int) -> tuple[list[torch.Tensor], int]:
        """[OUTPUT_LEN, vocab] of each request, and how many times one was preempted."""
        self.worker.initialize_from_config(self._config)
        scheduler = RandomScheduler(seed, NUM_BLOCKS, max_num_reqs, self._windows, 16)
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        scheduler.waiting = [
            ToyRequest(str(i), prompt, greedy, blocks=tuple([] for _ in self._windows))
            for i, prompt in enumerate(prompts)
        ]
        logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        num_done = 0
        while num_done < len(prompts):
            scheduled = scheduler.schedule()
            output = run_step(self.worker.runner, scheduled)
            sampling = [req_id for req_id, ids in zip(output.req_ids, output.sampled_token_ids, strict=True) if ids]
            for req_id, row in zip(sampling, self._step_logits if sampling else [], strict=True):
                logits[int(req_id)].append(row)
            num_done += len(scheduler.update(scheduled, output, OUTPUT_LEN))
        return [torch.stack(rows) for rows in logits], scheduler.num_preemptions


def make_prompts(lengths: Sequence[int] = PROMPT_LENS) -> list[list[int]]:
    rng = random.Random(4)
    return [rng.choices(range(6, VOCAB_SIZE), k=n) for n in lengths]


@pytest.mark.parametrize(("family", "dtype"), family_rows(FAMILIES, ("bfloat16", "float32")))
def test_logits_do_not_depend_on_company_chunks_preemption_or_threads(
    family: str, dtype: str, tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a family or its type repeats the kernels of others, under one schedule and in one engine."""
    less: dict[str, Any] = {"seeds": (2,), "nums_drafts": (16,), "lengths": (2, 17, 50, 261), "alone_on": 3}
    if (family in EVERY_KIND and dtype == "bfloat16") or ALL_ROWS:
        less = {}
    check_invariance(tiny_checkpoint(family), dtype, library, monkeypatch, **less)


STORED: dict[str, Callable[[MakeCheckpoint, Path], tuple[Path, Path]]] = {
    "MXFP4": lambda make, target: mxfp4_checkpoint(make("gpt_oss"), target),
    "fp8": lambda make, target: quantize_checkpoint(make("deepseek_v3"), target, *CASES["fp8"]),
}


@pytest.mark.parametrize("form", STORED)
def test_nor_do_those_of_mixtures_in_stored_forms(
    form: str, tiny_checkpoint: MakeCheckpoint, tmp_path: Path, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_invariance(STORED[form](tiny_checkpoint, tmp_path)[0], "bfloat16", library, monkeypatch)


def check_invariance(
    path: Path,
    dtype: str,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    seeds: Sequence[int] = (1, 2),
    nums_drafts: Sequence[int] = (1, 4, 8, 16),
    lengths: Sequence[int] = PROMPT_LENS,
    alone_on: int = 1,
) -> None:
    """`alone_on` is the number of threads that compute requests alone; together they are computed on 3."""
    prompts, instruction_set = make_prompts(lengths), library.instruction_sets()[0]

    def start(num_threads: int) -> LogitsOfRequests:
        kernels = NativeKernels(Context(library, num_threads, instruction_set))
        return LogitsOfRequests(path, dtype, kernels, monkeypatch)

    alone_engine = start(alone_on)
    with monkeypatch.context() as patch:
        patch.setattr(native_backend, "MAX_PLANNED_TOKENS", 0)  # module by module; what follows is planned
        alone, _ = alone_engine.run(prompts, seed=0, max_num_reqs=1)
    assert len({rows[-1].tolist().__repr__() for rows in alone}) == len(prompts)
    prompt = prompts[lengths.index(17)]
    logits, tokens = alone_engine.decode(prompt, 0, [])
    assert torch.equal(logits[:OUTPUT_LEN], alone[lengths.index(17)])
    assert not torch.equal(logits[-1], logits[-2])
    three_threads = alone_engine if alone_on == 3 else start(3)
    num_preemptions = 0
    for seed in seeds:
        together, n = three_threads.run(prompts, seed, MAX_REQS)
        num_preemptions += n
        for i, (a, b) in enumerate(zip(alone, together, strict=True)):
            assert torch.equal(a, b), f"request {i}, seed {seed}"
    assert num_preemptions > 0
    assert three_threads.worker.runner._run_model.is_planned  # type: ignore[attr-defined]
    for num_drafts in nums_drafts:
        verified, found = three_threads.decode(prompt, num_drafts, tokens)
        assert found == tokens, f"{num_drafts} drafts"
        assert torch.equal(verified, logits), f"{num_drafts} drafts"
    wrong = [*tokens[:3], (tokens[3] + 1) % VOCAB_SIZE, *tokens[4:]]
    assert torch.equal(three_threads.decode(prompt, 4, wrong)[0], logits), "a wrong draft"


# -- adapters ------------------------------------------------------------------------------------------------------

RANKS = {True: (1, 4, 16, 100, 512), False: (4, 100)}
"""Ranks of adapters by whether the instruction set is the best: tests/unit/worker/kernels tries all ranks on each."""
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


ADAPTED = [
    pytest.param(form, name, marks=() if form == "bfloat16" or name == INSTRUCTION_SETS[0] else pytest.mark.slow)
    for name in INSTRUCTION_SETS
    for form in FORMS
]


@pytest.mark.parametrize(("form", "instruction_set"), ADAPTED)
def test_nor_on_the_adapters_of_others(
    form: str,
    instruction_set: str,
    library: NativeLibrary,
    tiny_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request with an adapter: alone, among requests of the base model and of other adapters, in chunks, preempted,
    planned, on other threads. A request without: also in an engine without adapters."""
    is_best = instruction_set == INSTRUCTION_SETS[0] or ALL_ROWS
    path, prompts, flags = tiny_checkpoint("llama"), make_prompts()[2 : 6 if is_best else 4], FORMS[form]
    directories = {
        str(rank): write_adapter(tmp_path / str(rank), adapter_tensors(rank, rank, scale=0.3 / rank**0.5), r=rank)
        for rank in RANKS[is_best]
    }

    def start(num_threads: int, **more: Any) -> tuple[LoRAWorker, dict[str, LoRARequest]]:
        kernels = NativeKernels(Context(library, num_threads, instruction_set))
        monkeypatch.setattr("quire.worker.worker.choose_kernels", lambda *_: kernels)
        engine = LoRAWorker(path, MAX_REQS, **{**flags, **more})
        return engine, engine.load(directories) if engine.worker._adapters is not None else {}

    plain, _ = start(1, enable_lora=False)
    expected = [plain.run([Work(prompt)], OUTPUT_LEN, seed=0)[0].logits for prompt in prompts]
    one_thread, adapters = start(1)
    for adapter in adapters.values():
        expected += [one_thread.run([Work(prompt, adapter)], OUTPUT_LEN, seed=0)[0].logits for prompt in prompts]
    assert len({str(rows.tolist()) for rows in expected}) == len(expected)
    works = [Work(prompt, adapter) for adapter in (None, *adapters.values()) for prompt in prompts]
    three_threads, _ = start(3)
    for engine, seed in ((one_thread, 1), (three_threads, 2)):
        for i, (result, rows) in enumerate(zip(engine.run(works, OUTPUT_LEN, seed=seed), expected, strict=True)):
            assert torch.equal(result.logits, rows), f"request {i}, seed {seed}"
    assert three_threads.num_preemptions > 0
    assert three_threads.worker.runner._run_model.is_planned  # type: ignore[attr-defined]
    for engine in (plain, one_thread, three_threads):
        engine.worker.shutdown()

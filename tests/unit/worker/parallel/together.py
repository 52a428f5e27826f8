"""Several workers of one engine in one process, a thread each: the logits that each step samples from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.engine_args import EngineArgs
from quire.sampling_params import SamplingParams
from quire.wire.execution import CachedRequestData, NewRequestData, SchedulerOutput
from quire.wire.kv_cache import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from quire.wire.shared_memory import WORKERS_FILE_BYTES, make_shared_file, set_abort_word
from quire.worker import step_sampler
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.sample.sampler import sample
from quire.worker.worker import Worker

NUM_BLOCKS, OUTPUT_LEN = 60, 4
PROMPTS = [list(range(5, 30)), list(range(40, 43)), list(range(60, 137))]


def in_threads(tasks: list[Callable[[], Any]]) -> list[Any]:
    """Returns the results of `tasks`, each of which runs in a thread of its own. Raises the first error."""
    results, errors = [None] * len(tasks), list[BaseException]()

    def run(i: int) -> None:
        try:
            results[i] = tasks[i]()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results


class Run:
    """One worker's steps: prompts in one step, then tokens one by one."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.logits, self.tokens = worker, list[Tensor](), list[list[list[int]]]()

    def __call__(self) -> Run:
        """Runs all of it."""
        try:
            self._run()
        except BaseException:
            if self.worker._shared_file is not None:
                set_abort_word(self.worker._shared_file)
            raise
        return self

    def _run(self) -> None:
        worker = self.worker
        worker.init_device()
        specs = worker.get_kv_cache_spec()
        kinds = list(dict.fromkeys(specs.values()))
        tensors = [KVCacheTensor(NUM_BLOCKS * spec.page_size_bytes, [name]) for name, spec in specs.items()]
        groups = [KVCacheGroupSpec([n for n, s in specs.items() if s == kind], kind) for kind in kinds]
        worker.initialize_from_config(KVCacheConfig(NUM_BLOCKS, tensors, groups))
        worker.compile_or_warm_up_model()
        params = SamplingParams(temperature=0.7, seed=3, ignore_eos=True)
        new, start = list[NewRequestData](), 1
        for i, prompt in enumerate(PROMPTS):
            count = -(-(len(prompt) + OUTPUT_LEN) // 16)
            blocks = tuple(list(range(start, start + count)) for _ in kinds)
            start += count
            new.append(NewRequestData(str(i), prompt, blocks, 0, params))
        lens = {str(i): len(prompt) for i, prompt in enumerate(PROMPTS)}
        step = SchedulerOutput(new, num_scheduled_tokens=lens, total_num_scheduled_tokens=sum(lens.values()))
        for number in range(OUTPUT_LEN):
            worker.runner.execute_model(step)
            pending = worker.runner._pending
            assert pending is not None
            assert pending.logits is not None
            if worker.rank == 0:
                self.logits.append(pending.logits.clone())
            self.tokens.append(worker.runner.sample_tokens(None).sampled_token_ids)
            ids, done = list(lens), [n + number for n in lens.values()]
            cached = CachedRequestData(ids, [None] * len(ids), done)
            step = SchedulerOutput(
                [], cached, num_scheduled_tokens=dict.fromkeys(ids, 1), total_num_scheduled_tokens=len(ids)
            )


def run_together(
    path: Path, size: int, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, **flags: Any
) -> tuple[Tensor, list[list[list[int]]], list[Worker]]:
    """Returns the logits of each step, the tokens, and the workers of an engine of `size` workers."""
    config = EngineArgs(
        str(path),
        max_model_len=128,
        max_num_seqs=4,
        tensor_parallel_size=size,
        weight_cache=False,
        device="cpu",
        **flags,
    ).create_engine_config()
    name = library.instruction_sets()[0]
    monkeypatch.setattr("quire.worker.worker.choose_kernels", lambda *_: NativeKernels(Context(library, 1, name)))
    monkeypatch.setattr(step_sampler, "sample", sample)
    shared = make_shared_file(WORKERS_FILE_BYTES) if size > 1 else None
    runs = in_threads([Run(Worker(config, rank, shared)) for rank in range(size)])
    assert all(run.tokens == runs[0].tokens for run in runs), "all workers have the same texts"
    return torch.stack(runs[0].logits), runs[0].tokens, [run.worker for run in runs]

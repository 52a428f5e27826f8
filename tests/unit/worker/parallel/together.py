"""Several workers of one engine in one process, a thread each: the logits that each step samples from."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.engine.executor.worker_process import StagePipes
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.execution import CachedRequestData, NewRequestData, SchedulerOutput
from quire.wire.kv_cache import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from quire.wire.lora import AdapterLoad
from quire.wire.ring import WorkerLinks
from quire.wire.shared_memory import end_epoch, make_workers_file, set_abort_word
from quire.wire.topology import Topology
from quire.wire.worker_link import WorkerNetwork
from quire.worker import step_sampler
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.proc import WorkerOptions, join_stages
from quire.worker.sample.sampler import sample
from quire.worker.worker import Worker
from tests.ports import free_ports

NUM_BLOCKS, OUTPUT_LEN = 60, 4
EPOCH = 3
"""Epoch of the engines that share experts."""
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

    def __init__(
        self,
        worker: Worker,
        sampled: list[Future[list[list[int]]]],
        prompts: Sequence[int] = (0, 1, 2),
        join: Callable[[], None] = lambda: None,
        dummies: tuple[int, int] = (0, 0),
        adapters: Sequence[LoRARequest] = (),
        between: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`sampled` are the tokens of each step, of the worker that samples. `prompts` are numbers of those that it
        has; `join` is called before its first step, and `dummies` are the dummy steps before and after its own. The
        first prompt has no adapter, the others have one each, as many as there are. `between` is called before each
        step of the prompts."""
        self.worker, self.logits, self.tokens = worker, list[Tensor](), list[list[list[int]]]()
        self._adapters = [None, *adapters]
        self._sampled, self._samples = sampled, worker.rank == worker._topology.output_rank
        self._prompts, self._join, self._dummies, self._between = prompts, join, dummies, between

    def __call__(self) -> Run:
        """Runs all of it."""
        try:
            self._run()
        except BaseException as e:
            if self.worker._links is not None:
                set_abort_word(self.worker._links.shared_file)
            if self.worker._pool is not None:
                end_epoch(self.worker.config.parallel_config.experts_file, EPOCH)
            if self._samples:
                for future in self._sampled:
                    if not future.done():
                        future.set_exception(e)
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
        adapters = [adapter for adapter in self._adapters if adapter is not None]
        for adapter in adapters[:: 1 if worker.rank % 2 else -1]:  # each worker has read them in an order of its own
            worker.load_adapter(AdapterLoad(adapter, 0)).result(60)
        self._join()
        for _ in range(self._dummies[0]):
            worker.execute_dummy_batch()
        if self._prompts:
            self._run_prompts(len(kinds))
        for _ in range(self._dummies[1]):
            worker.execute_dummy_batch()

    def _run_prompts(self, num_kinds: int) -> None:
        worker = self.worker
        params = SamplingParams(temperature=0.7, seed=3, ignore_eos=True)
        new, start = list[NewRequestData](), 1
        for i in self._prompts:
            prompt = PROMPTS[i]
            count = -(-(len(prompt) + OUTPUT_LEN) // 16)
            blocks = tuple(list(range(start, start + count)) for _ in range(num_kinds))
            start += count
            adapter = self._adapters[i] if i < len(self._adapters) else None
            new.append(NewRequestData(str(i), prompt, blocks, 0, params, lora_request=adapter))
        lens = {str(i): len(PROMPTS[i]) for i in self._prompts}
        step = SchedulerOutput(new, num_scheduled_tokens=lens, total_num_scheduled_tokens=sum(lens.values()))
        for number in range(OUTPUT_LEN):
            self._between(number)
            worker.execute_model(step)
            pending = worker.runner._pending
            assert pending is not None
            if self._samples:
                assert pending.logits is not None
                self.logits.append(pending.logits.clone())
            self.tokens.append(worker.runner.sample_tokens(None).sampled_token_ids)
            if self._samples:
                self._sampled[number].set_result(self.tokens[-1])
            ids, done = list(lens), [n + number for n in lens.values()]
            new_tokens = dict(zip(ids, self._sampled[number].result(60), strict=True))
            cached = CachedRequestData(ids, [None] * len(ids), done, new_tokens if worker._stage else {})
            step = SchedulerOutput(
                [], cached, num_scheduled_tokens=dict.fromkeys(ids, 1), total_num_scheduled_tokens=len(ids)
            )


def run_together(
    path: Path,
    size: int,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    stages: int = 1,
    *,
    adapters: Sequence[LoRARequest] = (),
    parts: Sequence[int] = (),
    **flags: Any,
) -> tuple[Tensor, list[list[list[int]]], list[Worker]]:
    """Returns the logits of each step, the tokens, and the workers of an engine of `stages` times `size` workers.
    `parts`: workers on each of several machines, which share the layers of one stage."""
    config = make_config(
        path, tensor_parallel_size=size, pipeline_parallel_size=stages, enable_lora=bool(adapters), **flags
    )
    use_native_kernels(library, monkeypatch)
    sampled: list[Future[list[list[int]]]] = [Future() for _ in range(OUTPUT_LEN)]
    all_links = make_links(Topology(tp=size, pp=stages)) if not parts else make_network_links(parts)
    workers = [Worker(config, rank, links) for rank, links in enumerate(all_links)]
    try:
        runs = in_threads([Run(worker, sampled, adapters=adapters) for worker in workers])
    finally:
        for worker in workers:
            close_links(worker._links)
            if parts and worker._collectives is not None:
                worker._collectives.close()
        for shared in {worker._links.shared_file for worker in workers if worker._links is not None}:
            os.close(shared)
    last = runs[(stages - 1) * size :]
    assert all(run.tokens == last[0].tokens for run in last), "all workers have the same texts"
    return torch.stack(last[0].logits), last[0].tokens, workers


def make_config(path: Path, **flags: Any) -> EngineConfig:
    """Returns the configuration of a small engine."""
    return EngineArgs(
        str(path), max_model_len=128, max_num_seqs=4, weight_cache=False, device="cpu", **flags
    ).create_engine_config()


def use_native_kernels(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each worker native kernels with a thread of its own."""
    name = library.instruction_sets()[0]
    monkeypatch.setattr("quire.worker.worker.choose_kernels", lambda *_: NativeKernels(Context(library, 1, name)))
    monkeypatch.setattr(step_sampler, "sample", sample)


def close_links(links: WorkerLinks | None) -> None:
    if links is not None and links.inlet is not None:
        links.inlet.waker.close()
    if links is not None and links.outlet is not None:
        for waker in links.outlet._wakers:
            waker.close()


def make_networks(parts: Sequence[int]) -> list[WorkerNetwork]:
    """Returns what leads each machine's workers to the others by loopback."""
    address = f"tcp://127.0.0.1:{free_ports()}"
    key = secrets.token_bytes(32)
    return [WorkerNetwork(address, key, b"session", list(parts), share, 5.0) for share in range(len(parts))]


def make_network_links(parts: Sequence[int]) -> list[WorkerLinks | None]:
    """Returns the links of each worker of a stage whose workers are on several machines."""
    links = list[WorkerLinks | None]()
    for network in make_networks(parts):
        shared = make_workers_file()
        links += [WorkerLinks(shared, ranks=network.ranks(), network=network) for _ in network.ranks()]
    return links


def make_links(topology: Topology) -> list[WorkerLinks | None]:
    """Returns the links of each worker of an engine."""
    if topology.world_size == 1:
        return [None]
    shared, links = make_workers_file(topology.pp), list[WorkerLinks | None]()
    with StagePipes(topology, 0) as pipes:
        for rank in range(topology.world_size):
            ends: dict[str, Any] = {option[2:]: tuple(map(os.dup, fds)) for option, fds in pipes.ends_of(rank).items()}
            links.append(join_stages(WorkerOptions(rank, 0, shared, 0, 0, 0, 0, **ends), topology))
            for ring, *_ in ends.values():  # it is mapped
                os.close(ring)
    return links

"""A worker with adapters, under a random scheduler: every request's tokens, and the logits behind them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.config.engine_args import EngineArgs
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.lora import AdapterInfo, AdapterLoad
from quire.worker.worker import Worker

from .unit.worker.toy import RandomScheduler, ToyRequest, make_cache_config, run_step

NUM_BLOCKS = 400
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Work:
    """A request: its prompt and its adapter."""

    prompt: list[int]
    adapter: LoRARequest | None = None


@dataclass
class Result:
    """Its tokens, and the logits that each was sampled from, [num_tokens, vocab]."""

    tokens: list[int]
    logits: torch.Tensor


class LoRAWorker:
    """Owns a worker whose KV cache is ready, and counts preemptions."""

    def __init__(self, path: Path, max_num_reqs: int = 8, **flags: Any) -> None:
        flags = {"max_model_len": 512, "device": "cpu", "dtype": "float32", "enable_lora": True, **flags}
        self.max_num_reqs, self.num_preemptions = max_num_reqs, 0
        self.worker = Worker(EngineArgs(str(path), max_num_seqs=max_num_reqs, **flags).create_engine_config())
        self.worker.init_device()
        self._config, self._windows = make_cache_config(self.worker.get_kv_cache_spec(), NUM_BLOCKS)
        self.worker.initialize_from_config(self._config)

    def load(self, directories: Mapping[str, Path]) -> dict[str, LoRARequest]:
        """Loads adapters by name."""
        requests = {n: LoRARequest(n, i, str(path)) for i, (n, path) in enumerate(directories.items(), start=1)}
        futures = [self.worker.load_adapter(AdapterLoad(request, 0)) for request in requests.values()]
        self.infos: list[AdapterInfo] = [future.result(timeout=120) for future in futures]
        return requests

    def run(
        self, works: Sequence[Work], num_tokens: int, *, seed: int, params: SamplingParams = GREEDY
    ) -> list[Result]:
        """Runs requests to their ends."""
        self.worker.initialize_from_config(self._config)
        scheduler = RandomScheduler(seed, NUM_BLOCKS, self.max_num_reqs, self._windows, 16)
        requests = [
            ToyRequest(str(i), w.prompt, params, blocks=tuple([] for _ in self._windows), lora_request=w.adapter)
            for i, w in enumerate(works)
        ]
        scheduler.waiting = random.Random(seed).sample(requests, len(requests))
        logits: list[list[torch.Tensor]] = [[] for _ in works]
        num_done = 0
        while num_done < len(works):
            scheduled = scheduler.schedule()
            self.worker.runner.on_step = lambda step, output: self._keep(step, logits)
            if self.worker._adapters is not None:
                self.worker._adapters.begin_step()
            num_done += len(scheduler.update(scheduled, run_step(self.worker.runner, scheduled), num_tokens))
        self.num_preemptions += scheduler.num_preemptions
        return [Result(r.outputs, torch.stack(rows)) for r, rows in zip(requests, logits, strict=True)]

    @staticmethod
    def _keep(step: Any, logits: list[list[torch.Tensor]]) -> None:
        for i, row in zip(step.inputs.sampling.tolist(), [] if step.logits is None else step.logits, strict=False):
            logits[int(step.req_ids[i])].append(row.clone())

"""Ten thousand adapters, a hundred of them in memory, and traffic in which few are asked for often and most rarely."""

from __future__ import annotations

import random
import tracemalloc
from itertools import accumulate
from pathlib import Path

import pytest

from quire.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from quire.config.hf_config import HFConfig
from quire.config.lora import LoRAConfig
from quire.engine.core import EngineCore
from quire.errors import AdapterError
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_hardware import fake_digest
from quire.testing.fake_model import FakeModel, expected_output
from quire.wire.engine_core import EngineCoreRequest, FinishReason
from quire.wire.lora import RegisteredAdapter
from quire.wire.stats import SchedulerStats
from tests.simulation.world import SimulatedAdapters, SimulatedExecutor

NUM_ADAPTERS, NUM_RESIDENT, ADAPTER_BYTES = 10_000, 100, 1000
NUM_LIVE, MODEL_LEN = 64, 200
COLD_BYTES = 2048
"""Most memory that an adapter takes that is known and not loaded."""
TICK_S = 0.02


class Adapters(SimulatedAdapters):
    """Loads take up to four steps, and a few fail."""

    def size_of(self, lora_request: LoRARequest) -> int:
        return ADAPTER_BYTES


class Executor(SimulatedExecutor):
    vocab_size = 256

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.adapters = Adapters(4, 0.02)


class Traffic:
    """An engine with its adapters registered, and requests that are sent as others end."""

    def __init__(self, seed: int) -> None:
        config = EngineConfig(
            model_config=ModelConfig(
                max_model_len=MODEL_LEN, hf_config=HFConfig({"max_position_embeddings": MODEL_LEN}, Path())
            ),
            cache_config=CacheConfig(num_gpu_blocks_override=600),
            scheduler_config=SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=32),
            lora_config=LoRAConfig(enable_lora=True, lora_memory_bytes=NUM_RESIDENT * ADAPTER_BYTES),
        )
        self.core = EngineCore(config, Executor, log_stats=False, wake=self._wake)
        self.manager, self.executor = self.core.adapters, self.core.executor
        self.manager.clock = lambda: self.now
        self.now, self.is_woken = 0.0, False
        self.live: dict[str, tuple[EngineCoreRequest, list[int]]] = {}
        self.num_sent = self.num_failed = self.num_evictions = 0
        self._rng = random.Random(seed)
        self._weights = list(accumulate(1 / (i + 1) for i in range(NUM_ADAPTERS)))  # Zipf's law
        self.loras = [LoRARequest(f"team/{i}", i + 1, f"/adapters/team/{i}") for i in range(NUM_ADAPTERS)]

    def _wake(self) -> None:
        self.is_woken = True

    def send(self) -> None:
        """Sends a request of some adapter."""
        (lora,) = self._rng.choices(self.loras, cum_weights=self._weights)
        params = SamplingParams(max_tokens=self._rng.randint(1, 12), ignore_eos=True)
        prompt = [self._rng.randrange(256) for _ in range(self._rng.randint(1, 20))]
        request = EngineCoreRequest(f"r{self.num_sent}", prompt, params, None, self.now, lora_request=lora)
        self.num_sent += 1
        self.live[request.request_id] = request, []
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> None:
        """Runs a step, in which loads go on, and checks what is in memory, and the answers that are complete."""
        self.now += TICK_S
        self.executor.adapters.tick()
        if self.is_woken:
            self.is_woken = False
            self.core.take_news()
        for outputs in (self.core.step()[0] or {}).values():
            for output in outputs.outputs:
                request, tokens = self.live[output.request_id]
                tokens += output.new_token_ids
                if output.finish_reason is FinishReason.ERROR:
                    assert "cannot be read this time" in (output.error_message or "")
                    assert not tokens
                    self.num_failed += 1
                elif output.finished:
                    self._check(request, tokens)
                if output.finished:
                    del self.live[output.request_id]
        worker, memory = self.executor.adapters, self.manager.memory
        held = len(worker.loaded.keys() | worker.loading.keys())
        assert held * ADAPTER_BYTES == memory.num_bytes <= memory.max_bytes
        stats = SchedulerStats()
        self.manager.add_stats(stats)
        assert stats.adapters is not None
        self.num_evictions += stats.adapters.num_evictions

    @staticmethod
    def _check(request: EngineCoreRequest, tokens: list[int]) -> None:
        lora, params = request.lora_request, request.sampling_params
        assert lora is not None
        assert params is not None
        prompt = request.prompt_token_ids or []
        right = expected_output(FakeModel(), prompt, params, MODEL_LEN, lora, adapter=fake_digest(lora)).token_ids
        assert tokens == right, f"{request.request_id} with {lora.lora_name}"


@pytest.mark.parametrize("num_requests", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_ten_thousand_adapters_in_the_memory_of_a_hundred(num_requests: int) -> None:
    traffic = Traffic(seed=1)
    registered = [RegisteredAdapter(lora, 1, "0" * 64) for lora in traffic.loras]
    for one in registered:
        one.digest = fake_digest(one.lora_request)
    tracemalloc.start()
    traffic.manager.register_loras(registered)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < NUM_ADAPTERS * COLD_BYTES
    assert not traffic.executor.adapters.num_loads, "nothing is read before a request asks for it"
    while traffic.num_sent < num_requests or traffic.live:
        while len(traffic.live) < NUM_LIVE and traffic.num_sent < num_requests:
            try:
                traffic.send()
            except AdapterError:  # its failure is remembered
                traffic.live.pop(f"r{traffic.num_sent - 1}")
                traffic.num_failed += 1
        traffic.step()
        assert traffic.now < num_requests * TICK_S * 10, "requests wait for ever"
    assert 0 < traffic.num_failed < num_requests / 10
    assert traffic.num_evictions > num_requests / 10
    revisions = traffic.manager.registry.revisions.values()
    assert not any(one.num_bound or one.num_begun for one in revisions)
    assert len(traffic.manager.list_loras()) > NUM_ADAPTERS - traffic.num_failed
    traffic.core.shutdown()

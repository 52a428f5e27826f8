"""A long prompt cannot hold up the others (promise P16), in virtual time."""

from __future__ import annotations

import logging
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from quire.config.hf_config import HFConfig
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.engine.core import EngineCore
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_executor import FakeExecutor
from quire.testing.fake_hardware import VirtualClock
from quire.wire.engine_core import EngineCoreRequest
from tests.seeds import seeds

BUDGET = 128
LONG, SHORT, NUM_SHORT = 20_000, 16, 64
STEP_TIME_S, TOKEN_TIME_S = 0.001, 0.0001
LONGEST_STEP_S = STEP_TIME_S + BUDGET * TOKEN_TIME_S


class Server:
    """An engine in virtual time. `tokens` holds when each token of each request came, `arrived` when it was sent."""

    def __init__(self, **limits: Any) -> None:
        config = EngineConfig(
            model_config=ModelConfig(
                max_model_len=LONG + 64, hf_config=HFConfig({"max_position_embeddings": LONG + 64}, Path())
            ),
            cache_config=CacheConfig(num_gpu_blocks_override=3000),
            scheduler_config=SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=BUDGET, **limits),
        )
        self.clock = VirtualClock()
        times = {"clock": self.clock, "step_time_s": STEP_TIME_S, "token_time_s": TOKEN_TIME_S}
        self.core = EngineCore(config, type("Timed", (FakeExecutor,), times), log_stats=False)
        self.arrived: dict[str, float] = {}
        self.tokens: dict[str, list[float]] = {}

    def send(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """A request arrives now; no two share a prefix."""
        prompt = [random.Random(request_id).randrange(256) for _ in range(num_prompt_tokens)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = EngineCoreRequest(request_id, prompt, params, None, self.clock.now)
        self.arrived[request_id], self.tokens[request_id] = self.clock.now, []
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> None:
        """One step; its tokens come at its end."""
        for outputs in (self.core.step()[0] or {}).values():
            for output in outputs.outputs:
                self.tokens[output.request_id].append(self.clock.now)

    def first_token_times(self) -> list[float]:
        """Returns the times of the short requests, shortest first."""
        return sorted(times[0] - self.arrived[i] for i, times in self.tokens.items() if i != "long")


def serve_short_requests(server: Server, seed: int) -> None:
    """Send all of them at random times, and step until they are served."""
    rng = random.Random(seed)
    waiting = sorted((rng.uniform(0, 2.0), f"short-{i}") for i in range(NUM_SHORT))
    start = server.clock.now
    while waiting or any(len(times) < 8 for i, times in server.tokens.items() if i != "long"):
        while waiting and start + waiting[0][0] <= server.clock.now:
            server.send(waiting.pop(0)[1], SHORT, 8)
        if server.core.scheduler.has_requests():
            server.step()
        else:
            server.clock.sleep(STEP_TIME_S)
    server.core.shutdown()


@pytest.mark.fresh
def test_short_requests_hardly_notice_a_long_prompt(caplog: pytest.LogCaptureFixture) -> None:
    """Promised of 99 in 100 is twice their time without it, and one step. The slowest of each 64 may wait two."""
    caplog.set_level(logging.CRITICAL)
    all_idle: list[float] = []
    all_busy: list[float] = []
    for seed in seeds(2):
        idle = Server()
        serve_short_requests(idle, seed)
        busy = Server(long_prefill_token_threshold=BUDGET // 2)
        busy.send("long", LONG, 8)
        serve_short_requests(busy, seed)
        assert not busy.tokens["long"]  # it was being prefilled all the time
        assert busy.first_token_times()[-1] <= 2 * idle.first_token_times()[-1] + 2 * LONGEST_STEP_S, f"seed {seed}"
        all_idle += idle.first_token_times()
        all_busy += busy.first_token_times()
    p99 = -1 - len(all_idle) // 100
    assert sorted(all_busy)[p99] <= 2 * sorted(all_idle)[p99] + LONGEST_STEP_S


@pytest.mark.parametrize("threshold", [0, BUDGET // 2])
def test_tokens_keep_coming_while_long_prompts_are_computed(threshold: int, caplog: pytest.LogCaptureFixture) -> None:
    """A decoding request gets a token in every step, and no step is longer than its budget, whatever else arrives."""
    caplog.set_level(logging.CRITICAL)
    server = Server(long_prefill_token_threshold=threshold)
    for i in range(8):
        server.send(f"short-{i}", SHORT, 50)
    server.step()
    for i in range(3):
        server.send(f"long-{i}", 3000, 4)
    while any(len(server.tokens[f"short-{i}"]) < 50 for i in range(8)):
        server.step()
    for i in range(8):
        times = server.tokens[f"short-{i}"]
        gaps = [later - sooner for sooner, later in pairwise(times)]
        assert max(gaps) <= LONGEST_STEP_S + 1e-9
    server.core.shutdown()


class Crowd:
    """Adapters of which one is asked for all the time: two requests of "busy" overlap, whenever one ends another comes.

    `admitted` has the adapters of the requests in the order of their admission.
    """

    def __init__(self, **limits: Any) -> None:
        config = EngineConfig(
            model_config=ModelConfig(max_model_len=200, hf_config=HFConfig({"max_position_embeddings": 200}, Path())),
            cache_config=CacheConfig(num_gpu_blocks_override=300),
            scheduler_config=SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=BUDGET),
            lora_config=LoRAConfig(enable_lora=True, **limits),
        )
        self.core = EngineCore(config, FakeExecutor, log_stats=False)
        self.now = 0.0
        self.core.adapters.clock = lambda: self.now
        self.admitted: list[str] = []
        self._num_sent = 0

    def send(self, adapter: str, max_tokens: int) -> None:
        self._num_sent += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        lora = LoRARequest(adapter, {"busy": 1, "rare": 2, "late": 3}[adapter], f"/{adapter}")
        request = EngineCoreRequest(f"{adapter}-{self._num_sent}", [1, 2], params, None, 0.0, lora_request=lora)
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> None:
        self.now += 0.05
        for outputs in (self.core.step()[0] or {}).values():
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self.admitted.append(output.request_id.partition("-")[0])
                if output.finished and output.request_id.startswith("busy"):
                    self.send("busy", 20)


@pytest.mark.parametrize("limits", [{"max_loras": 1}, {"max_cpu_loras": 1}, {"lora_memory_bytes": 1500}])
def test_an_adapter_that_is_always_asked_for_starves_no_other(limits: dict[str, int]) -> None:
    """After 2 s no new request of it is admitted; those that run end within a second."""
    crowd = Crowd(**limits)
    crowd.send("busy", 20)
    crowd.step()
    for _ in range(10):
        crowd.step()
    crowd.send("busy", 20)
    crowd.send("rare", 5)
    asked_at = crowd.now
    while "rare" not in crowd.admitted:
        crowd.step()
        assert crowd.now < asked_at + 2.0 + 1.5, f"{crowd.admitted}"
    assert crowd.now > asked_at + 1.9, "as long as the busy one has requests that came before, they are served"
    num_busy = crowd.admitted.count("busy")
    for _ in range(60):
        crowd.step()
    assert crowd.admitted.count("busy") > num_busy, "and then it is served again"


def test_adapters_get_a_place_in_the_order_in_which_they_wait() -> None:
    crowd = Crowd(max_loras=1)
    crowd.send("busy", 20)
    crowd.step()
    for adapter in ("late", "rare"):
        crowd.send(adapter, 3)
        crowd.step()
    while not {"rare", "late"} <= set(crowd.admitted):
        crowd.step()
        assert crowd.now < 10
    assert [adapter for adapter in crowd.admitted if adapter != "busy"] == ["late", "rare"]

"""Several engines: the time of a choice, what routing does to the prefix cache, and the gap of a killed engine.

    .venv/bin/python -m benchmarks.engines choice       # microseconds per placed request, by number of engines
    .venv/bin/python -m benchmarks.engines locality     # a multi-turn trace on 4 engines, beside one with their caches
    .venv/bin/python -m benchmarks.engines gap          # processes: the longest gap when one of 2 engines is killed

`locality` runs real schedulers and KV caches in this process, on a clock of its own, with a fake model whose steps take
1 ms, 0.3 ms per row and 0.05 ms per prompt token.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import os
import random
import signal
import statistics
import time
from dataclasses import replace
from typing import Any

from quire import EngineArgs, SamplingParams
from quire.engine.core import EngineCore
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.dp import DPLBAsyncMPClient
from quire.frontend.client.engine_set import EngineSet
from quire.frontend.client.link import EngineLink
from quire.frontend.routing.policy import LOAD_FACTOR, ROUTING_POLICIES
from quire.frontend.routing.router import Router, hash_prompt
from quire.resolve import resolve
from quire.testing.fake_engine import READY
from quire.testing.fake_executor import FakeExecutor
from quire.testing.fake_model import FakeModel, expected_output
from quire.wire.engine_core import EngineCoreRequest, EngineCoreRequestType

MODEL_LEN = 4096
NUM_BLOCKS = 2000
NUM_CONVERSATIONS = 160
THINK_S = 6.0
STEP_S, ROW_S, PROMPT_TOKEN_S = 0.001, 0.0003, 0.00005


class Roomy(FakeExecutor):
    """A fake model with room for long prompts."""

    available_bytes = 1 << 24


class Slow(Roomy):
    """Steps of 5 ms."""

    step_time_s = 0.005


def _args(executor: str, **fields: Any) -> EngineArgs:
    return EngineArgs(
        model="demo",
        max_model_len=MODEL_LEN,
        hf_overrides={"max_position_embeddings": 8192},
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        distributed_executor_backend=f"benchmarks.engines:{executor}",
        **fields,
    )


# -- choice -----------------------------------------------------------------------------------------------------------


def measure_choice() -> None:
    """Prints the time of a placement without that of hashing, which depends on the prompt only."""
    rng = random.Random(1)
    print("engines  hashing us  choice us p50  p99   (prompts of 512 tokens)")
    for num_engines in (2, 8, 64):
        router = Router(ROUTING_POLICIES["least_wait"]())
        for engine in range(num_engines):
            router.open_engine(engine, replace(READY, num_gpu_blocks=10_000))
        stems = [[rng.randrange(32_000) for _ in range(384)] for _ in range(50)]
        hashing, choices = [], []
        for number in range(3000):
            prompt = rng.choice(stems) + [rng.randrange(32_000) for _ in range(128)]
            request = EngineCoreRequest(f"r{number}", prompt, SamplingParams(), None, 0.0)
            start = time.perf_counter()
            hash_prompt(request, READY.block_size)
            hashed = time.perf_counter()
            router.place(request, range(num_engines))
            end = time.perf_counter()
            hashing.append(hashed - start)
            choices.append((end - hashed) - (hashed - start))
            if number > 16 * num_engines:
                router.remove(f"r{number - 16 * num_engines}")
        ranks = statistics.quantiles(choices, n=100)
        p50, p99 = (1e6 * ranks[percent - 1] for percent in (50, 99))
        print(f"{num_engines:7}  {1e6 * statistics.median(hashing):10.1f}  {p50:13.1f}  {p99:.1f}")


# -- locality ---------------------------------------------------------------------------------------------------------


class Simulation:
    """A trace of conversations on engines in this process."""

    def __init__(self, policy: str, num_engines: int, num_blocks: int) -> None:
        self.now = 0.0
        config = _args("Roomy", num_gpu_blocks_override=num_blocks).create_engine_config("serving")
        executor = resolve(config.parallel_config.executor_class)
        self.cores = [EngineCore(config, executor, log_stats=True) for _ in range(num_engines)]
        self.set = EngineSet([EngineLink() for _ in self.cores], router=Router(ROUTING_POLICIES[policy]()))
        for index, core in enumerate(self.cores):
            core.scheduler.clock = lambda: self.now
            self.set.on_ready(index, replace(core.ready_response, engine_index=index))
        self.num_cached = self.num_prompt = 0
        self.worst_bound = 0.0
        self.waits: list[float] = []
        self._events: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self._is_busy = [False] * num_engines
        self._live: dict[str, Any] = {}

    def at(self, when: float, what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def run(self) -> None:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def begin_turn(self, conversation: dict[str, Any]) -> None:
        rng = conversation["rng"]
        conversation["tokens"] += [rng.randrange(256) for _ in range(rng.randint(40, 200))]
        name = f"c{conversation['number']}-{conversation['turn']}"
        params = SamplingParams(max_tokens=rng.randint(20, 80), ignore_eos=True)
        self._live[name] = conversation, self.now
        self.set.add_request(EngineCoreRequest(name, list(conversation["tokens"]), params, None, self.now))
        counts = {index: link.num_live_requests for index, link in self.set.links.items()}
        chosen = counts[self.set.engine_of(name) or 0]
        self.worst_bound = max(self.worst_bound, chosen - (LOAD_FACTOR * sum(counts.values()) / len(counts) + 1))
        self._carry()

    def _carry(self) -> None:
        messages, self.set.messages = self.set.messages, []
        for index, message in messages:
            assert message.type is EngineCoreRequestType.ADD
            core = self.cores[index]
            core.add_request(*core.preprocess_add_request(message.payload))
            if not self._is_busy[index]:
                self._is_busy[index] = True
                self._step(index)
        deliveries, self.set.deliveries = self.set.deliveries, []
        for outputs in deliveries:
            for output in outputs.outputs:
                conversation, since = self._live[output.request_id]
                conversation["tokens"] += output.new_token_ids
                if output.prefill_stats is not None:
                    self.num_cached += output.prefill_stats.num_cached_tokens
                    self.num_prompt += output.prefill_stats.num_prompt_tokens
                    self.waits.append(self.now - since)
                if output.finish_reason is not None:
                    del self._live[output.request_id]
                    self._end_turn(conversation)

    def _end_turn(self, conversation: dict[str, Any]) -> None:
        conversation["turn"] += 1
        if conversation["turn"] < conversation["num_turns"]:
            pause = conversation["rng"].expovariate(1 / THINK_S)
            self.at(self.now + pause, lambda: self.begin_turn(conversation))

    def _step(self, index: int) -> None:
        """Runs a step, whose outputs come when its time is over."""
        core = self.cores[index]
        outputs, executed = core.step_fn()
        core.post_step(executed)
        mine = (outputs or {}).get(0)
        stats = None if mine is None else mine.scheduler_stats
        num_rows = 0 if stats is None else stats.num_decoded_reqs
        num_prompt = 0 if stats is None else max(0, stats.num_scheduled_tokens - num_rows)
        end = self.now + STEP_S + ROW_S * num_rows + PROMPT_TOKEN_S * num_prompt

        def finish() -> None:
            if mine is not None:
                mine.engine_index, mine.timestamp = index, self.now
                self.set.on_outputs(mine)
                self._carry()
            if core.has_work():
                self._step(index)
            else:
                self._is_busy[index] = False

        self.at(end, finish)


def simulate(policy: str, num_engines: int, num_blocks: int) -> Simulation:
    """Runs the trace: conversations of 3 to 8 turns that begin with one of 8 system prompts."""
    rng = random.Random(7)
    systems = [[rng.randrange(256) for _ in range(256)] for _ in range(8)]
    simulation = Simulation(policy, num_engines, num_blocks)
    for number in range(NUM_CONVERSATIONS):
        conversation = {
            "number": number,
            "turn": 0,
            "num_turns": rng.randint(3, 8),
            "tokens": list(rng.choice(systems)),
            "rng": random.Random(number),
        }
        simulation.at(rng.uniform(0.0, 30.0), lambda it=conversation: simulation.begin_turn(it))
    simulation.run()
    return simulation


def measure_locality() -> None:
    whole = simulate("round_robin", 1, 4 * NUM_BLOCKS)
    print(f"one engine with the cache of four: {whole.num_cached} of {whole.num_prompt} prompt tokens cached")
    print("policy on 4 engines   cached tokens  of the one's  over 1.25 mean + 1  first token s p50    p99")
    for policy in ROUTING_POLICIES:
        four = simulate(policy, 4, NUM_BLOCKS)
        waits = statistics.quantiles(four.waits, n=100)
        share = four.num_cached / whole.num_cached
        print(
            f"{policy:20}  {four.num_cached:13}  {share:12.3f}  {four.worst_bound:18.2f}  "
            f"{waits[49]:17.4f}  {waits[98]:.4f}  {dict(four.set.router.decisions)}"
        )


# -- gap --------------------------------------------------------------------------------------------------------------


async def measure_gap(num_streams: int, num_runs: int) -> None:
    """Prints the longest gap of a stream whose engine is killed, and beside it that of the same streams undisturbed."""
    config = _args("Slow", data_parallel_size=2, core_restart_limit=1000).create_engine_config("serving")
    client = await asyncio.to_thread(DPLBAsyncMPClient, config, log_stats=True)
    async with AsyncLLM(config, client=client) as llm:
        quiet, killed, wrong = [], [], 0
        for run in range(num_runs):
            for gaps, kills in ((quiet, False), (killed, True)):
                longest, num_wrong = await _read_all(llm, client, num_streams, f"{run}-{kills}", kills=kills)
                gaps.append(longest)
                wrong += num_wrong
                while client.num_engines_up < 2:
                    await asyncio.sleep(0.02)
        print(f"{num_streams} streams on 2 engines, one killed; {num_runs} runs; streams with a wrong token: {wrong}")
        for name, gaps in (("undisturbed", quiet), ("killed", killed)):
            print(f"  {name:12} longest gap of a run, s: median {statistics.median(gaps):.3f}, most {max(gaps):.3f}")
        print(f"  {client.counts['moved_requests']} requests moved, {client.counts['moved_tokens']} tokens again")


async def _read_all(
    llm: AsyncLLM, client: DPLBAsyncMPClient, num_streams: int, name: str, *, kills: bool
) -> tuple[float, int]:
    longest, num_wrong, num_tokens = 0.0, 0, 0
    params = SamplingParams(max_tokens=300, ignore_eos=True)

    async def read(index: int) -> None:
        nonlocal longest, num_wrong, num_tokens
        prompt = [index, *range(100)]
        last, tokens = time.monotonic(), []
        async for output in llm.generate({"prompt_token_ids": prompt}, params, f"{name}-{index}"):
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            num_tokens += len(output.outputs[0].token_ids) - len(tokens)
            tokens = list(output.outputs[0].token_ids)
        num_wrong += tokens != list(expected_output(FakeModel(), prompt, params, MODEL_LEN).token_ids)

    readers = [asyncio.create_task(read(index)) for index in range(num_streams)]
    while num_tokens < 50 * num_streams:
        await asyncio.sleep(0.001)
    if kills and (pid := client.resources.supervisors[1].core_pid) is not None:
        os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*readers)
    return longest, num_wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choice", "locality", "gap"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    if args.what == "gap":
        asyncio.run(measure_gap(args.streams, args.runs))
    else:
        {"choice": measure_choice, "locality": measure_locality}[args.what]()


if __name__ == "__main__":
    main()

"""Every interval and count against indisputable times: a clock that only moves while a step is computed.

The engine core is the real one, with a cache too small for its requests. An observer outside writes down when
a request was handed in, when the executor first saw it, when its outputs were taken, and which requests were preempted.
Sums and counts of the histograms must be what follows from that, to the nanosecond.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from quire.config.engine_args import EngineArgs
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.testing.fake_executor import FakeExecutor
from quire.testing.metrics_audit import MetricsAudit
from quire.wire.execution import SchedulerOutput
from tests.seeds import seeds

from .mortal_client import MortalClient

PER_STAGE = ("queue", "prefill", "decode", "inference")


class Clock:
    """Seconds since some moment; `executor` writes down what it is given."""

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.rng = random.Random(seed)
        self.first_seen: dict[str, float] = {}
        """Internal id (and segment) to the start of the step it was first part of."""
        self.num_preemptions: Counter[str] = Counter()
        self.num_computed = 0
        self.segments: Counter[str] = Counter()

    def __call__(self) -> float:
        return self.now


clock = Clock(0)


class Watched(FakeExecutor):
    """Sets the requests that the clock works for, and lets time pass."""

    available_bytes: ClassVar[int] = 1 << 12

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        for request_id in scheduler_output.num_scheduled_tokens:
            clock.first_seen.setdefault(f"{request_id}/{clock.segments[request_id]}", clock.now)
        for request_id in scheduler_output.preempted_req_ids or ():
            clock.num_preemptions[request_id] += 1
        clock.num_computed += scheduler_output.total_num_scheduled_tokens
        result = super().execute_model(scheduler_output, non_block)
        if scheduler_output.total_num_scheduled_tokens:
            clock.now += clock.rng.choice((0.125, 0.25, 1.0, 7.0))
        return result


@dataclass
class Life:
    """The observer's notes about one segment of one output of one request."""

    arrival: float
    queued_at: float = 0.0
    """When the core that answered it got it."""
    tokens_at: list[float] = field(default_factory=list)
    """When each output came, with how many tokens."""
    num_tokens: int = 0
    end: float | None = None
    prompt_len: int = 0


class Observer:
    """An engine, and what can be seen of it from outside."""

    def __init__(self, **flags: Any) -> None:
        args = EngineArgs(
            "demo",
            distributed_executor_backend=f"{__name__}:Watched",
            max_model_len=128,
            skip_tokenizer_init=True,
            **{"num_gpu_blocks_override": 14, "max_num_batched_tokens": 24, "max_num_seqs": 6, **flags},
        )
        config = args.create_engine_config()
        self.client = MortalClient(config, clock)
        self.engine = LLMEngine(config, client=self.client, log_stats=True)
        self.engine.pipeline.stats._wall_clock = clock
        self.audit = MetricsAudit()
        self.lives: dict[str, list[Life]] = {}
        """Lives by internal id, one per segment."""
        self.n: list[int] = []
        self.num_user_tokens: Counter[str] = Counter()
        self._ids: dict[tuple[str, int], str] = {}

    def add(self, name: str, prompt: list[int], n: int = 1, *, resumable: bool = False, **params: Any) -> None:
        """A request, or the next input of a session."""
        sampling = SamplingParams(
            n=n, ignore_eos=True, output_kind=RequestOutputKind.DELTA, seed=1, temperature=1.0, **params
        )
        is_new = (name, 0) not in self._ids
        internal = self.engine.add_request(
            name, {"prompt_token_ids": prompt}, sampling, arrival_time=clock.now, resumable=resumable
        )
        if is_new:
            self.n.append(n)
        for index in range(n):
            child = internal if n == 1 else f"{index}_{internal}"
            self._ids[name, index] = child
            if prompt:
                self.lives.setdefault(child, []).append(Life(clock.now, clock.now, prompt_len=len(prompt)))

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])
        for index in range(8):
            child = self._ids.get((name, index))
            if child is not None and self.lives[child][-1].end is None:
                self.lives[child][-1].end = clock.now

    def die(self, *, in_step: bool) -> None:
        """The core dies, with `in_step` after a step whose outputs are lost; later the next one is there.

        A request without a token is new to that: it is queued there, and scheduled there for the first time."""
        if in_step:
            self.client.run_step()
        self.client.die()
        self.check_laws()
        clock.now += clock.rng.choice((0.5, 30.0))
        self.client.start()
        self.check_laws()
        for child, lives in self.lives.items():
            for number, life in enumerate(lives):
                if not life.tokens_at and life.end is None:
                    clock.first_seen.pop(f"{child}/{number}", None)
                    life.queued_at = clock.now

    def step(self) -> None:
        """One step; then the laws hold."""
        for output in self.engine.step():
            assert isinstance(output, RequestOutput)
            for completion in output.outputs:
                self._note(output.request_id, completion.index, len(completion.token_ids), completion.finished())
        self.check_laws()

    def _note(self, name: str, index: int, num_tokens: int, finished: bool) -> None:
        child = self._ids[name, index]
        life = self.lives[child][clock.segments[child]]
        if num_tokens:
            life.tokens_at.append(clock.now)
            life.num_tokens += num_tokens
        if finished:
            life.end = clock.now
            clock.segments[child] += 1
            for early in self.lives[child][clock.segments[child] :]:
                early.queued_at = clock.now  # an input that came before this answer's end waited for its user's sake

    def snapshot(self) -> MetricsSnapshot:
        metrics = self.engine.pipeline.stats.metrics
        assert metrics is not None
        return metrics.snapshot()

    def check_laws(self) -> None:
        self.audit.check(self.snapshot())

    def finish(self) -> MetricsSnapshot:
        while self.engine.has_unfinished_requests():
            self.step()
        return self.snapshot()

    # -- what must be ------------------------------------------------------------------------------------------------

    def segments(self) -> Iterator[tuple[Life, float | None]]:
        """Each life and when it was first scheduled."""
        for child, lives in self.lives.items():
            for number, life in enumerate(lives):
                yield life, clock.first_seen.get(f"{child}/{number}")

    def expected(self) -> dict[str, tuple[int, float]]:
        """(count, sum) by histogram."""
        found: dict[str, list[float]] = {name: [] for name in ("ttft", "itl", "e2e", "tpot", *PER_STAGE)}
        for life, _ in self.segments():
            found["ttft"] += [at - life.arrival for at in life.tokens_at[:1]]
            found["itl"] += [b - a for a, b in zip(life.tokens_at, life.tokens_at[1:], strict=False)]
        for child, lives in self.lives.items():
            self._close(child, lives, found)
        return {name: (len(values), sum(values)) for name, values in found.items()}

    def _close(self, child: str, lives: list[Life], found: dict[str, list[float]]) -> None:
        """The books of one request: those of its segments added up."""
        end = max(life.end for life in lives if life.end is not None)
        found["e2e"].append(end - lives[0].arrival)
        stages: dict[str, float] = {}
        num_intervals = 0
        for number, life in enumerate(lives):
            first_seen = clock.first_seen.get(f"{child}/{number}")
            if first_seen is None or not life.tokens_at:
                continue
            for stage, seconds in (
                ("queue", first_seen - life.queued_at),
                ("prefill", life.tokens_at[0] - first_seen),
                ("decode", life.tokens_at[-1] - life.tokens_at[0]),
                ("inference", life.tokens_at[-1] - first_seen),
            ):
                stages[stage] = stages.get(stage, 0.0) + seconds
            num_intervals += life.num_tokens - 1
        for stage, seconds in stages.items():
            found[stage].append(seconds)
        found["tpot"].append(stages.get("decode", 0.0) / num_intervals if num_intervals else 0.0)

    def check(self) -> None:
        seen, expected = self.finish(), self.expected()
        names = {
            "ttft": "vllm:time_to_first_token_seconds",
            "itl": "vllm:inter_token_latency_seconds",
            "e2e": "vllm:e2e_request_latency_seconds",
            "tpot": "vllm:request_time_per_output_token_seconds",
            **{stage: f"vllm:request_{stage}_time_seconds" for stage in PER_STAGE},
        }
        for short, name in names.items():
            count, total = expected[short]
            assert seen.count(name) == count, name
            assert seen.value(name) == pytest.approx(total, abs=1e-9), name
        lives = [life for all_lives in self.lives.values() for life in all_lives]
        num_tokens = sum(life.num_tokens for life in lives)
        assert seen.value("vllm:generation_tokens") == seen.value("quire_delivered_tokens") == num_tokens
        assert seen.value("vllm:request_generation_tokens") == num_tokens
        assert seen.value("vllm:request_success") == len(self.lives)
        assert seen.value("vllm:request_params_n") == sum(self.n)
        assert seen.count("vllm:request_params_n") == len(self.n)
        answered = sum(life.prompt_len for life in lives if life.tokens_at)
        assert seen.value("vllm:prompt_tokens") == answered
        assert seen.value("vllm:request_prompt_tokens") == sum(life.prompt_len for life in lives)


@pytest.fixture(autouse=True)
def fresh_clock() -> None:
    clock.__init__(1)  # type: ignore[misc]


def test_one_request_is_observed_as_it_was() -> None:
    observer = Observer()
    observer.add("a", [5] * 40, max_tokens=6)
    observer.check()
    assert observer.snapshot().count("vllm:inter_token_latency_seconds") == 5


def test_queueing_and_several_outputs() -> None:
    observer = Observer(max_num_seqs=2, num_gpu_blocks_override=40)
    for number in range(5):
        observer.add(f"r{number}", [number + 3] * 9, n=1 + number % 3, max_tokens=4)
        observer.step()
    observer.check()
    assert observer.snapshot().value("vllm:request_queue_time_seconds") > 10


def test_preempted_while_decoding() -> None:
    observer = Observer(num_gpu_blocks_override=9, scheduler_reserve_full_isl=False)
    for number in range(3):
        observer.add(f"r{number}", [number + 3] * 20, max_tokens=40)
    observer.check()
    seen = observer.snapshot()
    assert clock.num_preemptions.total() > 0
    assert seen.value("vllm:num_preemptions") == clock.num_preemptions.total()
    assert seen.value("vllm:request_num_preemptions") == clock.num_preemptions.total()
    assert seen.value("quire_preemption_recomputed_tokens") > 0


def test_preempted_during_prefill() -> None:
    observer = Observer(num_gpu_blocks_override=9, max_num_batched_tokens=16, scheduler_reserve_full_isl=False)
    observer.add("first", [3] * 30, max_tokens=70)
    observer.step()
    observer.add("second", [4] * 100, max_tokens=2)
    observer.check()
    second = next(life for life, _ in observer.segments() if life.prompt_len == 100)
    (child,) = [child for child, lives in observer.lives.items() if lives[0] is second]
    assert clock.num_preemptions[child] > 0, "the setting preempts it before its first token"
    assert observer.snapshot().value("vllm:num_preemptions") == clock.num_preemptions.total()


def test_what_was_computed_adds_up() -> None:
    """Tokens the executor computed = prompts computed + decoded ones + those computed again."""
    observer = Observer(num_gpu_blocks_override=9, scheduler_reserve_full_isl=False)
    for number in range(4):
        observer.add(f"r{number}", [number + 3] * 20, max_tokens=40)
    observer.check()
    seen = observer.snapshot()
    decoded = seen.value("vllm:generation_tokens") - len(observer.lives)
    prompts = seen.value("vllm:prompt_tokens_by_source", "local_compute")
    again = seen.value("quire_preemption_recomputed_tokens")
    assert clock.num_preemptions.total() > 0
    assert clock.num_computed == prompts + decoded + again


def test_a_session_is_observed_as_it_was() -> None:
    observer = Observer(num_gpu_blocks_override=40)
    observer.add("s", [3] * 10, resumable=True, max_tokens=3)
    while observer.engine.has_unfinished_requests():
        observer.step()
    clock.now += 1000.0  # its user thinks: that is no time of ours, but in end to end
    observer.add("other", [9] * 5, max_tokens=5)
    observer.add("s", [4] * 6, resumable=True, max_tokens=4)
    while observer.engine.has_unfinished_requests():
        observer.step()
    observer.add("s", [5] * 6, resumable=False, max_tokens=2)
    observer.check()
    seen = observer.snapshot()
    assert seen.value("vllm:e2e_request_latency_seconds") > 1000
    assert seen.value("vllm:request_inference_time_seconds") < 1000


@pytest.mark.parametrize("in_step", [False, True])
def test_resumed_on_another_core(in_step: bool) -> None:
    """One that decodes keeps its stamps: the restart is one long interval between tokens. One that waits, or
    prefills, begins anew; its time to first token holds it all."""
    observer = Observer(max_num_seqs=2, num_gpu_blocks_override=40)
    observer.add("decoding", [3] * 9, n=2, max_tokens=9)
    for _ in range(3):
        observer.step()
    observer.add("waiting", [4] * 60, max_tokens=3)
    observer.die(in_step=in_step)
    observer.step()
    observer.die(in_step=in_step)
    observer.check()
    seen = observer.snapshot()
    assert seen.value("quire_engine_restarts", "killed") == 2
    assert seen.value("quire_requests_resumed") == 4
    assert seen.value("vllm:inter_token_latency_seconds") == seen.value("vllm:request_decode_time_seconds") > 1


def test_resumed_after_a_preemption() -> None:
    """A preemption that a dead core has not reported is not known; a reported one stays counted."""
    observer = Observer(num_gpu_blocks_override=9, scheduler_reserve_full_isl=False)
    for number in range(3):
        observer.add(f"r{number}", [number + 3] * 20, max_tokens=40)
    while not clock.num_preemptions.total():
        observer.step()
    observer.die(in_step=False)
    observer.check()
    assert 0 < observer.snapshot().value("vllm:num_preemptions") <= clock.num_preemptions.total()


def test_a_session_on_three_cores() -> None:
    observer = Observer(num_gpu_blocks_override=40)
    observer.add("s", [3] * 10, resumable=True, max_tokens=4)
    observer.step()
    observer.step()
    observer.die(in_step=True)
    while observer.engine.has_unfinished_requests():
        observer.step()
    observer.die(in_step=False)  # while it rests
    observer.add("s", [4] * 6, resumable=True, max_tokens=3)
    observer.add("s", [5] * 6, resumable=False, max_tokens=3)
    observer.step()
    observer.die(in_step=False)
    observer.check()


def test_aborts_wherever_they_are() -> None:
    observer = Observer(max_num_seqs=2)
    for number in range(6):
        observer.add(f"r{number}", [number + 3] * 30, n=1 + number % 2, max_tokens=20)
    for name in ("r5", "r0", "r1"):  # waiting; prefilling; perhaps decoding
        observer.step()
        observer.abort(name)
        observer.check_laws()
    observer.check()
    assert observer.snapshot().value("vllm:request_success", "abort") == 2 + 1 + 2


@pytest.mark.fresh
@pytest.mark.parametrize("seed", seeds(2))
def test_a_random_crowd(seed: int) -> None:
    rng = random.Random(seed)
    clock.__init__(seed)  # type: ignore[misc]
    observer = Observer(
        num_gpu_blocks_override=rng.choice((9, 12, 30)),
        max_num_batched_tokens=rng.choice((16, 48)),
        max_num_seqs=rng.choice((2, 6)),
        scheduler_reserve_full_isl=rng.random() < 0.5,
    )
    names = []
    for number in range(25):
        prompt = [rng.randrange(3) + 3] * rng.randint(1, 60)
        observer.add(f"r{number}", prompt, n=rng.choice((1, 1, 3)), max_tokens=rng.randint(1, 30))
        names.append(f"r{number}")
        for _ in range(rng.randrange(4)):
            if observer.engine.has_unfinished_requests():
                observer.step()
        if rng.random() < 0.2:
            observer.abort(rng.choice(names))
        if rng.random() < 0.2:
            observer.die(in_step=rng.random() < 0.5)
    observer.check()
    assert observer.audit.num_checks > 25
    assert observer.snapshot().value("quire_engine_restarts") > 0

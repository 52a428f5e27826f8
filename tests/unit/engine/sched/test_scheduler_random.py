"""Random lives of requests under random settings, with steps that overlap.

The worker of the harness checks every slot it reads; here we check that each request that was not aborted ends with
exactly the tokens it would have got alone, whatever happened around it, and that nothing is left behind.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.request import Request, RequestStatus
from quire.wire.engine_core import FinishReason
from quire.wire.execution import DraftTokenIds
from tests.seeds import examples, seeds

from ..harness import Engine, digest, make_request, make_scheduler


def oracle(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(digest("", tokens))
    return tokens[len(prompt) :]


def random_settings(rng: random.Random) -> dict[str, Any]:
    budget = rng.choice([4, 7, 16, 64])
    return {
        "num_blocks": rng.choice([12, 16, 30]),
        "max_model_len": 40,
        "enable_caching": rng.random() < 0.7,
        "log_stats": rng.random() < 0.5,
        "num_spec_tokens": rng.choice([0, 0, 2]),
        "max_num_batched_tokens": budget,
        "max_num_seqs": rng.choice([2, 4]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "enable_chunked_prefill": budget < 64 or rng.random() < 0.5,
        "long_prefill_token_threshold": rng.choice([0, 3, 8]),
        "scheduler_reserve_full_isl": rng.random() < 0.5,
        "watermark": rng.choice([0.0, 0.2]),
    }


class Life:
    """One engine and what was asked of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fields = random_settings(self.rng)
        self.engine = Engine(make_scheduler(**self.fields), digest)
        self.in_flight: deque[Any] = deque()
        self.depth = self.rng.choice([1, 1, 2, 3])
        self.expected: dict[str, list[int]] = {}
        self.inputs: dict[str, deque[Request]] = {}
        """Requests that follow in a conversation, under the same id."""
        self.num_requests: Counter[str] = Counter()
        self.aborted: set[str] = set()
        self.num_preemptions = 0

    def add(self) -> None:
        rng, request_id = self.rng, f"r{len(self.expected)}"
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 24))]
        if rng.random() < 0.5:
            prompt = [1] * rng.randint(1, 20) + prompt[:4]  # shared prefixes
        max_tokens = rng.randint(1, 12)
        outputs = oracle(prompt, max_tokens)
        resumed = rng.choice([0, 0, 0, max_tokens // 2])
        self.expected[request_id] = outputs[resumed:]
        self.engine.add(
            make_request(
                request_id,
                prompt,
                max_tokens=max_tokens,
                priority=rng.randint(-1, 1),
                output_token_ids=outputs[:resumed],
            )
        )

    def add_conversation(self) -> None:
        """Requests that follow one another, under one id: the prompt of each is all that came before."""
        rng, request_id = self.rng, f"r{len(self.expected)}"
        context: list[int] = []
        self.expected[request_id], self.inputs[request_id] = [], deque()
        num_inputs = rng.randint(2, 4)
        for _ in range(num_inputs):
            context, max_tokens = context + [rng.randrange(3) for _ in range(rng.randint(1, 5))], rng.randint(1, 5)
            self.inputs[request_id].append(
                make_request(
                    request_id,
                    context,
                    max_tokens=max_tokens,
                )
            )
            outputs = oracle(context, max_tokens)
            self.expected[request_id] += outputs
            context += outputs[:-1]
        self.num_requests[request_id] = num_inputs
        self.engine.add(self.inputs[request_id].popleft())

    def feed(self) -> None:
        """Mostly at once, when the worker does not know of the end of the request before."""
        for request_id, inputs in self.inputs.items():
            if inputs and request_id not in self.engine.scheduler.requests and self.rng.random() < 0.8:
                self.engine.add(inputs.popleft())

    def abort(self) -> None:
        live = list(self.engine.scheduler.requests)
        gone = self.rng.sample(live, min(len(live), self.rng.randint(0, 2)))
        self.aborted.update(gone)
        for request_id in gone:
            self.inputs.pop(request_id, None)
        self.engine.scheduler.finish_requests([*gone, "nobody"], RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        has_requests = self.engine.scheduler.has_requests()
        if len(self.in_flight) < self.depth and has_requests:
            output = self.engine.schedule()
            self.num_preemptions += len(output.preempted_req_ids)
            self.in_flight.append((output, self.engine.worker.execute(output)))
        if self.in_flight and (len(self.in_flight) == self.depth or not has_requests or self.rng.random() < 0.3):
            self.engine.update(*self.in_flight.popleft())
            self.propose_drafts()

    def propose_drafts(self) -> None:
        if self.fields["num_spec_tokens"] and not self.in_flight:
            for request in self.engine.scheduler.running:
                right = oracle(list(request.all_token_ids), 2)
                drafts = self.rng.choice([right, [right[0], -1], [-1]])
                self.engine.scheduler.update_draft_token_ids(DraftTokenIds([request.request_id], [drafts]))

    def act(self) -> None:
        roll = self.rng.random()
        if roll < 0.25 and len(self.expected) < 25:
            (self.add_conversation if roll < 0.05 else self.add)()
        elif roll < 0.30:
            self.abort()
        elif roll < 0.32:
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif roll < 0.38:
            self.in_flight.clear()
            self.engine.scheduler.abandon_steps()
            self.engine.scheduler.kv_cache_manager.check_integrity()
        else:
            self.step()
            self.feed()

    def finish(self) -> None:
        for _ in range(3000):
            self.feed()
            if any(self.inputs.values()) or self.engine.scheduler.has_requests() or self.in_flight:
                self.step()
            else:
                return
        raise AssertionError(f"no end in sight: {list(self.engine.scheduler.requests.values())}, {self.fields}")

    def check(self) -> None:
        scheduler = self.engine.scheduler
        for request_id, expected in self.expected.items():
            got = self.engine.tokens(request_id)
            ends = [o.finish_reason for o in self.engine.outputs.get(request_id, ()) if o.finish_reason is not None]
            if request_id in self.aborted:
                assert got == expected[: len(got)]
                assert len(ends) < max(1, self.num_requests[request_id])
            else:
                assert got == expected, (request_id, self.fields)
                assert ends == [FinishReason.LENGTH] * max(1, self.num_requests[request_id])
        assert scheduler.running == []
        assert len(scheduler.waiting) == 0
        assert scheduler.requests == {}
        assert scheduler.kv_cache_manager.usage == 0.0
        assert self.engine.worker.tokens == {}, "the worker was told of every end"


def live(seed: int, num_actions: int) -> Life:
    life = Life(seed)
    for _ in range(num_actions):
        life.act()
    life.finish()
    life.check()
    return life


@given(st.integers(0, 2**32))
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
def test_every_request_gets_its_own_tokens(seed: int) -> None:
    live(seed, 120)


@pytest.mark.fresh
def test_the_lives_are_eventful() -> None:
    """Guards the test above against settings under which nothing of interest happens."""
    lives = [live(seed, 200) for seed in seeds(20)]
    assert sum(life.num_preemptions for life in lives) > 50
    assert sum(len(life.aborted) for life in lives) > 20


@pytest.mark.slow
def test_many_long_lives() -> None:
    for seed in range(3000):
        live(seed, 400)

"""Tokens that a grammar forces: appended without the model, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.engine.request import Request
from quire.engine.sched.outputs import MAX_JUMP
from quire.engine.structured_output.manager import StructuredOutputManager
from quire.structured_outputs import ReasoningTokens, StructuredOutputsParams
from quire.wire.engine_core import FinishReason
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput

from ..harness import Engine, make_core_request, make_scheduler
from .test_manager import VOCAB, CountingBackend, CountingGrammar, structured, wait


class LeadingGrammar(CountingGrammar):
    """1, 2, … up to `last`; every fifth token could also be another one, so it is not forced."""

    def forced_token(self) -> int | None:
        following = self.seen + 1
        return None if following > self.last or following % 5 == 0 else following


class LeadingBackend(CountingBackend):
    vocab_size = 4 * VOCAB

    def compile(self, params: StructuredOutputsParams) -> LeadingGrammar:
        assert params.regex is not None
        return LeadingGrammar(int(params.regex))


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(lambda request: LeadingBackend(), jumps=True)
    yield manager
    manager.clear_backend()


def compiled(manager: StructuredOutputManager, *requests: Request) -> None:
    for request in requests:
        manager.grammar_init(request)
    wait(*requests)


def count(request_id: str, tokens: list[int]) -> int:
    return len(tokens) - 3  # the first output of a prompt of four is 1


def run(manager: StructuredOutputManager, request: Request, **config: Any) -> tuple[Engine, list[SchedulerOutput]]:
    engine = Engine(make_scheduler(structured_output_manager=manager, **config), count)
    compiled(manager, request)
    engine.add(request)
    steps = []
    while engine.scheduler.has_requests():
        steps.append(engine.step())
    return engine, steps


def test_forced_tokens_take_no_step(manager: StructuredOutputManager) -> None:
    engine, steps = run(manager, structured("a", "12", max_tokens=30))
    assert engine.tokens("a") == list(range(1, 13))
    assert engine.last("a").finish_reason is FinishReason.STOP
    assert [len(one.new_token_ids) for one in engine.outputs["a"]] == [4, 5, 3]
    told = [step.scheduled_cached_reqs.new_token_ids.get("a") for step in steps]
    assert told[:3] == [None, [1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [step.num_scheduled_tokens.get("a") for step in steps][:3] == [4, 4, 5]


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_counts_them(max_tokens: int, manager: StructuredOutputManager) -> None:
    engine, _ = run(manager, structured("a", "12", max_tokens=max_tokens))
    assert engine.tokens("a") == list(range(1, max_tokens + 1))
    assert engine.last("a").finish_reason is FinishReason.LENGTH


def test_a_stop_token_among_them_ends_the_output_once_it_may(manager: StructuredOutputManager) -> None:
    engine, _ = run(manager, structured("a", "12", max_tokens=30, stop_token_ids=[3]))
    assert engine.tokens("a") == [1, 2, 3]
    assert engine.last("a").stop_reason == 3
    engine, _ = run(manager, structured("b", "12", max_tokens=30, stop_token_ids=[3], min_tokens=5))
    assert engine.outputs["b"][0].new_token_ids == [1, 2]  # 3 is forbidden here: the sampler has to say so


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"logprob_token_ids": [1]},
        {"allowed_token_ids": [1, 2, 3]},
        {"bad_words": ["x"]},
        {"thinking_token_budget": 20, "reasoning_tokens": ReasoningTokens(31)},
    ],
)
def test_some_requests_need_every_step(fields: dict[str, Any], manager: StructuredOutputManager) -> None:
    engine, _ = run(manager, structured("a", "7", max_tokens=30, **fields))
    assert [one.new_token_ids for one in engine.outputs["a"]] == [[i] for i in range(1, 8)]


def test_without_the_flag_nothing_jumps() -> None:
    manager = StructuredOutputManager(lambda request: LeadingBackend())
    engine, _ = run(manager, structured("a", "7", max_tokens=30))
    assert [len(one.new_token_ids) for one in engine.outputs["a"]] == [1] * 7
    manager.clear_backend()


def test_a_jump_has_an_end(manager: StructuredOutputManager) -> None:
    class Endless(LeadingGrammar):
        def forced_token(self) -> int | None:
            return self.seen + 1

    class EndlessBackend(LeadingBackend):
        vocab_size = 2000

        def compile(self, params: StructuredOutputsParams) -> Endless:
            return Endless(1000)

    endless = StructuredOutputManager(lambda request: EndlessBackend(), jumps=True)
    engine, _ = run(endless, structured("a", "1", max_tokens=150), max_model_len=300)
    assert [len(one.new_token_ids) for one in engine.outputs["a"]] == [MAX_JUMP + 1, MAX_JUMP + 1, 20]
    endless.clear_backend()


def test_small_budgets_and_preemption(manager: StructuredOutputManager) -> None:
    """The jumped-over tokens are computed in chunks, or with all others after a preemption."""
    scheduler = make_scheduler(
        num_blocks=9, structured_output_manager=manager, max_num_batched_tokens=7, max_num_seqs=3
    )
    engine = Engine(scheduler, count)
    requests = [structured(name, "24", max_tokens=30) for name in "abc"]
    compiled(manager, *requests)
    engine.add(*requests)
    engine.run()
    for name in "abc":
        assert engine.tokens(name) == list(range(1, 25))
    assert sum(request.num_preemptions for request in requests) > 0


def test_a_resumed_request_jumps_from_where_it_was(manager: StructuredOutputManager) -> None:
    for resumed_at in range(1, 9):
        origin = make_core_request("a", 4, max_tokens=30, output_token_ids=range(1, resumed_at + 1))
        assert origin.sampling_params is not None
        origin.sampling_params.structured_outputs = StructuredOutputsParams(regex="9")
        engine, steps = run(manager, Request(origin))
        assert engine.tokens("a") == list(range(resumed_at + 1, 10))
        assert steps[0].scheduled_new_reqs[0].output_token_ids == list(range(1, resumed_at + 1))


def test_a_step_in_flight_does_not_lose_them(manager: StructuredOutputManager) -> None:
    """A request that is preempted while its step runs is recomputed with all it was given."""
    engine = Engine(make_scheduler(structured_output_manager=manager), count)
    request = structured("a", "9", max_tokens=30)
    compiled(manager, request)
    engine.add(request)
    step = engine.schedule()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.update(step, ModelRunnerOutput(["a"], [[1]]))
    assert list(request.output_token_ids) == [1, 2, 3, 4]
    again = engine.schedule()
    assert again.scheduled_new_reqs[0].output_token_ids == [1, 2, 3, 4]
    assert again.scheduled_cached_reqs.new_token_ids == {}
    assert request.unsent_token_ids == []


def test_the_mask_of_a_jump_is_that_of_its_end(manager: StructuredOutputManager) -> None:
    engine = Engine(make_scheduler(structured_output_manager=manager), count)
    request = structured("a", "9", max_tokens=30)
    compiled(manager, request)
    engine.add(request)
    engine.step()
    step = engine.schedule()
    output = engine.scheduler.get_grammar_bitmask(step)
    assert output is not None
    (allowed,) = np.flatnonzero(np.unpackbits(output.grammar_bitmask.view(np.uint8), bitorder="little"))
    assert allowed == 5

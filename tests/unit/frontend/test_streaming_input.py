"""Streaming-input sessions in the frontend, over the real core."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.errors import PromptTooLongError, ValidationError
from quire.frontend.drafts import DraftCounts
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.publish.stat_loggers import StatLogger
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.session import SessionInput
from quire.frontend.text.detokenizer import IncrementalDetokenizer
from quire.frontend.text.tokenizer import Tokenizer
from quire.outputs import RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from quire.wire.engine_core import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from quire.wire.stats import PrefillStats, SchedulerStats, SpecDecodeMetrics

from .metrics.mortal_client import MortalClient

MAX_MODEL_LEN = 128
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Totals(StatLogger):
    """Everything that was counted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.iterations: list[IterationStats] = []

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        if iteration_stats is not None:
            self.iterations.append(iteration_stats)
            self.counts["generation"] += iteration_stats.num_generation_tokens
            self.counts["prompt"] += iteration_stats.num_prompt_tokens
            self.counts["computed"] += iteration_stats.prompt_tokens.num_computed_tokens
            self.counts["first tokens"] += len(iteration_stats.time_to_first_tokens)
            self.counts["later tokens"] += sum(iteration_stats.inter_token_latencies.values())
            self.counts["finished"] += len(iteration_stats.finished_requests)
            self.counts["user requests"] += len(iteration_stats.n_params)


def make_config(**flags: Any) -> EngineConfig:
    flags = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 32, "max_num_seqs": 8, **flags}
    args = EngineArgs(
        "demo",
        distributed_executor_backend="quire.testing.fake_executor:FakeExecutor",
        max_model_len=MAX_MODEL_LEN,
        **flags,
    )
    return args.create_engine_config()


def make_engine(**flags: Any) -> tuple[LLMEngine, Totals]:
    totals = Totals()
    return LLMEngine(make_config(**flags), log_stats=True, stat_loggers=[totals]), totals


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    engine, _ = make_engine()
    yield engine
    engine.shutdown()


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if isinstance(output, RequestOutput)]
    return outputs


def params(max_tokens: int = 4, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **fields})


def assert_right(output: RequestOutput, max_tokens: int) -> None:
    """The end of a segment is what one request with the same prompt would have given."""
    assert output.prompt_token_ids is not None
    right = expected_output(FakeModel(), output.prompt_token_ids, params(max_tokens), MAX_MODEL_LEN)
    (completion,) = output.outputs
    assert list(completion.token_ids) == right.token_ids
    assert completion.finish_reason == str(right.finish_reason)


# -- LLMEngine --------------------------------------------------------------------------------------------------------


def test_a_session_step_by_step(engine: LLMEngine) -> None:
    internal = engine.add_request("s", [1, 2, 3], params(4), resumable=True)
    first = run(engine)[-1]
    assert (first.request_id, first.finished, first.outputs[0].finish_reason) == ("s", False, "length")
    assert first.prompt_token_ids == [1, 2, 3]
    assert_right(first, 4)
    assert not engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 0
    assert engine.step() == []

    assert engine.add_request("s", [9], params(2), resumable=True) == internal
    assert engine.has_unfinished_requests()
    second = run(engine)[-1]
    assert second.prompt_token_ids == [1, 2, 3, *list(first.outputs[0].token_ids)[:-1], 9]
    assert (second.finished, len(second.outputs[0].token_ids)) == (False, 2)
    assert_right(second, 2)

    assert engine.add_request("s", [8, 7], params(3)) == internal, "without resumable: the last input"
    last = run(engine)[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "length")
    assert_right(last, 3)
    assert engine.add_request("s", [8, 7], params(1)) != internal, "the id is free"


def test_text_inputs_follow_one_another_without_special_tokens(engine: LLMEngine) -> None:
    tokenizer = engine.get_tokenizer()
    engine.add_request("s", "The fox", params(2), resumable=True)
    first = run(engine)[-1]
    engine.add_request("s", " and the hen", params(2), resumable=True)
    second = run(engine)[-1]
    kept = [*(first.prompt_token_ids or []), *list(first.outputs[0].token_ids)[:-1]]
    assert second.prompt_token_ids == kept + tokenizer.encode(" and the hen", add_special_tokens=False)
    assert (first.prompt, second.prompt) == ("The fox", " and the hen")
    in_context = tokenizer.decode([*second.prompt_token_ids, *second.outputs[0].token_ids])
    assert second.outputs[0].text in in_context


@pytest.mark.parametrize("empty", ["", [], {"prompt_token_ids": []}])
def test_an_empty_last_input_ends_a_session(engine: LLMEngine, empty: Any) -> None:
    engine.add_request("s", [1, 2, 3], params(2, output_kind=DELTA), resumable=True)
    run(engine)
    engine.add_request("s", empty)
    (end,) = run(engine)
    assert (end.finished, list(end.outputs[0].token_ids), end.outputs[0].finish_reason) == (True, [], "length")
    assert engine.output_processor.request_states == {}


def test_inputs_may_be_sent_before_the_last_one_is_answered(engine: LLMEngine) -> None:
    engine.add_request("s", [1, 2, 3], params(3, output_kind=DELTA), resumable=True)
    for token in (4, 5):
        engine.add_request("s", [token], params(2, output_kind=DELTA), resumable=True)
    engine.add_request("s", [])
    outputs = run(engine)
    ends = [output for output in outputs if output.outputs[0].finish_reason is not None]
    assert [output.finished for output in ends] == [False, False, True]
    assert [len(output.prompt_token_ids or ()) for output in ends] == [3, 6, 8]
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 7


class Users:
    """Users with sessions of the engine: they read deltas, and know the right answers."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.contexts: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()

    def send(self, name: str, prompt: list[int], max_tokens: int, resumable: bool) -> None:
        self.counts["sessions"] += self.engine.output_processor.find_session(name) is None
        self.engine.add_request(name, prompt, params(max_tokens, output_kind=DELTA), resumable=resumable)

    def step(self) -> None:
        for output in self.engine.step():
            assert isinstance(output, RequestOutput)
            (completion,), name = output.outputs, output.request_id
            tokens = self.tokens.setdefault(name, [])
            tokens += completion.token_ids
            self.counts["tokens"] += len(completion.token_ids)
            if completion.finish_reason is not None and tokens:
                self._check_answer(name, output.prompt_token_ids or [], tokens)
                self.tokens[name] = []
            if output.finished:
                self.contexts.pop(name, None)

    def _check_answer(self, name: str, prompt: list[int], tokens: list[int]) -> None:
        right = expected_output(FakeModel(), prompt, params(len(tokens)), MAX_MODEL_LEN)
        assert tokens == right.token_ids
        context = self.contexts.get(name, [])
        assert prompt[: len(context)] == context
        self.counts["answers"] += 1
        self.counts["prompt"] += len(prompt) - len(context)
        self.contexts[name] = prompt + tokens[:-1]


@pytest.mark.parametrize("flags", [{}, {"num_gpu_blocks_override": 12}, {"enable_prefix_caching": False}])
def test_many_sessions_at_once(flags: dict[str, Any]) -> None:
    """Every answer is that of one request with the prompt it shows, and the ledger balances."""
    engine, totals = make_engine(**flags)
    users, rng, names, numbers = Users(engine), random.Random(0), [""] * 6, count()
    for _ in range(150):
        place, is_last = rng.randrange(6), rng.random() < 0.15
        is_open = engine.output_processor.find_session(names[place]) is not None
        if not is_open:
            names[place] = f"s{next(numbers)}"
        prompt = [rng.randrange(256) for _ in range(rng.randint(0 if is_last and is_open else 1, 9))]
        try:
            users.send(names[place], prompt, rng.randint(1, 6), not is_last)
        except PromptTooLongError:
            users.send(names[place], [], 1, False)
        for _ in range(rng.randrange(8)):
            users.step()
    for name in names:
        if engine.output_processor.find_session(name) is not None:
            users.send(name, [], 1, False)
    while engine.has_unfinished_requests():
        users.step()
    counts = users.counts
    assert counts["answers"] > 100
    assert totals.counts["first tokens"] == counts["answers"]
    assert totals.counts["generation"] == counts["tokens"]
    assert totals.counts["later tokens"] == counts["tokens"] - counts["answers"], "time between inputs is no latency"
    assert totals.counts["prompt"] == counts["prompt"]
    assert totals.counts["finished"] == totals.counts["user requests"] == counts["sessions"]
    engine.shutdown()


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_repeated_whenever_the_core_dies(seed: int) -> None:
    rng = random.Random(seed)
    config = make_config()
    client = MortalClient(config, lambda: 0.0)
    engine = LLMEngine(config, client=client, log_stats=True)
    users, num_inputs = Users(engine), 0
    while num_inputs < 9:
        name, prompt = f"s{num_inputs // 3}", [rng.randrange(256) for _ in range(rng.randint(1, 9))]
        users.send(name, prompt, rng.randint(1, 6), num_inputs % 3 < 2)
        num_inputs += 1
        for _ in range(rng.randrange(6)):
            roll = rng.random()
            if roll < 0.3:
                if roll < 0.15:
                    client.run_step()  # its outputs are lost
                client.die()
                client.start()
            users.step()
    while engine.has_unfinished_requests():
        users.step()
    assert users.counts["answers"] == 9
    engine.shutdown()


def test_abort_ends_a_session(engine: LLMEngine) -> None:
    engine.add_request("s", [1, 2, 3], params(2), resumable=True)
    run(engine)
    engine.abort_request(["s"])
    assert engine.output_processor.find_session("s") is None
    assert engine.output_processor.request_states == {}
    assert engine.engine_core.engine_core.scheduler.requests == {}  # type: ignore[attr-defined]


def test_a_session_that_cannot_be_told_of_an_input_ends(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add_request("s", [1, 2, 3], params(2), resumable=True)
    run(engine)

    def fail(request: EngineCoreRequest) -> None:
        raise OSError("no way through")

    monkeypatch.setattr(engine.engine_core, "add_request", fail)
    with pytest.raises(OSError, match="no way through"):
        engine.add_request("s", [4], params(2), resumable=True)
    assert engine.output_processor.request_states == {}
    assert engine.engine_core.engine_core.scheduler.requests == {}  # type: ignore[attr-defined]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("n", SamplingParams(n=2)),
        ("output_kind", SamplingParams(output_kind=FINAL_ONLY)),
        ("thinking_token_budget", SamplingParams(thinking_token_budget=5)),
        ("stop", SamplingParams(stop=["."])),
        ("sampling_params", PoolingParams()),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_session_cannot_have(engine: LLMEngine, field: str, bad: Any, is_first: bool) -> None:
    if not is_first:
        engine.add_request("s", [1], params(1), resumable=True)
    for resumable in (True,) if is_first else (True, False):
        with pytest.raises(ValidationError) as error:
            engine.add_request("s", [1], bad, resumable=resumable)
        assert error.value.param == field
        assert error.value.status_code == 400
    assert (engine.output_processor.find_session("s") is None) == is_first, "the session goes on"


@pytest.mark.parametrize(
    ("field", "prompt"),
    [
        ("prompt", []),
        ("prompt", ""),
        ("prompt_embeds", {"prompt_token_ids": [1], "prompt_embeds": [[0.5]]}),
        ("cache_salt", {"prompt_token_ids": [1], "cache_salt": "other"}),
        ("prompt", [1] * 125),
    ],
)
def test_inputs_a_session_cannot_take(engine: LLMEngine, field: str, prompt: Any) -> None:
    engine.add_request("s", {"prompt_token_ids": [1, 2], "cache_salt": "mine"}, params(2), resumable=True)
    run(engine)
    with pytest.raises(ValidationError) as error:
        engine.add_request("s", prompt, params(2), resumable=True)
    assert error.value.param == field
    engine.add_request("s", {"prompt_token_ids": [1], "cache_salt": "mine"}, params(2), resumable=True)
    assert_right(run(engine)[-1], 2)


def test_an_input_that_fits_only_if_the_answers_before_it_are_short_is_taken() -> None:
    """An input that certainly does not fit is refused at the door; one that may not ends the session with "length"."""
    engine, _ = make_engine()
    engine.add_request("s", [1] * 60, params(50), resumable=True)
    engine.add_request("s", [2] * 40, params(2), resumable=True)
    with pytest.raises(PromptTooLongError, match="at least 128"):
        engine.add_request("s", [3] * 28, params(2), resumable=True)
    end = run(engine)[-1]
    assert (end.finished, end.outputs[0].finish_reason, list(end.outputs[0].token_ids)) == (True, "length", [])
    engine.shutdown()


# -- OutputProcessor --------------------------------------------------------------------------------------------------


def open_session(p: OutputProcessor, prompt: list[int], text: str | None = None) -> None:
    request = EngineCoreRequest(
        "a-1", prompt, SamplingParams(max_tokens=9), None, 1000.0, resumable=True, external_req_id="a"
    )
    p.add_request(request, text)


def add_input(p: OutputProcessor, prompt: list[int], *, last: bool = False, **fields: Any) -> EngineCoreRequest:
    """The next input comes after an answer, and the request it makes is to be sent."""
    params = SamplingParams(**{"max_tokens": 9, **fields})
    result = p.add_input("a-1", SessionInput(prompt, params, 1010.0, last))
    (request,) = result.reqs_to_add
    return request


def feed(
    p: OutputProcessor, ids: list[int], stats: IterationStats | None = None, at: float = 0.0, **fields: Any
) -> Any:
    (output,) = p.process_outputs([EngineCoreOutput("a-1", ids, **fields)], at, stats).request_outputs
    return output


def test_text_and_logprobs_start_afresh_in_the_context(tokenizer: Tokenizer) -> None:
    p = OutputProcessor(tokenizer, log_stats=False)
    open_session(p, tokenizer.encode("the quick"), "the quick")
    ids = tokenizer.encode(" brown fox jumps", add_special_tokens=False)
    first = feed(p, ids, finish_reason=FinishReason.STOP, stop_reason=ids[-1])
    assert (first.finished, first.outputs[0].finish_reason, first.outputs[0].stop_reason) == (False, "stop", ids[-1])
    assert first.outputs[0].text == tokenizer.decode(ids[:-1]), "the stop token is not shown"
    assert add_input(p, [70], detokenize=False).sampling_params == SamplingParams(max_tokens=9, detokenize=False)
    assert type(p.request_states["a-1"].detokenizer) is IncrementalDetokenizer
    second = feed(p, [71])
    assert (second.prompt_token_ids, list(second.outputs[0].token_ids)) == (
        [*tokenizer.encode("the quick"), *ids[:-1], 70],
        [71],
    )


def test_no_session_no_input() -> None:
    p = OutputProcessor(None, log_stats=False)
    with pytest.raises(ValueError, match="no session a-1 takes input"):
        add_input(p, [1])
    open_session(p, [1])
    p.add_input("a-1", SessionInput([1], SamplingParams(), 1010.0, is_last=True))
    with pytest.raises(ValueError, match="no session a-1 takes input"):
        add_input(p, [1])


def test_the_books_of_a_session() -> None:
    """One request: its stages added up, and the time between its inputs left out of all but the latency."""
    p = OutputProcessor(None, log_stats=True)
    open_session(p, [1, 2, 3])

    def events(queued: float, scheduled: float) -> list[EngineCoreEvent]:
        return [
            EngineCoreEvent(EngineCoreEventType.QUEUED, queued),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, scheduled),
        ]

    first, second, third, last = (IterationStats(at) for at in (1001.0, 1002.0, 1012.0, 1020.0))
    feed(p, [5], first, 10.0, events=events(7.0, 8.0), prefill_stats=PrefillStats(3, 2, 1))
    shown = feed(p, [6, 7], second, 11.0, finish_reason=FinishReason.LENGTH)
    assert shown.num_cached_tokens == 1
    request = add_input(p, [8, 9], last=True)
    assert request.prompt_token_ids == [1, 2, 3, 5, 6, 8, 9]
    shown = feed(p, [5], third, 50.0, events=events(45.0, 47.0), prefill_stats=PrefillStats(7, 2, 5))
    assert shown.num_cached_tokens == 5, "of the prompt it shows"
    assert shown.metrics.first_token_latency == 2.0
    feed(p, [5], last, 54.0, finish_reason=FinishReason.STOP)

    assert [s.time_to_first_tokens for s in (first, second, third, last)] == [[1.0], [], [2.0], []]
    assert [s.inter_token_latencies for s in (first, second, third, last)] == [{}, {1.0: 1}, {}, {4.0: 1}]
    assert [s.num_prompt_tokens for s in (first, second, third, last)] == [3, 0, 2, 0]
    assert third.prompt_tokens == PrefillStats(2, 2, 0)
    assert [len(s.finished_requests) for s in (first, second, third)] == [0, 0, 0]
    (finished,) = last.finished_requests
    assert (finished.finish_reason, finished.num_prompt_tokens, finished.num_generation_tokens) == (
        FinishReason.STOP,
        5,
        5,
    )
    assert (finished.e2e_latency, finished.queued_time, finished.prefill_time) == (20.0, 3.0, 5.0)
    assert (finished.decode_time, finished.inference_time) == (5.0, 10.0)
    assert finished.mean_time_per_output_token == 5.0 / 3, "five tokens in two runs: three intervals"
    assert finished.num_cached_tokens == 1
    assert (last.max_num_generation_tokens, last.n_params) == ([5], [1])


@pytest.mark.parametrize("rests", [True, False])
def test_an_aborted_session_is_booked_once(rests: bool) -> None:
    p, iteration = OutputProcessor(None, log_stats=True), IterationStats(1005.0)
    open_session(p, [1, 2, 3])
    end = FinishReason.LENGTH if rests else None
    feed(p, [5], iteration, 10.0, finish_reason=end, prefill_stats=PrefillStats(3, 3))
    p.abort_requests(["a"], iteration_stats=iteration)
    (finished,) = iteration.finished_requests
    assert (finished.finish_reason, finished.num_generation_tokens) == (FinishReason.ABORT, 1)
    assert (finished.num_prompt_tokens, iteration.n_params) == (3, [1])


def test_drafts_of_a_session_are_the_sum_over_its_segments() -> None:
    p, iteration = OutputProcessor(None, log_stats=True, drafts=DraftCounts(3, "summary")), IterationStats(1005.0)
    open_session(p, [1, 2, 3])
    feed(p, [5, 6], iteration, 10.0, finish_reason=FinishReason.LENGTH, spec_decode_metrics=SpecDecodeMetrics(3, 1))
    add_input(p, [1], last=True)
    feed(p, [5], iteration, 11.0, finish_reason=FinishReason.LENGTH, spec_decode_metrics=SpecDecodeMetrics(2, 0))
    (finished,) = iteration.finished_requests
    assert (finished.num_draft_tokens, finished.num_accepted_draft_tokens) == (5, 1)


def test_a_corrupted_session_is_counted_once() -> None:
    p, iteration = OutputProcessor(None, log_stats=True), IterationStats(1005.0)
    open_session(p, [1, 2, 3])
    feed(p, [5], iteration, 10.0, finish_reason=FinishReason.LENGTH, num_nans_in_logits=1)
    add_input(p, [1], last=True)
    feed(p, [5], iteration, 11.0, finish_reason=FinishReason.LENGTH, num_nans_in_logits=1)
    assert iteration.num_corrupted_reqs == 1
    assert iteration.finished_requests[0].is_corrupted

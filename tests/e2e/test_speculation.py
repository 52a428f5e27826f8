"""The output with speculation is the output without, whatever drafts, samples, ends or shares the batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire import LLM, ReasoningTokens, SamplingParams, StructuredOutputsParams
from quire.outputs import RequestOutput
from quire.sampling_params import RepetitionDetectionParams
from quire.testing.oracle_drafter import FailingDrafter, OracleDrafter

from .test_oracle import num_preemptions

ORACLE = "quire.testing.oracle_drafter:OracleDrafter"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}}}
COUNT = "one two three one two three one two three one two"
LIST = "The scheduler decides at every step which requests run. The scheduler decides at every step"
QUESTIONS = ["What is a block table?", "Why is a seed useful?", COUNT, LIST]
EXTRA: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "logprobs": 0},
    {"temperature": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "logprobs": 5},
    {"temperature": 0, "logprobs": -1, "max_tokens": 9},
    {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.9, "frequency_penalty": 0.4},
    {"temperature": 0, "bad_words": [" the", " scheduler decides", " two three"], "min_tokens": 12},
    {"temperature": 0.8, "logit_bias": {300: 4.0, 301: -100.0}, "logprob_token_ids": [5, 300]},
    {"temperature": 0, "allowed_token_ids": list(range(200, 900))},
    {"temperature": 1, "min_tokens": 20, "ignore_eos": False},
    {"temperature": 0, "thinking_token_budget": 5, "reasoning_tokens": ReasoningTokens(400)},
    {"temperature": 0, "structured_outputs": StructuredOutputsParams(json=SCHEMA), "logprobs": 1},
    {"temperature": 1, "structured_outputs": StructuredOutputsParams(regex="(ab|cd){3} the scheduler [0-9]{2,9}")},
    {"temperature": 0, "stop": ["step", "three o"]},
    {"temperature": 0, "stop": [" de"], "include_stop_str_in_output": True},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0, "max_tokens": 6},
    {"temperature": 1, "n": 3, "max_tokens": 12},
    {
        "temperature": 0,
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=4),
    },
    {"temperature": 0.5, "extra_args": {"num_speculative_tokens": 1}},
]
REQUESTS = [
    (question, SamplingParams(**{"seed": i, "max_tokens": 40, "ignore_eos": i % 3 > 0, **extra}))
    for i, extra in enumerate(EXTRA)
    for question in QUESTIONS[i % 2 :: 2]
]
"""Each with a question and a text that repeats itself."""
ALL, SOME = slice(None), slice(0, None, 3)


@contextmanager
def engine(model: str = "demo", **arguments: Any) -> Iterator[LLM]:
    llm = LLM(
        model,
        **{
            "max_model_len": 256,
            "num_gpu_blocks_override": 400,
            "max_logprobs": -1,
            "disable_log_stats": False,
            **arguments,
        },
    )
    try:
        yield llm
    finally:
        llm.shutdown()
        gc.collect()


def answers(llm: LLM, some: slice = ALL) -> list[RequestOutput]:
    return llm.generate([q for q, _ in REQUESTS[some]], [p for _, p in REQUESTS[some]], use_tqdm=False)


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """All that a user sees of them, except which prompt tokens were cached."""
    return [
        (o.prompt_token_ids, [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in o.outputs])
        for o in outputs
    ]


def counters(llm: LLM) -> dict[str, Any]:
    return {m.name.rpartition(":")[2]: getattr(m, "value", None) for m in llm.get_metrics()}


@pytest.fixture(scope="module")
def alone() -> list[RequestOutput]:
    """The outputs without speculation."""
    with engine() as llm:
        outputs = answers(llm)
    OracleDrafter.answers.clear()
    OracleDrafter.learn(outputs)
    return outputs


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


IN_THE_MATRIX = [
    pytest.param(*row, id=name, marks=pytest.mark.slow)
    for name, row in {
        "n-gram": (NGRAM, 1.0, {}),
        "suffix": ({"method": "suffix", "num_speculative_tokens": 8}, 1.0, {}),
        "preempted": (
            {"model": ORACLE, "num_speculative_tokens": 5}, 0.8, {"num_gpu_blocks_override": 40, "max_num_seqs": 16},
        ),
        "draft model": ({"model": "demo-draft", "num_speculative_tokens": 4}, 1.0, {}),
        "drafts preempted": (
            {"model": "demo-draft", "num_speculative_tokens": 3}, 1.0,
            {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 64, "max_num_seqs": 16},
        ),
        "random": ({"model": ORACLE.replace("Oracle", "Random"), "num_speculative_tokens": 2}, 1.0, {}),
    }.items()
]  # fmt: skip
"""Drafters and companies that test_speculation_matrix has in the default suite, too."""


@pytest.mark.parametrize(
    ("speculation", "accuracy", "arguments"),
    [
        pytest.param({"model": ORACLE, "num_speculative_tokens": 8}, 1.0, {}, id="always right"),
        pytest.param(
            {"model": ORACLE, "num_speculative_tokens": 3},
            0.6,
            {"max_num_batched_tokens": 32, "max_num_seqs": 16},
            id="chunked",
        ),
        *IN_THE_MATRIX,
    ],
)
def test_speculation_changes_nothing(
    alone: list[RequestOutput],
    speculation: dict[str, Any],
    accuracy: float,
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(OracleDrafter, "accuracy", accuracy)
    with engine(speculative_config=speculation | {"adaptive": False}, **arguments) as llm:
        outputs = answers(llm)
        counted = counters(llm)
        if "num_gpu_blocks_override" in arguments:
            assert num_preemptions(outputs)
    assert seen(outputs) == seen(alone)
    if not arguments:
        assert [o.num_cached_tokens for o in outputs] == [o.num_cached_tokens for o in alone]
    assert counted["spec_decode_num_drafts"] > 100
    assert "the drafter failed" not in caplog.text
    accepted, drafted = counted.get("spec_decode_num_accepted_tokens", 0), counted["spec_decode_num_draft_tokens"]
    if speculation["model" if "model" in speculation else "method"] == ORACLE:
        assert accepted > 0.3 * accuracy * drafted
    assert accepted <= drafted


@pytest.mark.parametrize("method", ["ngram", pytest.param("suffix", marks=pytest.mark.slow)])
def test_a_prediction_changes_nothing_but_the_time(alone: list[RequestOutput], method: str) -> None:
    speculation = {"method": method, "num_speculative_tokens": 8, "adaptive": False}
    prompts = [{"prompt": q, "prediction": alone[i].outputs[0].text} for i, (q, _) in enumerate(REQUESTS)]
    accepted = []
    with engine(speculative_config=speculation) as llm:
        for given in ([q for q, _ in REQUESTS], prompts):
            before = counters(llm).get("spec_decode_num_accepted_tokens", 0)
            assert seen(llm.generate(given, [p for _, p in REQUESTS], use_tqdm=False)) == seen(alone)
            accepted.append(counters(llm).get("spec_decode_num_accepted_tokens", 0) - before)
            assert llm.reset_prefix_cache()
    assert accepted[1] > 1.5 * accepted[0]


def test_a_drafter_that_fails_costs_no_token(alone: list[RequestOutput], caplog: pytest.LogCaptureFixture) -> None:
    model = f"{FailingDrafter.__module__}:{FailingDrafter.__name__}"
    with engine(speculative_config={"model": model, "num_speculative_tokens": 4}) as llm:
        assert seen(answers(llm, SOME)) == seen(alone[SOME])
    assert caplog.text.count("the drafter failed") == 1


def test_a_follow_up_finds_the_same_prefix(alone: list[RequestOutput]) -> None:
    """Blocks that a request fills in its last step are found by the next one, with speculation and without."""
    prompt = list(alone[0].prompt_token_ids or []) + list(alone[0].outputs[0].token_ids)
    found = []
    for speculation in (None, {"model": ORACLE, "num_speculative_tokens": 8, "adaptive": False}):
        with engine(speculative_config=speculation) as llm:
            llm.generate(QUESTIONS[0], REQUESTS[0][1], use_tqdm=False)
            follow_up = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1), use_tqdm=False)
            found.append(follow_up[0].num_cached_tokens)
    assert found[0] == found[1] > 0

"""A streaming-input session on a real model: every answer equals that of one request with the prompt it shows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire import EngineArgs, LLMEngine, RequestOutput, SamplingParams

from .conftest import Checkpoint
from .test_oracle import FEW_BLOCKS

NUM_SESSIONS, NUM_INPUTS = 16, 4
DRAFTS = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4, "adaptive": False}


def make_engine(path: str, **flags: Any) -> LLMEngine:
    flags = {"device": "cpu", "dtype": "float32", "max_model_len": 640, "disable_log_stats": False, **flags}
    return LLMEngine.from_engine_args(EngineArgs(path, **flags))


def run(engine: LLMEngine) -> list[RequestOutput]:
    """The last outputs of whatever ends."""
    ends: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        ends += [o for o in engine.step() if isinstance(o, RequestOutput) and o.outputs[0].finish_reason is not None]
    return ends


def draw_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 20),
        seed=rng.getrandbits(32),
        temperature=rng.choice([0.0, 0.8]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        ignore_eos=True,
    )


def answers(
    engine: LLMEngine, num_sessions: int = NUM_SESSIONS
) -> tuple[dict[tuple[int, ...], tuple[list[int], SamplingParams]], int]:
    """Returns (the answers and the parameters of each, by the prompts that the engine has answered; the number of
    preemptions)."""
    rng, found = random.Random(7), {}
    asked: dict[str, list[SamplingParams]] = {}
    ends: list[RequestOutput] = []
    for turn in range(NUM_INPUTS):
        for i in range(num_sessions):
            prompt = [rng.randrange(3, 200) for _ in range(rng.choice([1, 5, 40, 150]))]
            params = draw_params(rng)
            asked.setdefault(f"s{i}", []).append(params)
            engine.add_request(f"s{i}", prompt, params, resumable=turn < NUM_INPUTS - 1)
            if i % 4 == 3:  # the others are answered together
                ends += run(engine)
    ends += run(engine)
    for end in ends:
        params = asked[end.request_id].pop(0)
        found[tuple(end.prompt_token_ids or ())] = list(end.outputs[0].token_ids), params
    assert len(found) == num_sessions * NUM_INPUTS
    return found, sum(end.metrics.num_preemptions for end in ends if end.metrics is not None)


ANSWERED: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
"""Answers of requests alone, by path, parameters and prompt: sessions that are right have the same prompts."""


def answers_alone(path: str, asked: dict[tuple[int, ...], SamplingParams]) -> dict[tuple[int, ...], list[int]]:
    """Returns the answers of requests that are alone in the engine and find nothing in a cache."""
    keys = {prompt: (path, repr(params), prompt) for prompt, params in asked.items()}
    missing = [prompt for prompt, key in keys.items() if key not in ANSWERED]
    if missing:
        engine = make_engine(path, max_num_seqs=1, enable_prefix_caching=False)
        for i, prompt in enumerate(missing):
            engine.add_request(f"r{i}", list(prompt), asked[prompt])
        for end in run(engine):
            prompt = tuple(end.prompt_token_ids or ())
            ANSWERED[keys[prompt]] = list(end.outputs[0].token_ids)
        engine.shutdown()
    return {prompt: ANSWERED[key] for prompt, key in keys.items()}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 48, **FEW_BLOCKS, "num_gpu_blocks_override": 48},
        {"speculative_config": DRAFTS},
    ],
    ids=["plain", "uncached", "few_blocks", "drafts"],
)
def test_a_session_equals_requests_with_everything_before(
    family: str, flags: dict[str, Any], checkpoint: Checkpoint
) -> None:
    path = str(checkpoint(family))
    engine = make_engine(path, max_num_seqs=8, **flags)
    found, num_preemptions = answers(engine)
    engine.shutdown()
    assert (num_preemptions > 0) == ("num_gpu_blocks_override" in flags), "answers lose their blocks to one another"
    right = answers_alone(path, {prompt: params for prompt, (_, params) in found.items()})
    assert {prompt: tokens for prompt, (tokens, _) in found.items()} == right

"""Promise P1 on the demo model: every way of sampling goes on over the death of the core as if nothing had happened.

In the model's own bfloat16 where the row-invariant native kernels are there, else in float32; with -m slow in both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any, NamedTuple

import numpy as np
import pytest

from quire import EngineArgs, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.testing.history import History
from quire.worker.kernels.library import native_library

from .harness import Assassin, Engine, read, running

PROMPT = "Once upon a time"
LENGTH = 80
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 4, "maxItems": 4},
        "age": {"type": "integer"},
    },
    "required": ["names", "age"],
    "additionalProperties": False,
}
REQUESTS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True),
    "greedy with logprobs": SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=3, prompt_logprobs=2),
    "seeded": SamplingParams(seed=11, max_tokens=LENGTH, ignore_eos=True),
    "seeded, filtered": SamplingParams(seed=12, max_tokens=LENGTH, top_k=20, top_p=0.9, min_p=0.02, ignore_eos=True),
    "unseeded": SamplingParams(max_tokens=LENGTH, ignore_eos=True),
    "unseeded, two outputs": SamplingParams(n=2, max_tokens=LENGTH, logprobs=1, ignore_eos=True),
    "seeded, three outputs": SamplingParams(n=3, seed=13, max_tokens=LENGTH, ignore_eos=True),
    "stop string": SamplingParams(
        seed=14, temperature=2, max_tokens=4 * LENGTH, stop=["zzz", " the "], min_tokens=20, ignore_eos=True
    ),
    "stop token": SamplingParams(
        seed=15,
        temperature=2,
        max_tokens=4 * LENGTH,
        min_tokens=20,
        stop_token_ids=list(range(300, 310)),
        ignore_eos=True,
    ),
    "penalties": SamplingParams(
        seed=16,
        max_tokens=LENGTH,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        ignore_eos=True,
    ),
    "min_tokens": SamplingParams(temperature=0, max_tokens=2 * LENGTH, min_tokens=LENGTH),
    "bias and bad words": SamplingParams(
        seed=17, max_tokens=LENGTH, logit_bias={5: 4.0, 9: -50.0}, bad_words=["the", "a"], ignore_eos=True
    ),
    "allowed tokens": SamplingParams(
        seed=18, max_tokens=LENGTH, allowed_token_ids=list(range(40, 90)), ignore_eos=True
    ),
    "json schema": SamplingParams(
        seed=19, max_tokens=2 * LENGTH, structured_outputs=StructuredOutputsParams(json=SCHEMA), logprobs=1
    ),
    "regex, two outputs": SamplingParams(
        n=2, max_tokens=LENGTH, structured_outputs=StructuredOutputsParams(regex="([a-z]{3} ){12}[.]")
    ),
}
REQUESTS["embeddings"] = SamplingParams(seed=20, max_tokens=LENGTH, logprobs=1, ignore_eos=True)
EMBEDS = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
ARGS = {
    dtype: EngineArgs(
        model="demo",
        dtype=dtype,
        max_model_len=512,
        num_gpu_blocks_override=400,
        enable_prompt_embeds=True,
        core_restart_limit=10_000,
        core_restart_window_s=1.0,
    )
    for dtype in ("float32", "bfloat16")
}
DRAFTS = {"model": "demo-draft", "num_speculative_tokens": 4, "adaptive": False}
LOGPROB_TOLERANCE = 1e-4
"""A resumed request is computed in other batches, and torch's kernels sum in another order there."""


async def _run(
    dtype: str,
    rng: random.Random,
    num_kills: int,
    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    drafts: dict[str, Any] | None = None,
) -> tuple[History, int]:
    """All requests at once: what their readers saw, and how many streams were resumed."""
    history = History(kind)
    async with running(dataclasses.replace(ARGS[dtype], speculative_config=drafts)) as engine:
        assassin = Assassin(
            engine, history, rng, num_kills, max_gap=_num_tokens() // (num_kills + 1) if num_kills else 1
        )
        await asyncio.gather(*(_read(engine, history, name, kind, assassin) for name in REQUESTS))
        assert num_kills == 0 or assassin.num_left <= num_kills // 2, "the requests ended too soon"
        return history, engine.counts["resumed_requests"]


def _num_tokens() -> int:
    return sum(params.n * LENGTH for params in REQUESTS.values())


async def _read(engine: Engine, history: History, name: str, kind: RequestOutputKind, assassin: Assassin) -> None:
    params = REQUESTS[name].clone()
    params.output_kind = kind
    prompt = {"prompt_embeds": EMBEDS} if name == "embeddings" else f"{PROMPT}, {name}"
    await read(engine, history, name, prompt, params, assassin.on_progress)


class Undisturbed(NamedTuple):
    dtype: str
    history: History


IS_NATIVE = native_library() is not None
"""torch's kernels round a row of bfloat16 by the batch it is in."""
DTYPES = [
    pytest.param("float32", marks=pytest.mark.slow if IS_NATIVE else ()),
    pytest.param("bfloat16", marks=() if IS_NATIVE else pytest.mark.skip("there are no native kernels here")),
]


@pytest.fixture(scope="module", params=DTYPES)
def undisturbed(request: pytest.FixtureRequest) -> Undisturbed:
    history, num_resumed = asyncio.run(_run(request.param, random.Random(0), 0))
    assert num_resumed == 0
    assert history.problems() == []
    return Undisturbed(request.param, history)


def test_the_requests_end_in_every_way(undisturbed: Undisturbed) -> None:
    """Else the test below would prove less than it says."""
    streams = undisturbed.history.streams
    ends = {key[0]: stream.finish_reason for key, stream in streams.items()}
    assert ends["stop string"] == ends["stop token"] == "stop"
    assert streams["stop token", 0].stop_reason in range(300, 310)
    assert streams["stop string", 0].stop_reason == " the "
    assert ends["seeded"] == "length"
    assert len({tuple(s.token_ids) for s in streams.values()}) == len(streams)
    assert all(len(s.token_ids) > 5 for s in streams.values())


def _check(
    undisturbed: Undisturbed, seed: int, num_kills: int, kind: RequestOutputKind, drafts: dict[str, Any] | None = None
) -> None:
    seen, num_resumed = asyncio.run(_run(undisturbed.dtype, random.Random(seed), num_kills, kind, drafts))
    assert num_resumed > 0
    assert seen.problems() == []
    assert seen.differences(undisturbed.history, logprob_tolerance=LOGPROB_TOLERANCE) == []


def test_every_way_of_sampling_survives_kills(undisturbed: Undisturbed) -> None:
    kind = RequestOutputKind.CUMULATIVE if undisturbed.dtype == "bfloat16" else RequestOutputKind.DELTA
    _check(undisturbed, 1, 2, kind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 210))
def test_every_way_of_sampling_survives_kills_with_drafts(undisturbed: Undisturbed, seed: int) -> None:
    """The expected outputs come from an engine without drafts."""
    _check(undisturbed, seed, 3, (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA)[seed % 2], DRAFTS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_every_way_of_sampling_survives_200_kills(undisturbed: Undisturbed, seed: int) -> None:
    _check(undisturbed, seed, 5, (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA)[seed % 2])

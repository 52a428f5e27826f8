"""Checks that every drafter without weights must pass, on the toy model."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from quire.config.engine import EngineConfig
from quire.config.speculative import Drafting
from quire.sampling_params import SamplingParams
from quire.wire.execution import CachedRequestData, SchedulerOutput
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.loader import Placement
from quire.worker.model_runner import ModelRunner
from quire.worker.spec_decode.drafter import Drafter, DrafterContext, DraftRow
from quire.worker.spec_decode.speculation import FixedLengths, Speculation

from ..toy import CPU, VOCAB, make_runner, new_request, run_step

MakeDrafter = Callable[[DrafterContext], Drafter]
LOOP = [3, 4, 5, 6] * 5
PARAMS = {
    "greedy": SamplingParams(temperature=0, logprobs=2),
    "looped": SamplingParams(temperature=0, logit_bias={3: 9.0, 4: 9.0}, repetition_penalty=1.2, logprobs=1),
    "cold": SamplingParams(temperature=0.3, seed=4, top_p=0.9, bad_words_token_ids=[[3, 4]]),
    "counted": SamplingParams(temperature=0.6, seed=5, presence_penalty=-2.0, frequency_penalty=-2.0),
}


def make_context(runner: ModelRunner, num_speculative_tokens: int = 5, **drafting: Any) -> DrafterContext:
    """A context of the toy model."""
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(vocab_size=VOCAB)))
    return DrafterContext(
        cast("EngineConfig", config),
        Drafting(
            method="ngram", num_speculative_tokens=num_speculative_tokens, **({"prompt_lookup_min": 1} | drafting)
        ),
        Placement(CPU, runner.batch.token_ids.dtype, TORCH_KERNELS),  # type: ignore[arg-type]
        runner,
        FixedLengths(),
    )


def generate(make: MakeDrafter | None, params: SamplingParams, prompt: list[int] = LOOP) -> tuple[list[int], list[Any]]:
    """30 tokens of a request and their log-probabilities; and checks that speculation has survived."""
    runner = make_runner()
    speculation: Speculation | None = None
    if make is not None:
        context = make_context(runner)
        speculation = Speculation(context, make(context))
        runner.on_step = speculation.end_step
    tokens: list[int] = []
    logprobs: list[Any] = []
    scheduled = new_request("a", prompt, len(prompt), params)
    computed = len(prompt)
    while len(tokens) < 30:
        if speculation is not None:
            speculation.begin_step(())
        output = run_step(runner, scheduled)
        tokens += output.sampled_token_ids[0]
        if "a" in output.logprobs:
            lists = output.logprobs["a"]
            assert len(lists.logprobs) == len(output.sampled_token_ids[0])
            logprobs += zip(lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks, strict=True)
        computed = len(prompt) + len(tokens) - 1
        drafts: list[int] = []
        if speculation is not None:
            proposed = speculation.propose()
            assert proposed.is_enabled
            drafts = proposed.draft_token_ids[0] if proposed.req_ids else []
        scheduled = SchedulerOutput(
            scheduled_cached_reqs=CachedRequestData(["a"], [None], [computed]),
            num_scheduled_tokens={"a": 1 + len(drafts)},
            total_num_scheduled_tokens=1 + len(drafts),
            scheduled_spec_decode_tokens={"a": drafts} if drafts else {},
        )
    return tokens[:30], logprobs[:30]


def check_sameness(make: MakeDrafter) -> None:
    """Tokens and log-probabilities are those without drafts."""
    for name, params in PARAMS.items():
        tokens, logprobs = generate(make, params)
        expected, expected_logprobs = generate(None, params)
        assert tokens == expected, name
        for (ids, values, rank), (other_ids, other_values, other_rank) in zip(logprobs, expected_logprobs, strict=True):
            assert (ids, rank) == (other_ids, other_rank), name
            np.testing.assert_allclose(values, other_values, atol=1e-5)


def make_row(req_id: str, token_ids: Sequence[int], max_drafts: int = 5) -> DraftRow:
    """A row whose tokens are all of the prompt but the last one."""
    n = len(token_ids)
    return DraftRow(req_id, 0, np.array(token_ids, np.int32), n - 1, n - 1, max_drafts)


def check_limits(make: MakeDrafter) -> None:
    """A proposal for each row, of at most `max_drafts` tokens and as many confidences, within its time."""
    drafter = make(make_context(make_runner()))
    rng = random.Random(2)
    rows = [make_row(f"r{n}", rng.choices(range(9), k=n), max_drafts) for n in (1, 2, 3, 50) for max_drafts in (1, 4)]
    proposals = drafter.propose(rows)
    assert len(proposals) == len(rows)
    for row, proposal in zip(rows, proposals, strict=True):
        assert len(proposal.token_ids) <= row.max_drafts
        assert len(proposal.confidences) == len(proposal.token_ids)
        assert all(0 <= bucket <= 15 for bucket in proposal.confidences)
    assert drafter.propose([]) == []
    long = [make_row("long", rng.choices(range(200), k=8000))]
    drafter.propose(long)
    start = time.process_time()
    for _ in range(20):
        drafter.propose(long)
    assert (time.process_time() - start) / 20 < 0.005


def check_forgetting(make: MakeDrafter) -> None:
    """Its memory does not grow with the requests that it has forgotten."""
    drafter = make(make_context(make_runner()))
    sizes = []
    for count in (2, 40):
        for i in range(count):
            drafter.propose([make_row(f"{count}.{i}", LOOP)])
            drafter.observe(f"{count}.{i}", [1, 2], 1)
        for i in range(count):
            drafter.forget(f"{count}.{i}")
        sizes.append(_count_objects(drafter))
    drafter.forget("never seen")
    assert sizes[0] == sizes[1]


def _count_objects(drafter: Drafter) -> int:
    """Elements of all containers among the drafter's attributes."""
    values = list(getattr(drafter, "__dict__", {}).values())
    containers = [v for v in values if isinstance(v, (dict, list, set, tuple))]
    nested = [v for c in containers for v in gc.get_referents(c) if isinstance(v, (dict, list, set, tuple))]
    return sum(map(len, containers + nested))

"""Verification of several rows in one call, against one call per token."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.sampling_params import SamplingParams
from quire.structured_outputs import ReasoningTokens
from quire.worker.sample.kernel import SamplingKernel
from quire.worker.sample.metadata import SamplingTable
from quire.worker.sample.sampler import sample
from quire.worker.sample.verify import NO_DRAFT, Runs, accept, verify

VOCAB = 40
KINDS = [
    {"temperature": 0},
    {"temperature": 1, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 5, "logprobs": 3},
    {"temperature": 0, "logprobs": 0, "logprob_token_ids": [4, 2]},
    {"temperature": 0, "repetition_penalty": 1.7, "presence_penalty": 0.5, "logprobs": 1},
    {"temperature": 1, "frequency_penalty": 1.9},
    {"temperature": 0, "bad_words_token_ids": [[3], [5, 6], [7, 8, 9]]},
    {"temperature": 0.9, "logit_bias": {3: 2.0, 5: -100.0}, "min_tokens": 4, "stop_token_ids": [1, 2, 3]},
    {"temperature": 0, "allowed_token_ids": list(range(3, 12)), "logprobs": 2},
    {"temperature": 1, "thinking_token_budget": 5, "reasoning_tokens": ReasoningTokens(39)},
]


def test_a_run_counts_up_to_the_first_token_that_is_no_draft() -> None:
    runs = Runs(np.array([0, 1, 5, 8]), np.array([1, 4, 3, 2]), np.array([-1, 4, 5, 6, -1, 7, 8, -1, 9, -1]))
    assert runs.drafts[runs.firsts + runs.lens - 1].tolist() == [NO_DRAFT] * 4
    assert accept(np.array([3, 4, 5, 9, 6, 1, 8, 2, 9, 0]), runs).tolist() == [1, 3, 1, 2]
    assert accept(np.array([3, 4, 5, 6, 6, 7, 8, 2, 8, 0]), runs).tolist() == [1, 4, 3, 1]


@pytest.mark.parametrize("seed", range(12))
def test_runs_yield_the_tokens_of_one_call_per_token(seed: int, sampling: SamplingKernel) -> None:
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    n = rng.choice([1, 3, len(KINDS)])
    params = [SamplingParams(seed=i, **rng.choice(KINDS) if n < 4 else KINDS[i]) for i in range(n)]
    prompts = [rng.choices(range(VOCAB), k=4) for _ in params]
    outputs = [rng.choices(range(VOCAB), k=rng.randrange(6)) for _ in params]
    longest = [rng.choice([0, 0, 1, 2, 5]) for _ in params]
    logits = [torch.randn(k + 1, VOCAB, generator=torch_rng) * 3 for k in longest]

    # one call per token: what each request would get without drafts, if the logits after them were these
    expected, expected_logprobs = [], []
    for i, rows in enumerate(logits):
        table = SamplingTable(1)
        table.set_row(0, f"r{i}", params[i], prompts[i], outputs[i])
        tokens, lists = [], []
        for row in rows:
            metadata, num_outputs = table.select(np.arange(1), row.device), len(outputs[i]) + len(tokens)
            sampled = sample(row[None].clone(), metadata, np.array([num_outputs]), sampling)
            tokens.append(int(sampled.token_ids[0]))
            lists.append(sampled.logprobs.get(0))
            if 0 in table.histories:
                table.histories[0].append(tokens[-1])
        expected.append(tokens)
        expected_logprobs.append(lists)

    # drafts: the right ones up to somewhere
    num_right = [rng.randint(0, k) for k in longest]
    drafts = []
    for tokens, k, right in zip(expected, longest, num_right, strict=True):
        wrong = [(tokens[j] + 1) % VOCAB for j in range(right, k)]
        drafts += [*tokens[:right], *wrong, NO_DRAFT]
    lens = np.array(longest) + 1
    table = SamplingTable(n)
    for i in range(n):
        table.set_row(i, f"r{i}", params[i], prompts[i], outputs[i])
    metadata = table.select(np.arange(n), torch.device("cpu"))
    runs = Runs(np.cumsum(lens) - lens, lens, np.array(drafts))
    verified = verify(torch.cat(logits), metadata, np.array([len(o) for o in outputs]), runs, sampling)

    assert verified.token_ids == [t[: right + 1] for t, right in zip(expected, num_right, strict=True)]
    for i, lists in enumerate(expected_logprobs):
        if lists[0] is None:
            assert i not in verified.logprobs
            continue
        kept = verified.logprobs[i]
        assert kept.logprob_token_ids == [x.logprob_token_ids[0] for x in lists[: num_right[i] + 1]]
        assert kept.logprobs == [x.logprobs[0] for x in lists[: num_right[i] + 1]]
        assert kept.sampled_token_ranks == [x.sampled_token_ranks[0] for x in lists[: num_right[i] + 1]]

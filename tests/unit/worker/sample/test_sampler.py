"""The whole sampler against one request at a time in plain numpy, and requests in a batch against requests alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling_params import SamplingParams
from quire.structured_outputs import ReasoningTokens
from quire.worker.sample import sampler, torch_kernel
from quire.worker.sample.kernel import SamplingKernel
from quire.worker.sample.metadata import SamplingTable
from quire.worker.sample.torch_kernel import uniforms
from tests.seeds import examples

VOCAB = 24
CPU = torch.device("cpu")
TOKEN = st.integers(0, VOCAB - 1)


def oracle(x: np.ndarray, p: SamplingParams, prompt: list[int], output: list[int]) -> int:
    """Sample one token, in the documented order, by the book. x: [VOCAB] float64, changed."""
    if p.allowed_token_ids:
        x[[t for t in range(VOCAB) if t not in p.allowed_token_ids]] = -np.inf
    for word in p.bad_words_token_ids or []:
        if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    if len(output) < p.min_tokens:
        x[list(p.all_stop_token_ids)] = -np.inf
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in range(VOCAB):
        if token in prompt or token in output:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty * (token in output)
    if p.thinking_token_budget is not None and thinks_for(p.reasoning_tokens, output) >= p.thinking_token_budget:
        x[:] = -np.inf
        x[p.reasoning_tokens.close] = 0
    if p.is_greedy:
        return int(x.argmax())
    x /= p.temperature
    x[np.exp(x - x.max()) < p.min_p] = -np.inf
    if p.top_k:
        x[x < sorted(x)[-min(p.top_k, VOCAB)]] = -np.inf
    probs = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    if p.top_p < 1:
        ranked = sorted(probs, reverse=True)
        last = int((np.cumsum(ranked) < p.top_p).sum())
        x[probs < ranked[min(last, VOCAB - 1)]] = -np.inf
        probs = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    (u,) = uniforms(np.array([p.seed % 2**64], np.uint64), np.array([len(output)]))
    cdf = np.cumsum(probs)
    return int(np.searchsorted(cdf, u * cdf[-1], side="right"))


def thinks_for(tokens: ReasoningTokens, output: list[int]) -> int:
    """Returns how many tokens of open reasoning there are at the end of an output; -1 if it is not open."""
    is_open, num = tokens.open is None, 0
    for token in output:
        if token == tokens.close:
            return -1
        if is_open:
            num += 1
        elif token == tokens.open:
            is_open = True
    return num if is_open else -1


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    p = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 5, 100])),
        top_p=draw(st.sampled_from([1.0, 0.313, 0.871])),
        min_p=draw(st.sampled_from([0.0, 0.0517])),
        seed=draw(st.integers(-(2**63), 2**63 - 2)),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.31])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        logit_bias=draw(st.none() | st.dictionaries(TOKEN, st.sampled_from([-100.0, 1.5, 4.0]), min_size=1)),
        allowed_token_ids=draw(st.none() | st.lists(TOKEN, min_size=4, unique=True)),
        stop_token_ids=draw(st.lists(TOKEN, max_size=3)),
        min_tokens=draw(st.sampled_from([0, 3])),
        max_tokens=100,
        thinking_token_budget=draw(st.sampled_from([None, 0, 1, 5])),
        reasoning_tokens=ReasoningTokens(0, draw(st.sampled_from([None, 1]))),
        logprobs=draw(st.sampled_from([None, 0, 4, -1])),
        logprob_token_ids=draw(st.none() | st.lists(TOKEN, min_size=1, max_size=4)),
    )
    p.bad_words_token_ids = draw(st.none() | st.lists(st.lists(TOKEN, min_size=1, max_size=3), min_size=1, max_size=3))
    return p


requests_strategy = st.lists(
    st.tuples(params(), st.lists(TOKEN, max_size=12), st.lists(TOKEN, max_size=12)), min_size=1, max_size=5
)


def run(
    logits: torch.Tensor, requests: list[tuple[SamplingParams, list[int], list[int]]], kernel: SamplingKernel
) -> sampler.SamplerOutput:
    table = SamplingTable(len(requests))
    for row, (p, prompt, output) in enumerate(requests):
        table.set_row(row, f"request {row}", p, prompt, output)
    lens = np.array([len(output) for _, _, output in requests])
    return sampler.sample(logits.clone(), table.select(np.arange(len(requests)), CPU), lens, kernel)


@settings(max_examples=examples(20))
@given(requests=requests_strategy, seed=st.integers(0, 2**32 - 1))
def test_equals_the_book_and_does_not_depend_on_neighbours(
    sampling: SamplingKernel, requests: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    output = run(logits, requests, sampling)
    for row, (p, prompt, generated) in enumerate(requests):
        x = logits[row].double().numpy()
        raw = x - np.log(np.exp(x).sum())
        with np.errstate(invalid="ignore"):
            expected = oracle(x, p, prompt, generated)
        if np.isfinite(x).any():  # a request may forbid every token it allows
            assert output.token_ids[row] == expected
        alone = run(logits[row : row + 1], [requests[row]], sampling)
        assert alone.token_ids[0] == output.token_ids[row]
        assert alone.logprobs.get(0) == output.logprobs.get(row)  # to the bit
        assert (row in output.logprobs) == (p.logprobs is not None or p.logprob_token_ids is not None)
        if row in output.logprobs:
            check_logprobs(output.logprobs[row], raw, int(output.token_ids[row]), p)


def check_logprobs(lists: sampler.LogprobsLists, raw: np.ndarray, token: int, p: SamplingParams) -> None:
    """The sampled token, the top ones, the ones asked for by id: from the raw distribution."""
    count = VOCAB if p.logprobs == -1 else p.logprobs or 0
    others = np.argsort(-raw, kind="stable")[:count].tolist() + (p.logprob_token_ids or [])
    assert lists.logprob_token_ids == [[token, *others]]
    np.testing.assert_allclose(lists.logprobs[0], raw[[token, *others]], atol=1e-5)
    assert lists.sampled_token_ranks == [1 + int((raw > raw[token]).sum())]


def test_greedy_batch_does_nothing_but_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((torch_kernel, "_draw"), (sampler, "edit_logits"), (sampler, "score_tokens")):
        monkeypatch.delattr(module, name)
    logits = torch.randn(3, VOCAB)
    output = run(logits, [(SamplingParams(temperature=0), [1], [2])] * 3, torch_kernel.TorchSampling())
    assert output.token_ids.tolist() == logits.argmax(-1).tolist()
    assert output.logprobs == {}


def test_filters_run_on_the_rows_that_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in ("keep_top_k", "keep_top_p", "keep_min_p"):
        monkeypatch.setattr(
            torch_kernel, name, lambda logits, _, v, name=name: seen.append((name, len(logits), v.tolist()))
        )
    asked = [{"temperature": 0}, {"top_k": 7}, {}, {"top_k": 9, "top_p": 0.5}]
    requests = [(SamplingParams(seed=1, **kwargs), [], []) for kwargs in asked]
    run(torch.randn(4, VOCAB), requests, torch_kernel.TorchSampling())
    assert seen == [("keep_top_k", 2, [7, 9]), ("keep_top_p", 1, [0.5])]


def test_logprobs_of_one_row_do_not_depend_on_what_others_want(sampling: SamplingKernel) -> None:
    """Rows that want more columns, or all, and rows whose logits are edited."""
    logits = torch.randn(4, VOCAB)
    asked = [{"logprobs": 2}, {"logprobs": -1}, {"logprobs": 0, "logit_bias": {3: 9.0}}, {"logprob_token_ids": [5, 1]}]
    requests = [(SamplingParams(temperature=0, **kwargs), [], []) for kwargs in asked]
    together = run(logits, requests, sampling)
    assert [len(lists.logprobs[0]) for lists in together.logprobs.values()] == [3, 1 + VOCAB, 1, 3]
    for row, request in enumerate(requests):
        assert run(logits[row : row + 1], [request], sampling).logprobs[0] == together.logprobs[row]


def test_min_tokens_ends_with_the_output_length() -> None:
    """The same metadata serves all steps: what changes is the length."""
    p = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3], max_tokens=9)
    p.eos_token_id = 4
    table = SamplingTable(1)
    table.set_row(0, "a", p, [], [])
    metadata = table.select(np.array([0]), CPU)
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 4, 5]] = torch.tensor([3.0, 2.0, 1.0])
    drawn = [
        sampler.sample(logits.clone(), metadata, np.array([n]), torch_kernel.TorchSampling()).token_ids[0]
        for n in (0, 1, 2, 3)
    ]
    assert drawn == [5, 5, 3, 3]


def test_a_request_without_a_seed_draws_by_its_id() -> None:
    def draws(req_id: str) -> list[int]:
        table = SamplingTable(1)
        table.set_row(0, req_id, SamplingParams(), [], [])
        metadata = table.select(np.array([0]), CPU)
        return [
            int(
                sampler.sample(torch.zeros(1, 1000), metadata, np.array([n]), torch_kernel.TorchSampling()).token_ids[0]
            )
            for n in range(8)
        ]

    assert draws("a") == draws("a")
    assert draws("a") != draws("b")

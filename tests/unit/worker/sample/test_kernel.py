"""The contract of SamplingKernel, for torch's and the native one on every instruction set: against float64 by the book,
and rows in a batch against rows alone, to the bit."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native_sampling import NativeSampling
from quire.worker.sample.kernel import DrawRules, SamplingKernel
from quire.worker.sample.torch_kernel import TorchSampling, uniforms

VOCABS = [1, 2, 15, 16, 17, 63, 64, 1000, 1024, 1025, 3000, 20_000]
TOLERANCE = 1e-5
"""Tolerance of a sum of probabilities: where two decisions are that near to each other, either is right."""


class Case(NamedTuple):
    temperature: float
    min_p: float
    top_k: int
    top_p: float


CASES = [
    Case(temperature, min_p, top_k, top_p)
    for temperature, min_p, top_k, top_p in [
        (1.0, 0.0, 0, 1.0), (0.7, 0.0, 0, 1.0), (0.01, 0.0, 0, 1.0), (2.0, 0.0, 0, 1.0),
        (1.0, 0.1, 0, 1.0), (1.3, 1.0, 0, 1.0), (1.0, 1e-45, 0, 1.0),
        (1.0, 0.0, 1, 1.0), (1.0, 0.0, 50, 1.0), (0.5, 0.0, 999, 1.0), (1.0, 0.0, 2**62, 1.0),
        (1.0, 0.0, 0, 0.9), (0.6, 0.0, 0, 0.95), (2.0, 0.0, 0, 0.5), (1.0, 0.0, 0, 1e-9), (1.0, 0.0, 0, 0.9999999),
        (0.8, 0.05, 40, 0.91), (1.5, 1e-4, 300, 0.99),
    ]
]  # fmt: skip


def make_logits(kind: str, n: int, vocab: int) -> np.ndarray:
    rng = np.random.default_rng(vocab)
    x = rng.standard_normal((n, vocab))
    scale = {"flat": 0.1, "usual": 3.0, "peaked": 12.0}.get(kind)
    if scale is not None:
        x *= scale
    elif kind == "tied":  # as after a bfloat16 matrix product
        x = np.round(x * 4) / 4
    elif kind == "equal":
        x[:] = -7.25
    elif kind == "rising":
        x = np.sort(x, axis=1)
    elif kind == "halving":  # each bucket of a linear histogram but the last holds next to nothing
        x = -(2.0 ** -rng.uniform(0, 120, (n, vocab)))
    elif kind == "banned":
        x[rng.random((n, vocab)) < 0.9] = -np.inf
        x[:, vocab // 2] = 1.0
    elif kind == "huge":
        x = np.where(x > 0, 3e38, -3e38) * rng.uniform(0.9, 1.0, x.shape)
    return x.astype(np.float32)


KINDS = ["flat", "usual", "peaked", "tied", "equal", "rising", "halving", "banned", "huge"]


def make_rules(cases: list[Case]) -> DrawRules:
    columns = [np.array(column) for column in zip(*cases, strict=True)]
    temperature, min_p, top_p = (columns[i].astype(np.float32) for i in (0, 1, 3))
    seeds = np.arange(len(cases), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return DrawRules(temperature, min_p, columns[2].astype(np.int64), top_p, seeds)


def rows_of(rules: DrawRules, rows: slice) -> DrawRules:
    return DrawRules(*(getattr(rules, name)[rows] for name in ("temperature", "min_p", "top_k", "top_p", "seeds")))


def keep(x: np.ndarray, case: Case, slack: float) -> np.ndarray:
    """Which tokens the filters leave; `slack` is added to top_p. x: [vocab] float32."""
    temperature, best = float(np.float32(case.temperature)), float(x.max())
    kept = np.isfinite(x)
    min_p = float(np.float32(case.min_p))
    if min_p:
        kept &= x >= np.float32(best + temperature * max(np.log(min_p), -87))
    if 0 < case.top_k < len(x):
        kept &= x >= np.sort(x)[::-1][case.top_k - 1]
    if case.top_p < 1:
        ranked = np.sort(x[kept])[::-1]
        weights = np.exp((ranked.astype(np.float64) - best) / temperature)
        mass = np.cumsum(weights) / weights.sum()
        last = int((mass < float(np.float32(case.top_p)) + slack).sum())
        kept &= x >= ranked[min(last, len(ranked) - 1)]
    return kept


def is_right(token: int, x: np.ndarray, case: Case, u: float) -> bool:
    """Returns True if `token` is where the inverse CDF at u is, within the tolerance."""
    for slack in (0.0, TOLERANCE, -TOLERANCE):
        kept = keep(x, case, slack)
        with np.errstate(over="ignore"):
            weights = np.exp((x.astype(np.float64) - float(x.max())) / float(np.float32(case.temperature)))
        weights[~kept] = 0
        cdf = np.cumsum(weights) / weights.sum()
        before = cdf[token - 1] if token else 0.0
        if weights[token] and before - TOLERANCE <= u <= cdf[token] + TOLERANCE:
            return True
        if case.top_p == 1:
            break
    return False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_draw_is_that_of_the_book(sampling: SamplingKernel, vocab: int, kind: str) -> None:
    x, rules = make_logits(kind, len(CASES), vocab), make_rules(CASES)
    indices = np.arange(len(CASES)) * 3 + vocab
    tokens = sampling.choose(torch.from_numpy(x.copy()), rules, indices)
    for row, (case, u) in enumerate(zip(CASES, uniforms(rules.seeds, indices), strict=True)):
        assert is_right(int(tokens[row]), x[row], case, u), (case, u)


@functools.cache
def torchs_choice(kind: str) -> tuple[np.ndarray, DrawRules, np.ndarray, np.ndarray]:
    """Returns logits, rules, indices, and the tokens that torch's kernel chooses."""
    n = 3 * len(CASES)
    x, rules, indices = make_logits(kind, n, 3000), make_rules(CASES * 3), np.arange(n) + 5
    return x, rules, indices, TorchSampling().choose(torch.from_numpy(x.copy()), rules, indices)


@pytest.mark.parametrize("kind", KINDS)
def test_native_and_torch_choose_the_same_where_sums_are_not_close(sampling: SamplingKernel, kind: str) -> None:
    x, rules, indices, expected = torchs_choice(kind)
    assert (sampling.choose(torch.from_numpy(x.copy()), rules, indices) != expected).sum() <= 1


@pytest.mark.parametrize("vocab", [1, 17, 1025, 40_000])
def test_greedy_rows_get_the_first_of_the_likeliest(sampling: SamplingKernel, vocab: int) -> None:
    logits = torch.from_numpy(make_logits("tied", 40, vocab).round())
    expected = logits.numpy().argmax(axis=1)
    lens = np.zeros(40, np.int64)
    assert sampling.choose(logits, None, lens).tolist() == expected.tolist()
    mixed = make_rules([Case(0.0, 0.5, 3, 0.2), Case(1.0, 0.0, 0, 1.0)] * 20)
    assert sampling.choose(logits, mixed, lens)[::2].tolist() == expected[::2].tolist()


def test_the_number_is_that_of_philox(sampling: SamplingKernel) -> None:
    """A draw from a uniform distribution over 2**16 tokens gives the number's first 16 bits."""
    rng = np.random.default_rng(1)
    rules = make_rules([Case(1.0, 0.0, 0, 1.0)] * 64)
    rules = DrawRules(rules.temperature, rules.min_p, rules.top_k, rules.top_p, rng.integers(0, 2**64, 64, np.uint64))
    indices = rng.integers(0, 2**40, 64)
    tokens = sampling.choose(torch.zeros(64, 2**16), rules, indices)
    assert tokens.tolist() == (uniforms(rules.seeds, indices) * 2**16).astype(int).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [17, 3000, 20_000])
def test_tokens_and_logprobs_do_not_depend_on_company(sampling: SamplingKernel, vocab: int, kind: str) -> None:
    n = len(CASES)
    logits, rules = torch.from_numpy(make_logits(kind, n, vocab)), make_rules(CASES)
    indices = np.arange(n)
    together = sampling.choose(logits, rules, indices)
    scored = sampling.logprobs(logits, indices, together, min(20, vocab))
    for row in range(n):
        one = slice(row, row + 1)
        alone = sampling.choose(logits[one].clone(), rows_of(rules, one), indices[one])
        assert alone[0] == together[row]
        again = sampling.logprobs(logits[one].clone(), np.array([0]), alone, min(20, vocab))
        assert all(a[0].tobytes() == b[row].tobytes() for a, b in zip(again, scored, strict=True))


def test_threads_change_nothing(library: NativeLibrary) -> None:
    x, rules = torch.from_numpy(make_logits("usual", len(CASES), 151_936)), make_rules(CASES)
    instruction_set, indices = library.instruction_sets()[0], np.arange(len(CASES))
    results = []
    for num_threads in (1, 3):
        kernel = NativeSampling(Context(library, num_threads, instruction_set))
        tokens = kernel.choose(x, rules, indices)
        results.append([tokens, *kernel.logprobs(x, indices, tokens, 20)])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))
    for row, (case, u) in enumerate(zip(CASES, uniforms(rules.seeds, indices), strict=True)):
        assert is_right(int(results[0][0][row]), x[row].numpy(), case, u), (case, u)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "huge"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_equal_those_of_float64(sampling: SamplingKernel, vocab: int, kind: str) -> None:
    x = make_logits(kind, 6, vocab)
    wide = x.astype(np.float64)
    expected = wide - wide.max(1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(1, keepdims=True))
    which, selected = np.array([5, 0, 3]), np.array([vocab - 1, vocab // 2, 0])
    for k in {0, 1, min(20, vocab), vocab}:
        found = sampling.logprobs(torch.from_numpy(x.copy()), which, selected, k)
        for i, (row, token) in enumerate(zip(which, selected, strict=True)):
            top = np.argsort(-x[row], kind="stable")[:k]
            assert found.token_ids[i].tolist() == [token, *top]
            np.testing.assert_allclose(found.logprobs[i], expected[row][[token, *top]], rtol=2e-6, atol=5e-6)
            assert found.ranks[i] == 1 + (x[row] > x[row, token]).sum()
            of_columns = (x[row][found.token_ids[i]].astype(np.float64) - found.log_totals[i]).astype(np.float32)
            assert found.logprobs[i].tobytes() == of_columns.tobytes()


def test_negative_zero_equals_zero(sampling: SamplingKernel) -> None:
    found = sampling.logprobs(torch.tensor([[-1.0, -0.0, 0.0, -0.0]]), np.array([0]), np.array([3]), 4)
    assert found.token_ids.tolist() == [[3, 1, 2, 3, 0]]
    assert found.ranks.tolist() == [1]


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
@pytest.mark.parametrize("vocab", [4, 3000])
def test_a_spoilt_row_gives_an_id_inside_the_vocabulary(sampling: SamplingKernel, vocab: int, value: float) -> None:
    logits, rules = torch.full((len(CASES), vocab), value), make_rules(CASES)
    indices = np.zeros(len(CASES), np.int64)
    for tokens in (sampling.choose(logits, rules, indices), sampling.choose(logits, None, indices)):
        assert ((tokens >= 0) & (tokens < vocab)).all()
    logits[:, 1::2] = torch.arange(vocab // 2)
    tokens = sampling.choose(logits, rules, indices)
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_strided_rows_give_the_same_tokens(sampling: SamplingKernel) -> None:
    wide, rules = torch.from_numpy(make_logits("usual", len(CASES), 3000)), make_rules(CASES)
    indices = np.arange(len(CASES))
    views: list[Tensor] = [wide[:, 100:1100], wide.T[: len(CASES), :].contiguous().T[:1000].T]
    for view in views:
        expected = sampling.choose(view.contiguous(), rules, indices)
        assert sampling.choose(view, rules, indices).tolist() == expected.tolist()

"""Filters against straightforward numpy, and the draw against the distribution it should have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.worker.sample import torch_kernel as filters
from quire.worker.sample.torch_kernel import uniforms


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def oracle_top_k(x: np.ndarray, k: int) -> set[int]:
    kth = sorted(x, reverse=True)[min(k, len(x)) - 1]
    return {i for i, v in enumerate(x) if v >= kth}


def oracle_top_p(x: np.ndarray, p: float) -> set[int]:
    probs = softmax(x.astype(np.float64))
    order = np.argsort(-probs, kind="stable")
    mass, last = 0.0, order[-1]
    for i in order:
        mass += probs[i]
        if mass >= p:
            last = i
            break
    return {i for i, q in enumerate(x) if q >= x[last]}


def oracle_min_p(x: np.ndarray, p: float) -> set[int]:
    probs = softmax(x.astype(np.float64))
    return {i for i, q in enumerate(probs) if q >= p * probs.max()}


def ones(n: int) -> Tensor:
    """Temperatures."""
    return torch.ones(n)


def kept(row: Tensor) -> set[int]:
    return set(torch.isfinite(row).nonzero()[:, 0].tolist())


# Multiples of 1/4: differences of logits are exact, ties are frequent.
logit_rows = st.lists(
    st.lists(st.integers(-40, 40).map(lambda i: i / 4), min_size=12, max_size=12), min_size=1, max_size=5
).map(lambda rows: np.array(rows, np.float32))


@given(logit_rows, st.data())
def test_top_k_keeps_what_the_oracle_keeps(x: np.ndarray, data: st.DataObject) -> None:
    ks = data.draw(st.lists(st.integers(1, 20), min_size=len(x), max_size=len(x)))
    logits = torch.tensor(x)
    filters.keep_top_k(logits, ones(len(x)), torch.tensor(ks))
    for row, original, k in zip(logits, x, ks, strict=True):
        assert kept(row) == oracle_top_k(original, k)
        assert all(row[i] == original[i] for i in kept(row))


@given(logit_rows, st.data())
def test_top_p_keeps_what_the_oracle_keeps(x: np.ndarray, data: st.DataObject) -> None:
    # Off the grid of exactly representable sums, so that float64 and float32 agree on what reaches p.
    ps = data.draw(st.lists(st.floats(0.0123, 0.9871), min_size=len(x), max_size=len(x)))
    logits = torch.tensor(x)
    filters.keep_top_p(logits, ones(len(x)), torch.tensor(ps, dtype=torch.float32))
    for row, original, p in zip(logits, x, ps, strict=True):
        mass = softmax(original.astype(np.float64))
        near = np.abs(np.cumsum(np.sort(mass)[::-1]) - p).min() < 1e-6
        assert near or kept(row) == oracle_top_p(original, p)


def test_top_p_sorts_only_rows_whose_best_candidates_do_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    flat, peaked = rng.standard_normal(1000) * 0.1, rng.standard_normal(1000) * 6
    x = np.stack([flat, peaked, flat[::-1]]).astype(np.float32)
    sorted_rows = []
    original = filters._sort_descending
    monkeypatch.setattr(filters, "_sort_descending", lambda rows: sorted_rows.append(len(rows)) or original(rows))
    logits = torch.tensor(x)
    filters.keep_top_p(logits, ones(3), torch.tensor([0.7, 0.9, 0.2]))
    for row, values, p in zip(logits, x, (0.7, 0.9, 0.2), strict=True):
        assert kept(row) == oracle_top_p(values, p)
    assert sorted_rows == [2]


def test_top_p_keeps_at_least_the_best_token_and_all_at_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]]).repeat(2, 1)
    filters.keep_top_p(logits, ones(2), torch.tensor([1e-9, 1.0]))
    assert kept(logits[0]) == {1}
    assert kept(logits[1]) == {0, 1, 2}


@given(logit_rows, st.data())
def test_min_p_keeps_what_the_oracle_keeps(x: np.ndarray, data: st.DataObject) -> None:
    ps = data.draw(st.lists(st.just(0.0) | st.floats(0.0123, 0.97), min_size=len(x), max_size=len(x)))
    logits = torch.tensor(x)
    filters.keep_min_p(logits, ones(len(x)), torch.tensor(ps, dtype=torch.float32))
    for row, original, p in zip(logits, x, ps, strict=True):
        ratio = np.exp(original.astype(np.float64) - original.max())
        near = np.abs(ratio - p).min() < 1e-5
        assert near or kept(row) == oracle_min_p(original, p)


def test_temperature_counts_in_min_p_top_p_and_the_draw() -> None:
    logits, temperature = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]])).repeat(2, 1), torch.tensor([1.0, 0.1])
    for keep, value, expected in ((filters.keep_min_p, 0.6, {2, 3}), (filters.keep_top_p, 0.89, {1, 2, 3})):
        left = logits.clone()
        keep(left, temperature, torch.full((2,), value))
        assert kept(left[0]) == expected
        assert kept(left[1]) == {3}
    drawn = filters.draw(logits, temperature, torch.full((2,), 0.28, dtype=torch.float64))
    assert drawn.tolist() == [1, 3]


def test_draw_is_the_inverse_cdf_in_token_order() -> None:
    probs = np.array([0.125, 0.0, 0.5, 0.0, 0.375, 0.0])
    with np.errstate(divide="ignore"):
        row = torch.tensor(np.log(probs), dtype=torch.float32)
    grid = np.array([0.0, 0.12, 0.13, 0.62, 0.63, 1 - 2.0**-52])
    tokens = filters.draw(row.repeat(len(grid), 1), ones(len(grid)), torch.tensor(grid))
    assert tokens.tolist() == [0, 0, 2, 2, 4, 4]


def test_draw_follows_the_distribution() -> None:
    """Chi-square of 20,000 draws over 12 tokens, 11 degrees of freedom: 99.9 % lie below 31.3. Fixed seeds."""
    n = 20_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    expected = softmax(logits.double().numpy()) * n
    by_index = uniforms(np.full(n, 11, np.uint64), np.arange(n))
    by_seed = uniforms(np.arange(n, dtype=np.uint64), np.full(n, 3))
    for numbers in (by_index, by_seed):
        tokens = filters.draw(logits.repeat(n, 1), ones(n), torch.from_numpy(numbers))
        counts = np.bincount(tokens.numpy(), minlength=12)
        assert ((counts - expected) ** 2 / expected).sum() < 31.3


@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_draw_treats_every_row_as_if_alone(seed: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, vocab, generator=generator) * 4
    numbers = torch.rand(7, dtype=torch.float64, generator=generator)
    together = filters.draw(logits, ones(7), numbers)
    for i in range(7):
        assert filters.draw(logits[i : i + 1], ones(1), numbers[i : i + 1]) == together[i]


@pytest.mark.parametrize("row", [[-torch.inf] * 4, [torch.nan] * 4, [0.0, torch.nan, 1.0, 2.0]])
def test_a_spoilt_row_gives_an_id_inside_the_vocabulary(row: list[float]) -> None:
    (token,) = filters.draw(torch.tensor([row]), ones(1), torch.tensor([0.5], dtype=torch.float64)).tolist()
    assert 0 <= token < 4

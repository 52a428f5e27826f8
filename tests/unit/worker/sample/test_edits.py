"""Sparse edits against dense numpy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.worker.sample import sampler as edits
from quire.worker.sample.metadata import TokenEntries, TokenHistory

VOCAB = 40
CPU = torch.device("cpu")


def random_logits(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_allow_only_touches_rows_with_entries() -> None:
    logits = random_logits(0)
    before = logits.clone()
    edits.allow_only(logits, TokenEntries.build([(1, [3, 5]), (3, [0])], CPU))
    assert (logits[[0, 2]] == before[[0, 2]]).all()
    assert torch.isfinite(logits[1]).nonzero()[:, 0].tolist() == [3, 5]
    assert logits[3, 0] == before[3, 0]
    assert torch.isfinite(logits).sum() == 2 * VOCAB + 3


def test_ban_and_bias() -> None:
    logits = random_logits(1)
    before = logits.clone()
    edits.ban(logits, TokenEntries.build([(0, [7]), (2, [1, 2])], CPU))
    edits.add_bias(logits, TokenEntries.build([(1, [4, 39])], CPU), torch.tensor([2.0, -100.0]))
    changed = {(0, 7): -torch.inf, (2, 1): -torch.inf, (2, 2): -torch.inf}
    changed |= {(1, 4): before[1, 4] + 2, (1, 39): before[1, 39] - 100}
    for (row, token), value in changed.items():
        assert logits[row, token] == value
        logits[row, token] = before[row, token]
    assert (logits == before).all()


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=60)


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4), st.integers(0, 1000))
def test_penalties_equal_the_dense_formula(requests: list[tuple[list[int], list[int]]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(seed, len(requests))
    expected = logits.double().numpy()
    factors = []
    for row, (prompt, output) in zip(expected, requests, strict=True):
        presence, frequency, repetition = rng.uniform(-2, 2), rng.uniform(-2, 2), rng.uniform(0.3, 2)
        factors.append((presence, frequency, repetition))
        for token in range(VOCAB):
            if token in prompt or token in output:
                row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
            row[token] -= frequency * output.count(token) + presence * (token in output)
    histories = [TokenHistory(prompt, output) for prompt, output in requests]
    counted = [h.token_counts() for h in histories]
    entries = TokenEntries.build([(i, ids) for i, (ids, _) in enumerate(counted)], CPU)
    lens = [len(ids) for ids, _ in counted]
    columns = torch.tensor(np.repeat(np.array(factors, np.float32), lens, axis=0)).unbind(1)
    edits.apply_penalties(logits, entries, torch.from_numpy(np.concatenate([c for _, c in counted])), *columns)
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-4, atol=1e-5)


@given(tokens, tokens)
def test_history_counts_token_by_token(prompt: list[int], output: list[int]) -> None:
    history = TokenHistory(prompt, [])
    for token in output:
        history.append(token)
    at_once = TokenHistory(prompt, output)
    for h in (history, at_once):
        ids, counts = h.token_counts()
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {t: output.count(t) for t in {*prompt, *output}}
        assert h.output_token_ids == output


def test_bad_words_ban_the_token_that_would_complete_them() -> None:
    history = TokenHistory([8, 9], [1, 2, 3])
    words = [[5], [3, 6], [2, 3, 7], [1, 3, 9], [9, 1, 2, 3, 4], [2, 3, 5], [0, 1, 2, 3, 11]]
    # the prompt does not count: 9 1 2 3 is no tail of the output; nor is one longer than the output
    assert sorted(history.banned_by(words)) == [5, 6, 7]
    assert TokenHistory([3], []).banned_by([[3, 1], [2]]) == [2]


@given(st.integers(0, 1000), st.integers(1, 3))
def test_a_bitmask_forbids_the_tokens_of_its_zeros(seed: int, masked: int) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(seed)
    before = logits.clone()
    rows = rng.permutation(4)[:masked].tolist()
    bitmask = rng.integers(-(2**31), 2**31, (masked, -(-VOCAB // 32)), dtype=np.int64).astype(np.int32)
    edits.apply_grammar_bitmask(logits, rows, bitmask)
    for row in range(4):
        for token in range(VOCAB):
            allowed = row not in rows or (int(bitmask[rows.index(row), token // 32]) >> (token % 32)) & 1
            assert logits[row, token] == (before[row, token] if allowed else -torch.inf)

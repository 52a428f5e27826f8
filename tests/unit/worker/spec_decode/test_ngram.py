"""The search for the last tokens, against one that compares everything."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.worker.spec_decode import ngram
from quire.worker.spec_decode.ngram import NgramDrafter, find_match

from ..toy import make_runner
from .contract import make_context, make_row


def slow_match(tokens: list[int], shortest: int, longest: int) -> tuple[int, int]:
    best = (0, 0)
    for end in range(1, len(tokens)):
        n = 0
        while n < min(longest, end) and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        if n >= max(shortest, best[1]):
            best = (end, n)
    return best


@pytest.fixture(params=["native", "numpy"])
def search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both searches; the native one where it was built."""
    if request.param == "numpy":
        monkeypatch.setattr(ngram, "native_library", lambda: None)


@pytest.mark.usefixtures("search")
@pytest.mark.parametrize("seed", range(4))
def test_the_longest_match_is_found_and_the_latest_of_equals(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        tokens = rng.choices(range(rng.choice([1, 2, 3, 10])), k=rng.choice([1, 2, 9, 60, 400]))
        if rng.random() < 0.3:
            tokens = (tokens[: rng.randint(1, 9)] * len(tokens))[: len(tokens)]
        shortest, longest = rng.randint(1, 5), rng.choice([5, 15])
        assert find_match(np.array(tokens, np.int32), shortest, longest) == slow_match(tokens, shortest, longest)


@pytest.mark.usefixtures("search")
@pytest.mark.parametrize("num_kinds", [2, 20, 60])
def test_it_is_found_in_long_texts(num_kinds: int) -> None:
    rng = random.Random(num_kinds)
    for _ in range(6):
        tokens = rng.choices(range(num_kinds), k=2500)
        assert find_match(np.array(tokens, np.int32), 2, 15) == slow_match(tokens, 2, 15)


@pytest.mark.parametrize(
    ("tokens", "drafts", "confidences"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 7, 0, 3, 2, 8, 0, 1, 2], [7, 0, 3, 2], [2, 3, 4, 5]),  # longer before later
        ([2, 5, 0, 2, 6, 0, 2], [6, 0, 2, 6], [2, 3, 4, 5]),
        ([4, 4, 4], [4, 4, 4, 4], [2, 3, 4, 5]),
        ([1, 2, 3], [], []),
        ([1, 2, 3, 2], [], []),  # shorter than prompt_lookup_min
    ],
)
def test_the_tokens_after_the_match_are_drafted(tokens: list[int], drafts: list[int], confidences: list[int]) -> None:
    drafter = NgramDrafter(make_context(make_runner(), prompt_lookup_min=2, prompt_lookup_max=3))
    (proposal,) = drafter.propose([make_row("a", tokens, 4)])
    assert (proposal.token_ids, proposal.confidences) == (drafts, confidences)

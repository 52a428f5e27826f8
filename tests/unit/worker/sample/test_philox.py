"""The generator against the published test vectors, and the numbers against what sampling needs of them."""

from __future__ import annotations

import numpy as np
import pytest

from quire.worker.sample.torch_kernel import philox4x32, uniforms

# Random123 (D. E. Shaw Research), kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(*texts: str) -> np.ndarray:
    return np.array([[int(w, 16) for w in text.split()] for text in texts], dtype=np.uint64).T


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers_of_philox_come_out(counter: str, key: str, result: str) -> None:
    np.testing.assert_array_equal(philox4x32(words(counter), words(key)), words(result))


def test_columns_are_independent() -> None:
    counters, keys, results = zip(*KNOWN_ANSWERS, strict=True)
    np.testing.assert_array_equal(philox4x32(words(*counters), words(*keys)), words(*results))


def test_uniforms_are_made_of_the_first_two_words() -> None:
    (u,) = uniforms(np.array([0], np.uint64), np.array([0]))
    assert u == (0x6627E8D5E169C58D >> 12) * 2.0**-52


def test_a_number_depends_on_its_own_seed_and_index_only() -> None:
    seeds = np.array([1, 2**63, 2**64 - 1, 7], np.uint64)
    indices = np.array([0, 5, 2**40, 5])
    together = uniforms(seeds, indices)
    for i in range(4):
        assert uniforms(seeds[i : i + 1], indices[i : i + 1])[0] == together[i]
    assert len(set(together)) == 4


def test_numbers_are_uniform_along_seeds_and_along_indices() -> None:
    """Chi-square over 64 bins, 63 degrees of freedom: 99.9 % lie below 103.4. Fixed input, so it never flickers."""
    n = 20_000
    along_index = uniforms(np.full(n, 42, np.uint64), np.arange(n))
    along_seed = uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64))
    for numbers in (along_index, along_seed):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
        assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 103.4
    assert abs(np.corrcoef(along_index[:-1], along_index[1:])[0, 1]) < 0.02


def test_the_largest_number_stays_below_every_total() -> None:
    """Why the numbers have 52 bits: with 53, u * total could round up to total and no token would be left."""
    rng = np.random.default_rng(0)
    totals = np.concatenate([rng.random(1000) * 2, [1.0, np.nextafter(1, 0), np.nextafter(1, 2)]])
    assert ((1 - 2.0**-52) * totals < totals).all()

"""Seeds and volume of every random test, decided in one place.

The default suite uses constant seeds, so that a failure is there again in the next run, and a small volume. The fresh
tier (`scripts/test --fresh`) sets TESTS_SEED to a base seed, from which every other seed follows, and uses a
hundred times the volume. It prints the base seed. To run a failed test of that tier again, give the same base seed:

    TESTS_SEED=1234 scripts/test tests/wire/test_fuzz.py

A random test carries the mark `fresh` and draws from `seed_of`, `seeds` and `volume`; Hypothesis' tests carry it by
themselves, with `examples` where they say how many.
"""

from __future__ import annotations

import hashlib
import os

BASE_SEED = os.environ.get("TESTS_SEED") or None
"""Base seed of the fresh tier; None: constant seeds."""
FRESH = BASE_SEED is not None
MORE = 100
"""Volume of the fresh tier, as a multiple of the default suite's."""


def seed_of(constant: int) -> int:
    """Returns the constant seed itself, or the seed of the same purpose that follows from the base seed."""
    if BASE_SEED is None:
        return constant
    return int.from_bytes(hashlib.sha256(f"{BASE_SEED}/{constant}".encode()).digest()[:6])


def volume(num: int) -> int:
    """Returns how many operations, messages or bodies to try, `num` being enough for the default suite."""
    return num * MORE if FRESH else num


def seeds(num: int) -> list[int]:
    """Returns the seeds of a test that is run `num` times in the default suite: 0, 1, 2, … or fresh ones."""
    return [seed_of(seed) for seed in range(volume(num))]


def examples(num: int) -> int:
    """Returns Hypothesis' `max_examples`: half of `num` in the default suite, whose examples are the same in every run,
    and thirty times `num` in the fresh tier."""
    return num * 30 if FRESH else (num + 1) // 2

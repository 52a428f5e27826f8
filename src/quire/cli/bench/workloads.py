"""The workloads Quire and its peers are measured on.

A workload is a list of `BenchRequest`. Lengths are fixed by `SEED`; token ids change with `rep`, so that a repetition
never finds its prompts in the prefix cache by accident (W3 has one fresh shared prefix per repetition).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

SEED = 20261120
LOWEST_ID, HIGHEST_ID = 300, 8100
"""Ids drawn from [LOWEST_ID, HIGHEST_ID): clear of special tokens, inside every benchmark checkpoint's vocabulary."""
WARMUP_REP = 99
"""The repetition used to warm up: its ids occur in no measured one."""


@dataclass(frozen=True)
class BenchRequest:
    """A prompt and how many tokens to generate after it."""

    prompt_token_ids: list[int]
    output_len: int


@dataclass(frozen=True)
class IdRange:
    """The token ids prompts are drawn from, `high` not included."""

    low: int = LOWEST_ID
    high: int = HIGHEST_ID

    @staticmethod
    def of_vocabulary(vocab_size: int) -> IdRange:
        """The standard range, or the upper part of a smaller vocabulary."""
        high = min(HIGHEST_ID, vocab_size)
        return IdRange(min(LOWEST_ID, high // 2), high)


@dataclass(frozen=True)
class Workload:
    """`make(rep, ids, n)` is the list of requests; `n` of None is the workload's own number."""

    name: str
    description: str
    make: Callable[[int, IdRange, int | None], list[BenchRequest]]


def uniform_requests(
    rep: int, ids: IdRange, count: int, input_len: int, output_len: int, stream: int = 0
) -> list[BenchRequest]:
    """`count` requests of equal lengths. `stream` keeps workloads apart that would draw the same ids."""
    rng = _id_generator(stream, rep)
    return [BenchRequest(_draw_ids(rng, ids, input_len), output_len) for _ in range(count)]


def mixed_requests(
    rep: int, ids: IdRange, count: int, mean_input_len: int, mean_output_len: int, stream: int = 2
) -> list[BenchRequest]:
    """`count` requests of log-normal lengths (sigma 0.6), cut at 32 and at 512 (prompt) or 256 (output) tokens."""
    lengths = random.Random(SEED + stream)
    inputs = _lognormal_lengths(lengths, count, mean_input_len, longest=512)
    outputs = _lognormal_lengths(lengths, count, mean_output_len, longest=256)
    rng = _id_generator(stream, rep)
    return [BenchRequest(_draw_ids(rng, ids, i), o) for i, o in zip(inputs, outputs, strict=True)]


def _shared_prefix_requests(rep: int, ids: IdRange, count: int) -> list[BenchRequest]:
    rng = _id_generator(3, rep)
    prefix = _draw_ids(rng, ids, 512)
    return [BenchRequest(prefix + _draw_ids(rng, ids, 32), 32) for _ in range(count)]


def _lognormal_lengths(rng: random.Random, count: int, mean: float, longest: int, sigma: float = 0.6) -> list[int]:
    mu = math.log(mean) - sigma * sigma / 2  # so that the mean of exp(N(mu, sigma)) is `mean`
    return [int(min(longest, max(32, rng.lognormvariate(mu, sigma)))) for _ in range(count)]


def _id_generator(stream: int, rep: int) -> random.Random:
    return random.Random(SEED * 1000 + stream + rep * 17)


def _draw_ids(rng: random.Random, ids: IdRange, count: int) -> list[int]:
    return [rng.randrange(ids.low, ids.high) for _ in range(count)]


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("W1", "one stream, 128 + 128 tokens", lambda r, i, n: uniform_requests(r, i, n or 1, 128, 128, 1)),
        Workload("W2", "64 requests of mixed lengths", lambda r, i, n: mixed_requests(r, i, n or 64, 200, 128, 2)),
        Workload(
            "W3", "64 requests sharing a 512-token prefix", lambda r, i, n: _shared_prefix_requests(r, i, n or 64)
        ),
        Workload("W4", "512 short requests, 32 + 64", lambda r, i, n: uniform_requests(r, i, n or 512, 32, 64, 4)),
    )
}

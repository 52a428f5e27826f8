"""Workloads on which Quire and its peers are measured, distributions of lengths, and schedules of arrivals.

A workload is a list of `BenchRequest`. Lengths are fixed by `SEED`; token ids change with `rep`, so that a repetition
never finds its prompts in the prefix cache by accident (W3 has one fresh shared prefix per repetition).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError

ALL_AT_ONCE = float("inf")
EVENLY = float("inf")


def arrival_times(rate: float, count: int, seed: int, burstiness: float = 1.0) -> list[float]:
    """Returns the seconds from the start at which `count` requests arrive, `rate` per second on average.

    The gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, smaller values come in bursts,
    larger ones are more even, EVENLY has equal gaps. A rate of ALL_AT_ONCE has no gaps.
    """
    if rate == ALL_AT_ONCE:
        return [0.0] * count
    if burstiness == EVENLY:
        return [(i + 1) / rate for i in range(count)]
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate) if burstiness == 1.0 else rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    return times


_FORMS = "256, 100-500, normal:MEAN:SD, lognormal:MEAN:SIGMA or exponential:MEAN"
MAX_LENGTH = 1 << 24


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers from 1 on. `longest` is None where it has no end."""

    text: str
    draw_real: Callable[[random.Random], float]
    longest: int | None

    def draw(self, rng: random.Random, longest: int | None = None) -> int:
        """Draws a length, of `longest` at most."""
        return max(1, min(round(self.draw_real(rng)), longest or MAX_LENGTH))

    @staticmethod
    def parse(text: str) -> Lengths:
        """Parses one of `_FORMS`. Raises ConfigError."""
        name, *words = text.replace("-", ":uniform:").split(":") if text[:1].isdigit() else text.split(":")
        try:
            if not words:
                return _fixed(text, int(name))
            if words[0] == "uniform" and len(words) == 2:
                return _uniform(text, int(name), int(words[1]))
            return _named(text, name, [float(word) for word in words])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{text!r} is not a number of tokens; write it as {_FORMS}") from None

    def __str__(self) -> str:
        return self.text


def _fixed(text: str, length: int) -> Lengths:
    if not 1 <= length <= MAX_LENGTH:
        raise ValueError
    return Lengths(text, lambda rng: length, length)


def _uniform(text: str, low: int, high: int) -> Lengths:
    if not 1 <= low <= high <= MAX_LENGTH:
        raise ValueError
    return Lengths(text, lambda rng: rng.randint(low, high), high)


def _named(text: str, name: str, numbers: list[float]) -> Lengths:
    mean = numbers[0]
    if not all(0 < number <= MAX_LENGTH for number in numbers):
        raise ValueError

    makers: dict[str, Callable[..., Callable[[random.Random], float]]] = {
        "normal": lambda sd: lambda rng: rng.gauss(mean, sd),
        "lognormal": lambda sigma: lambda rng: rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma),
        "exponential": lambda: lambda rng: rng.expovariate(1 / mean),
    }
    return Lengths(text, makers[name](*numbers[1:]), None)


SEED = 20261120
LOWEST_ID, HIGHEST_ID = 300, 8100
"""Bounds of token ids (the upper one is excluded): clear of special tokens, in every benchmark checkpoint's vocabulary.
"""
WARMUP_REP = 99
"""The repetition used to warm up: its ids occur in no measured one."""


@dataclass(frozen=True)
class BenchRequest:
    """A prompt and how many tokens to generate after it."""

    prompt_token_ids: list[int]
    output_len: int


@dataclass(frozen=True)
class IdRange:
    """The range of token ids in prompts, `high` not included."""

    low: int = LOWEST_ID
    high: int = HIGHEST_ID

    @staticmethod
    def of_vocabulary(vocab_size: int) -> IdRange:
        """Returns the standard range, or the upper part of a smaller vocabulary."""
        high = min(HIGHEST_ID, vocab_size)
        return IdRange(min(LOWEST_ID, high // 2), high)


@dataclass(frozen=True)
class Workload:
    """A named list of requests: `make(rep, ids, n)` returns it; `n` of None is the workload's own number."""

    name: str
    description: str
    make: Callable[[int, IdRange, int | None], list[BenchRequest]]


def uniform_requests(
    rep: int, ids: IdRange, count: int, input_len: int, output_len: int, stream: int = 0
) -> list[BenchRequest]:
    """Returns `count` requests of equal lengths. `stream` separates workloads that would draw the same ids."""
    rng = _id_generator(stream, rep)
    return [BenchRequest(_draw_ids(rng, ids, input_len), output_len) for _ in range(count)]


def mixed_requests(
    rep: int, ids: IdRange, count: int, mean_input_len: int, mean_output_len: int, stream: int = 2
) -> list[BenchRequest]:
    """Returns `count` requests of log-normal lengths (sigma 0.6), from 32 to 512 (prompt) or 256 (output) tokens."""
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

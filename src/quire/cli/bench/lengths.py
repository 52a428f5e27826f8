"""How long prompts and outputs are: a distribution, written as --input-len and --output-len have it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError

_FORMS = "256, 100-500, normal:MEAN:SD, lognormal:MEAN:SIGMA or exponential:MEAN"
MAX_LENGTH = 1 << 24


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers from 1 on. `longest` is None where it has no end."""

    text: str
    draw_real: Callable[[random.Random], float]
    longest: int | None

    def draw(self, rng: random.Random, longest: int | None = None) -> int:
        """A length, of `longest` at most."""
        return max(1, min(round(self.draw_real(rng)), longest or MAX_LENGTH))

    @staticmethod
    def parse(text: str) -> Lengths:
        """Raises ConfigError."""
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

    def normal(sd: float) -> Callable[[random.Random], float]:
        return lambda rng: rng.gauss(mean, sd)

    def lognormal(sigma: float) -> Callable[[random.Random], float]:
        return lambda rng: rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)

    def exponential() -> Callable[[random.Random], float]:
        return lambda rng: rng.expovariate(1 / mean)

    makers: dict[str, Callable[..., Callable[[random.Random], float]]] = {
        "normal": normal,
        "lognormal": lognormal,
        "exponential": exponential,
    }
    return Lengths(text, makers[name](*numbers[1:]), None)

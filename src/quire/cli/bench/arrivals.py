"""When requests arrive: a schedule that is made before the first one is sent, and does not wait for answers."""

from __future__ import annotations

import random

ALL_AT_ONCE = float("inf")
EVENLY = float("inf")


def arrival_times(rate: float, count: int, seed: int, burstiness: float = 1.0) -> list[float]:
    """Seconds from the start at which `count` requests arrive, `rate` per second on average.

    The gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is more
    even, EVENLY has equal gaps. A rate of ALL_AT_ONCE has no gaps.
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

"""The choice between loading tokens and computing them. Pure: no clock, no I/O.

    t_load(n) = t0 + q + n * b / R            t_compute(s, n) = n * a + c * ((s + n)^2 - s^2) / 2

n tokens after s others; b bytes per token, R the source's rate, q the time that its queued loads take, t0 its latency;
a and c are fitted from the steps of this engine. The gain of loading is convex in n and negative at 0: if n tokens pay,
more pay, so a source loads all that it has or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kv_store.rests import Rests

START_S = 0.001
"""t0: from the order to the first read."""
LATE_FACTOR, LATE_S = 2.0, 0.05
"""A load is late after so many times its predicted time and these seconds."""
STALL_S = 2.0
QUARANTINE_S = 5.0
"""Time after which nothing waits any more for the blocks of a transfer that was given up."""
NEVER = float("inf")
REMEASURE_S = 60.0
"""Time after which a source that is not worth its loads is measured again."""
MAX_SOURCES = 1024
"""Most sources that are remembered."""
_NEW_SHARE = 0.3
"""Weight of a new rate in the average."""
_DECAY = 0.95
"""Weight that a step keeps when the next one is added to the fit."""


class ComputeFit:
    """Fits a and c by least squares over steps whose weights decay."""

    def __init__(self) -> None:
        self._nn = self._nq = self._qq = self._nt = self._qt = 0.0

    def add(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Adds a step of `num_tokens`, which attend to `num_pairs` tokens in all."""
        if seconds <= 0.0 or num_tokens < 1:
            return
        terms = (
            num_tokens * num_tokens,
            num_tokens * num_pairs,
            num_pairs * num_pairs,
            num_tokens * seconds,
            num_pairs * seconds,
        )
        sums = self._nn, self._nq, self._qq, self._nt, self._qt
        self._nn, self._nq, self._qq, self._nt, self._qt = (
            _DECAY * total + term for total, term in zip(sums, terms, strict=True)
        )

    def predict(self, start: int, num_tokens: int) -> float | None:
        """Returns the seconds that `num_tokens` after `start` others take; None: no step was added."""
        if not self._nn:
            return None
        a, c = self._solve()
        return num_tokens * a + c * count_pairs(start, num_tokens)

    def _solve(self) -> tuple[float, float]:
        determinant = self._nn * self._qq - self._nq * self._nq
        if determinant > 1e-9 * self._nn * self._qq:
            a = (self._nt * self._qq - self._qt * self._nq) / determinant
            c = (self._qt * self._nn - self._nt * self._nq) / determinant
            if a > 0.0 and c >= 0.0:
                return a, c
        return self._nt / self._nn, 0.0  # the steps are too alike for two figures


def count_pairs(start: int, num_tokens: int) -> float:
    """Returns how many tokens `num_tokens` after `start` others attend to in all."""
    return ((start + num_tokens) ** 2 - start**2) / 2


@dataclass(slots=True)
class _Source:
    """A source that something was loaded from."""

    rate: float
    """Bytes per second."""
    measured_at: float
    """Time of its last load, or at which one was last allowed only to measure it."""


class LoadCost:
    """Predicts and decides from what was noted. Sources are known by name, from their first load on."""

    def __init__(
        self, bytes_per_token: float, min_load_tokens: int = 32, load_bias: float = 1.0, stall_s: float = STALL_S
    ) -> None:
        self.bytes_per_token = bytes_per_token
        self.stall_s = stall_s
        """A load without progress for so long has stalled: its source rests."""
        self.compute = ComputeFit()
        self._min_load_tokens, self._load_bias = min_load_tokens, load_bias
        self._sources: dict[str, _Source] = {}
        self.rests = Rests()
        """Sources that have stalled."""

    def should_load(self, source: str, start: int, num_tokens: int, queued_tokens: int, now: float) -> bool:
        """Returns whether to load `num_tokens` after `start` others from a source that has `queued_tokens` to load.

        What is not known yet does not speak against it: the first load measures. A source that is not worth its loads
        is measured again each REMEASURE_S: its rate may be that of a small load, or of a slow moment.
        """
        if num_tokens < self._min_load_tokens or self.rests.is_resting(source, now):
            return False
        t_load = self.predict_load(source, num_tokens, queued_tokens)
        t_compute = self.compute.predict(start, num_tokens)
        if t_load is None or t_compute is None or t_load <= self._load_bias * t_compute:
            return True
        known = self._sources[source]
        is_old = now - known.measured_at >= REMEASURE_S
        if is_old:
            known.measured_at = now  # one load measures
        return is_old

    def predict_load(self, source: str, num_tokens: int, queued_tokens: int = 0) -> float | None:
        """Returns the seconds until `num_tokens` are loaded; None: the source was never measured."""
        known = self._sources.get(source)
        return None if known is None else START_S + (queued_tokens + num_tokens) * self.bytes_per_token / known.rate

    def predict_total(self, source: str, start: int, num_tokens: int, queued_tokens: int, end: int) -> float:
        """Returns the seconds until all tokens up to `end` are there if `num_tokens` after `start` are loaded. What is
        not known counts as nothing; without any step the same for all."""
        t_rest = self.compute.predict(start + num_tokens, max(0, end - start - num_tokens))
        if t_rest is None:
            return 0.0
        return (self.predict_load(source, num_tokens, queued_tokens) or 0.0) + t_rest

    def latest_end(self, source: str, num_tokens: int, queued_tokens: int) -> float:
        """Returns the seconds after which a load of `num_tokens` is late."""
        predicted = self.predict_load(source, num_tokens, queued_tokens)
        return self.stall_s if predicted is None else LATE_FACTOR * predicted + LATE_S

    def note_load(self, source: str, num_bytes: int, seconds: float, now: float) -> None:
        """Notes bytes that were read."""
        if num_bytes <= 0 or seconds <= 0.0:
            return
        rate, known = num_bytes / seconds, self._sources.get(source)
        if known is not None:
            known.rate += _NEW_SHARE * (rate - known.rate)
            known.measured_at = now
            return
        if len(self._sources) >= MAX_SOURCES:
            del self._sources[next(iter(self._sources))]
        self._sources[source] = _Source(rate, now)

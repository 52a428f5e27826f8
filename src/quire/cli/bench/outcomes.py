"""The outcomes of a load's requests and their figures: arithmetic only, no clock and no sockets.

Latencies count from the moment at which a request was *meant* to be sent, so that a delay by the client or its
`--max-concurrency` is not left out (coordinated omission). The times from the actual sending stand beside them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.cli.generation import RequestTiming
from quire.cli.server_watch import Metrics, growth
from quire.errors import ConfigError

SLO_METRICS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}
"""Maps names in --goodput (e2el is vLLM's) to attributes of `Outcome`."""
KEEPS_UP = 0.95
"""Share of the arrival rate at which answers must end for a server to keep up."""


@dataclass(frozen=True)
class Failure:
    """The reason why a request has no complete answer. `kind` is the word by which failures are counted."""

    kind: str
    message: str


@dataclass
class Outcome:
    """One request. Stamps are those of the load's clock.

    `intended_s` is when it should have been sent; `ready_s` when the client was free to send it: later where
    `--max-concurrency` delayed it. `timing.added_s` is when it was sent.
    """

    intended_s: float
    ready_s: float
    timing: RequestTiming
    end_s: float
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.timing.first_token_s is None else self.timing.first_token_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        return self.timing.tpot_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.intended_s

    @property
    def lag_s(self) -> float:
        """The delay by the client itself."""
        return self.timing.added_s - self.ready_s


@dataclass
class LoadResult:
    """All requests of one run that ended. `num_unfinished` were under way or unsent when it was stopped."""

    start_s: float
    end_s: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    num_unfinished: int = 0
    was_interrupted: bool = False
    client_cpu_s: float = 0.0

    @property
    def wall_s(self) -> float:
        return max(self.end_s - self.start_s, 0.0)

    @property
    def answered(self) -> list[Outcome]:
        """The requests that did not fail."""
        return [o for o in self.outcomes if o.failure is None]

    @property
    def failed(self) -> list[Outcome]:
        """The requests that failed."""
        return [o for o in self.outcomes if o.failure is not None]


@dataclass(frozen=True)
class Level:
    """One load of a run: its rate, concurrency and result. `rate` or `concurrency` is None where it has no bound."""

    rate: float | None
    concurrency: int | None
    result: LoadResult
    figures: dict[str, Any]

    @property
    def name(self) -> str:
        """The load's name in reports."""
        parts = [f"{self.rate:g} requests/s"] if self.rate is not None else []
        parts += [f"concurrency {self.concurrency}"] if self.concurrency is not None else []
        return ", ".join(parts) or "all at once"


class ServiceLevel:
    """A service level objective: an upper bound in milliseconds per metric. Empty: none."""

    def __init__(self, bounds_ms: Mapping[str, float]) -> None:
        self.bounds_ms = dict(bounds_ms)

    @staticmethod
    def parse(words: Sequence[str]) -> ServiceLevel:
        """Parses `ttft:200`, `tpot:50`, `e2e:2000`; a word may hold several, with commas. Raises ConfigError."""
        bounds: dict[str, float] = {}
        for part in (part for word in words for part in word.split(",")):
            name, colon, value = part.strip().partition(":")
            if name not in SLO_METRICS or not colon:
                raise ConfigError(f"--goodput {part!r} is not one of ttft, tpot and e2e followed by :MILLISECONDS")
            try:
                bounds[name] = float(value)
            except ValueError:
                bounds[name] = math.nan
            if not 0 < bounds[name] < math.inf:
                raise ConfigError(f"--goodput {part!r}: {value!r} is not a number of milliseconds above 0")
        return ServiceLevel(bounds)

    def __bool__(self) -> bool:
        return bool(self.bounds_ms)

    def __str__(self) -> str:
        return " ".join(f"{name}:{bound:g}" for name, bound in self.bounds_ms.items())

    def holds(self, outcome: Outcome) -> bool:
        """Returns True if a request was answered within all bounds. A time that an answer does not have is met."""
        values = {name: getattr(outcome, SLO_METRICS[name]) for name in self.bounds_ms}
        return outcome.failure is None and all(
            value is None or value * 1e3 <= self.bounds_ms[name] for name, value in values.items()
        )

    def share(self, result: LoadResult) -> float:
        """Returns the share of the requests that ended; 0 if none did."""
        return self.count(result) / len(result.outcomes) if result.outcomes else 0.0

    def count(self, result: LoadResult) -> int:
        """Returns the number of requests answered within all bounds."""
        return sum(self.holds(o) for o in result.outcomes)


def keeps_up(result: LoadResult, share: float = KEEPS_UP) -> bool:
    """Returns True if answers end about as fast as requests arrive; if not, the queue grows throughout the load.

    The spans between the first and the last tenth of the arrivals and of the ends are compared: the time of the last
    answers is in neither.
    """
    if result.failed or len(result.outcomes) < 2:
        return not result.failed
    arrivals = _middle_span([o.intended_s for o in result.outcomes])
    return arrivals >= share * _middle_span([o.end_s for o in result.outcomes])


def _middle_span(stamps: Sequence[float]) -> float:
    ordered, edge = sorted(stamps), len(stamps) // 10
    return ordered[len(ordered) - 1 - edge] - ordered[edge]


def peak_in_flight(outcomes: Sequence[Outcome]) -> int:
    """Returns the largest number of requests that were with the server at once."""
    return max((count for _, count in in_flight(outcomes)), default=0)


def in_flight(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """Returns pairs of moment and number of requests with the server from then on, in order."""
    changes = sorted([(o.timing.added_s, 1) for o in outcomes] + [(o.end_s, -1) for o in outcomes])
    count, steps = 0, []
    for moment, change in changes:
        count += change
        steps.append((moment, count))
    return steps


def figures(result: LoadResult, level: ServiceLevel) -> dict[str, Any]:
    """Returns rates, percentiles in milliseconds, failures by kind, goodput, and the client's own cost."""
    answered, wall = result.answered, max(result.wall_s, 1e-9)
    timings = [o.timing for o in answered]
    prompt, output = sum(t.num_prompt_tokens for t in timings), sum(t.num_output_tokens for t in timings)
    numbers: dict[str, Any] = {
        "num_requests": len(result.outcomes),
        "num_failed": len(result.failed),
        "num_unfinished": result.num_unfinished,
        "was_interrupted": result.was_interrupted,
        "failures": count_failures(result.failed),
        "wall_s": round(result.wall_s, 4),
        "prompt_tokens": prompt,
        "cached_tokens": sum(t.num_cached_tokens for t in timings),
        "output_tokens": output,
        "requests_per_s": round(len(answered) / wall, 3),
        "output_tokens_per_s": round(output / wall, 1),
        "total_tokens_per_s": round((prompt + output) / wall, 1),
        "peak_in_flight": peak_in_flight(result.outcomes),
        "keeps_up": keeps_up(result),
        "ttft_ms": percentiles_ms([o.ttft_s for o in answered if o.ttft_s is not None]),
        "tpot_ms": percentiles_ms([t.tpot_s for t in timings if t.tpot_s is not None]),
        "itl_ms": percentiles_ms([gap for t in timings for gap in t.gaps_s]),
        "e2e_ms": percentiles_ms([o.e2e_s for o in answered]),
        "sent_ttft_ms": percentiles_ms([t.ttft_s for t in timings if t.ttft_s is not None]),
        "sent_e2e_ms": percentiles_ms([o.end_s - o.timing.added_s for o in answered]),
        "client": {
            "cpu_share": round(result.client_cpu_s / wall, 4),
            "lag_ms": percentiles_ms([o.lag_s for o in result.outcomes]),
        },
    }
    if level:
        numbers["goodput"] = {
            "bounds_ms": level.bounds_ms,
            "share": round(level.share(result), 4),
            "requests_per_s": round(level.count(result) / wall, 3),
        }
    return numbers


def count_failures(failed: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Returns, per kind of failure, its count and the first one's message."""
    kinds: dict[str, dict[str, Any]] = {}
    for failure in (o.failure for o in failed if o.failure is not None):
        kinds.setdefault(failure.kind, {"count": 0, "first": failure.message})["count"] += 1
    return dict(sorted(kinds.items(), key=lambda item: -item[1]["count"]))


def client_warning(numbers: Mapping[str, Any]) -> str | None:
    """Returns a warning where the client, and not the server, may have been the limit."""
    share, lag = numbers["client"]["cpu_share"], numbers["client"]["lag_ms"].get("p99", 0.0)
    allowed_ms = max(10.0, 0.1 * numbers["sent_ttft_ms"].get("p50", 0.0))
    if share > 0.8:
        return (
            f"this client used {share:.0%} of a core, all that one can: the server may be faster than measured; "
            "run several clients at a part of the rate each"
        )
    if lag > allowed_ms:
        return (
            f"this client sent a request in a hundred {lag:.0f} ms late or more: the machine has no core to spare for "
            "it, and latencies include that; run it on another machine"
        )
    return None


class RateSearch:
    """A search for the highest rate that is sustained: doubles until one fails, then halves what lies between.

    `sustained` and `failed` enclose the rate, within `tolerance` at the end. The search knows nothing of servers, and
    ends after `max_probes` whatever the verdicts are.
    """

    def __init__(self, first_rate: float, tolerance: float = 0.1, max_probes: int = 16) -> None:
        assert first_rate > 0
        assert tolerance > 0
        self.sustained: float | None = None
        """The highest rate that was sustained."""
        self.failed: float | None = None
        """The lowest rate that was not."""
        self.num_probes = 0
        self._first_rate = first_rate
        self._tolerance = tolerance
        self._max_probes = max_probes

    def next_rate(self) -> float | None:
        """Returns the rate to try; None at the end."""
        if self.num_probes >= self._max_probes:
            return None
        if self.sustained is None:
            return self._first_rate if self.failed is None else self.failed / 2
        if self.failed is None:
            return self.sustained * 2
        if self.failed <= self.sustained * (1 + self._tolerance):
            return None
        return math.sqrt(self.sustained * self.failed)

    def record(self, rate: float, *, is_sustained: bool) -> None:
        """Takes the verdict on `next_rate()`."""
        self.num_probes += 1
        if is_sustained:
            self.sustained = rate
        else:
            self.failed = rate


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Returns mean, p50, p90 and p99 in milliseconds (linear interpolation); empty for no values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    figures = {"mean": statistics.fmean(ordered), **{f"p{q}": _percentile(ordered, q) for q in (50, 90, 99)}}
    return {name: round(value * 1e3, 3) for name, value in figures.items()}


def _percentile(ordered: Sequence[float], q: float) -> float:
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


LATENCIES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("end to end", "e2e_ms"))
"""Names of latencies in reports, and their keys in figures."""


def latency_lines(figures: Mapping[str, Any], rows: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a table of percentiles with a row for each latency that was measured."""
    head = f"  {'ms':<22}" + "".join(f"{column:>12}" for column in ("mean", "p50", "p90", "p99"))
    cells = {title: "".join(f"{value:>12.2f}" for value in figures[key].values()) for title, key in rows}
    return [head, *(f"  {title:<22}{values}" for title, values in cells.items() if values)]


# -- speculation ------------------------------------------------------------------------------------------------------

_SERIES = "vllm:spec_decode_num_"


def draft_figures(before: Metrics | None, after: Metrics | None) -> dict[str, Any] | None:
    """Returns what a server's counters of speculation say of the time between two readings; None without speculation.

    `acceptance_per_position` is the share of drafts whose first 1, 2, … tokens were all accepted.
    """
    if before is None or after is None:
        return None
    grown = [growth(before, after, f"{_SERIES}{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")]
    if None in grown:
        return None
    num_drafts, num_tokens, num_accepted = (int(number or 0) for number in grown)
    name = f"{_SERIES}accepted_tokens_per_pos_total"
    start, end = before.totals_by(name, "position"), after.totals_by(name, "position")
    positions = [end[position] - start.get(position, 0.0) for position in sorted(end, key=int)]
    return {
        "num_drafts": num_drafts,
        "num_draft_tokens": num_tokens,
        "num_accepted_tokens": num_accepted,
        "acceptance_rate": round(num_accepted / max(num_tokens, 1), 4),
        "mean_acceptance_length": round(1 + num_accepted / max(num_drafts, 1), 4),
        "acceptance_per_position": [round(count / max(num_drafts, 1), 4) for count in positions],
    }


def draft_lines(drafts: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a report about speculation."""
    if not drafts["num_drafts"]:
        return [f"  {'speculation':<22}  no drafts were verified"]
    positions = " ".join(f"{share:.1%}" for share in drafts["acceptance_per_position"])
    return [
        f"  {'speculation':<22}{drafts['acceptance_rate']:>12.1%} of draft tokens accepted: "
        f"{drafts['num_accepted_tokens']} of {drafts['num_draft_tokens']} in {drafts['num_drafts']} drafts",
        f"  {'mean acceptance length':<22}{drafts['mean_acceptance_length']:>12.2f} tokens per step with drafts",
        f"  {'accepted by position':<22}  {positions}",
    ]

"""The work and the report of `quire plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.cli.command_line import Arguments
from quire.cli.plan import MAX_ENGINES
from quire.cli.replay import CHANGES
from quire.cli.replay_report import read_recording
from quire.errors import ConfigError
from quire.frontend.routing.policy import ROUTING_POLICIES
from quire.frontend.routing.router import Router
from quire.replay.figures import Figures, share_within
from quire.replay.fleet import Fleet, Outage
from quire.replay.step_times import StepTimes, fit_step_times
from quire.replay.study import Study
from quire.replay.what_if import Changes

EXIT_TOO_MUCH = 1
DEFAULT_SIZES = (1, 2, 4)
ROUGH_ERROR = 0.25
ROUGH = "warning: like steps took unlike times (another load on the machine?): what follows is rough"


def plan(args: Arguments) -> int:
    """Simulates fleets and reports."""
    if args["file"] is None:
        raise ConfigError("which recording? quire plan FILE; quire serve --record FILE makes one")
    study, _ = read_recording(args["file"])
    if study.difference is not None:
        raise ConfigError(f"{args['file']} cannot be replayed: {study.difference}; quire replay says more")
    times = fit_step_times(study.steps)
    if times is None:
        raise ConfigError(f"{len(study.steps)} steps are too few to learn from how long steps take")
    planner = Planner(study, times, args)
    sizes = args["engines"]
    shown = planner.search() if sizes is None and planner.has_slo else map(planner.simulate, sizes or DEFAULT_SIZES)
    if not args["json"]:
        print(planner.heading())
    for one in shown:
        if not args["json"]:
            print(planner.line(one), flush=True)
    fewest = planner.fewest()
    if args["json"]:
        print(json.dumps(planner.as_dict(fewest)))
    elif planner.has_slo:
        print(f"\nfewest engines: {fewest}" if fewest else f"\n{max(planner.plans)} engines are not enough")
    return EXIT_TOO_MUCH if planner.has_slo and fewest is None else 0


@dataclass(frozen=True)
class Plan:
    """One simulated fleet."""

    num_engines: int
    figures: Figures
    share: float
    """Share of the requests that kept to the SLO."""
    busiest: float
    """Requests of the engine with the most, as a multiple of the mean."""
    longest_gap_s: float
    num_moved: int


class Planner:
    """Simulates fleets of one load. `plans` has those that were simulated, by their number of engines."""

    def __init__(self, study: Study, times: StepTimes, args: Arguments) -> None:
        self.plans: dict[int, Plan] = {}
        self._study, self._times = study, times
        changes = Changes(**{CHANGES[name]: value for name, value in args.given_among(CHANGES).items()})
        self._header = changes.apply(study.header)
        self._policy, self._rate = args["routing_policy"], args["rate"]
        self._ttft_ms, self._tpot_ms, self._least_share = args["slo_ttft_ms"], args["slo_tpot_ms"], args["slo_share"]
        self._outages = [Outage(engine, at, args["restart_s"]) for engine, at in args["outage"]]

    @property
    def has_slo(self) -> bool:
        """True if any limit was given."""
        return self._ttft_ms is not None or self._tpot_ms is not None

    def simulate(self, num_engines: int) -> Plan:
        """Returns the plan with so many engines."""
        if num_engines not in self.plans:
            beyond = [outage.engine for outage in self._outages if outage.engine >= num_engines]
            if beyond:
                raise ConfigError(f"--outage: there is no engine {beyond[0]} of {num_engines}")
            fleet = Fleet(
                self._study,
                self._header,
                self._times,
                num_engines=num_engines,
                placement=Router(ROUTING_POLICIES[self._policy]()),
                rate=self._rate,
                outages=self._outages,
            )
            figures = fleet.run()
            limits = (None if ms is None else ms / 1e3 for ms in (self._ttft_ms, self._tpot_ms))
            self.plans[num_engines] = Plan(
                num_engines,
                figures,
                share_within(fleet.requests, *limits),
                max(fleet.num_placed) * num_engines / max(1, sum(fleet.num_placed)),
                fleet.longest_gap_s,
                fleet.num_moved,
            )
        return self.plans[num_engines]

    def is_enough(self, plan: Plan) -> bool:
        """Returns whether enough requests keep to the SLO."""
        return bool(plan.share >= self._least_share)

    def search(self) -> Iterator[Plan]:
        """Yields plans: twice as many engines until they are enough, then between the last two."""
        least = max((outage.engine for outage in self._outages), default=0) + 1
        size = least
        while True:
            plan = self.simulate(size)
            yield plan
            if self.is_enough(plan) or size >= MAX_ENGINES:
                break
            size = min(2 * size, MAX_ENGINES)
        too_few, enough = size // 2 if size > least else size - 1, size
        while self.is_enough(self.plans[enough]) and enough - too_few > 1:
            plan = self.simulate((too_few + enough) // 2)
            yield plan
            if self.is_enough(plan):
                enough = plan.num_engines
            else:
                too_few = plan.num_engines

    def fewest(self) -> int | None:
        """Returns the smallest number of engines, of those tried, that is enough."""
        return min((n for n, plan in self.plans.items() if self.is_enough(plan)), default=None)

    # -- the report ------------------------------------------------------------------------------------------------

    def heading(self) -> str:
        """Returns the first lines."""
        study = self._study
        slo = [f"{name} {ms:g} ms" for name, ms in (("TTFT", self._ttft_ms), ("TPOT", self._tpot_ms)) if ms is not None]
        goal = f"; {self._least_share:.0%} of the requests within {' and '.join(slo)}" if slo else ""
        error = self._times.held_out_error
        lines = [
            f"{len(study.requests)} requests of {study.header.model} in {study.end_s / self._rate:.1f} s, "
            f"{self._policy}{goal}; step times: error {error:.1%} of steps not fitted",
            *([ROUGH] if error > ROUGH_ERROR else []),
            "",
            " ".join(COLUMNS),
        ]
        return "\n".join(lines)

    def line(self, plan: Plan) -> str:
        """Returns the line of one plan."""
        figures = plan.figures
        values = [
            f"{plan.num_engines}",
            f"{figures.num_finished}/{figures.num_requests}",
            f"{figures.output_tokens_per_s:.1f}",
            *(f"{_at(figures.ttft_ms, place)}" for place in ("p50", "p99")),
            *(f"{_at(figures.tpot_ms, place)}" for place in ("p50", "p99")),
            f"{1e3 * plan.longest_gap_s:.1f}",
            f"{figures.cached_tokens}",
            f"{plan.busiest:.2f}",
            f"{plan.num_moved}",
            f"{plan.share:.1%}" if self.has_slo else "-",
        ]
        return " ".join(f"{value:>{len(name)}}" for name, value in zip(COLUMNS, values, strict=True))

    def as_dict(self, fewest: int | None) -> dict[str, Any]:
        """Returns the report for --json."""
        return {
            "model": self._study.header.model,
            "routing_policy": self._policy,
            "rate": self._rate,
            "slo": {"ttft_ms": self._ttft_ms, "tpot_ms": self._tpot_ms, "share": self._least_share},
            "step_time_error": self._times.held_out_error,
            "plans": [
                {
                    "engines": plan.num_engines,
                    **msgspec.to_builtins(plan.figures),
                    "longest_gap_s": plan.longest_gap_s,
                    "busiest": plan.busiest,
                    "moved_requests": plan.num_moved,
                    "share_within_slo": plan.share if self.has_slo else None,
                }
                for plan in self.plans.values()
            ],
            "fewest_engines": fewest if self.has_slo else None,
        }


COLUMNS: Sequence[str] = (
    "engines",
    "   finished",
    "tokens/s",
    "TTFT p50",
    "     p99",
    "TPOT p50",
    "     p99 ms",
    "longest gap",
    "cached tokens",
    "busiest",
    "moved",
    "in SLO",
)


def _at(figures: dict[str, float], place: str) -> str:
    return f"{figures[place]:.1f}" if place in figures else "-"

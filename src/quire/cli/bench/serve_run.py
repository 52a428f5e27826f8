"""The loads of one `quire bench serve`: a single one, a sweep, or a search for the rate at which a server saturates."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm

from quire.cli.bench.datasets import Dataset
from quire.cli.bench.load import LoadRequest, LoadRun, Send
from quire.cli.bench.outcomes import (
    Level,
    LoadResult,
    Outcome,
    RateSearch,
    ServiceLevel,
    draft_figures,
    figures,
    keeps_up,
)
from quire.cli.bench.workloads import ALL_AT_ONCE, arrival_times
from quire.cli.server_watch import Metrics

DEFAULT_PROMPTS = 100
FEWEST_PROBES = 32
"""Least number of requests of a load with --duration: percentiles of fewer mean little."""
WARMUP_REP = -1
_FIRST_SHARE = 0.5
"""Share of the capacity, measured with all requests at once, at which a search begins."""


@dataclass(frozen=True)
class LoadPlan:
    """The loads to offer. `rates` and `concurrencies` are a sweep's; at most one of them has more than one entry."""

    rates: Sequence[float] = (ALL_AT_ONCE,)
    concurrencies: Sequence[int | None] = (None,)
    num_prompts: int | None = None
    duration_s: float | None = None
    burstiness: float = 1.0
    finds_saturation: bool = False
    saturation_share: float = 0.9
    saturation_tolerance: float = 0.1
    num_warmups: int = 0
    seed: int = 0
    slo: ServiceLevel = field(default_factory=lambda: ServiceLevel({}))
    request_limit_s: float = 600.0

    def count(self, rate: float, size: int | None) -> int:
        """Returns the number of requests of a load at `rate`, for a dataset of `size`."""
        if self.num_prompts is not None:
            return self.num_prompts
        if self.duration_s is not None and rate != ALL_AT_ONCE:
            return max(FEWEST_PROBES if self.finds_saturation else 1, round(rate * self.duration_s))
        return DEFAULT_PROMPTS if size is None else size


@dataclass
class ServeRun:
    """All loads of a command. `saturation` is the highest rate that was sustained, and the lowest that was not."""

    levels: list[Level] = field(default_factory=list)
    saturation: tuple[float | None, float | None] | None = None
    num_failed: int = 0
    """Failed requests, except those of loads that the search for saturation found to be too much."""

    @property
    def was_interrupted(self) -> bool:
        """True if Ctrl-C ended it early."""
        return any(level.result.was_interrupted for level in self.levels)


class LoadRunner:
    """Runs a plan's loads one after another on a server, with a progress bar each."""

    def __init__(
        self,
        send: Send,
        dataset: Dataset,
        plan: LoadPlan,
        report: Callable[[str], None],
        read_metrics: Callable[[], Awaitable[Metrics | None]],
    ) -> None:
        """`read_metrics` returns the server's metrics, None if it has none."""
        self._read_metrics = read_metrics
        self._send = send
        self._dataset = dataset
        self._plan = plan
        self._report = report
        self._num_loads = 0
        self._done = ServeRun()

    async def run(self) -> ServeRun:
        """Runs all loads, or those before Ctrl-C or before a load of which every request failed."""
        if self._plan.num_warmups and await self._warm_up():
            return self._done
        if self._plan.finds_saturation:
            await self._find_saturation()
        else:
            await self._sweep()
        return self._done

    async def _warm_up(self) -> bool:
        """Returns True if the warm-up was interrupted or failed."""
        requests = self._dataset.requests(self._plan.num_warmups, WARMUP_REP)
        result = await self._load(requests, [0.0] * len(requests), None, "warm-up")
        if not (result.was_interrupted or result.failed):
            return False
        self._add(None, None, result)
        return True

    async def _sweep(self) -> None:
        for rate in self._plan.rates:
            for concurrency in self._plan.concurrencies:
                level = await self._offer(rate, concurrency)
                self._done.num_failed += len(level.result.failed)
                if len(self._plan.rates) * len(self._plan.concurrencies) > 1:
                    self._report(f"{level.name}: {level.figures['output_tokens_per_s']:g} tok/s")
                if level.result.was_interrupted or not level.result.answered:
                    return

    async def _find_saturation(self) -> None:
        plan = self._plan
        burst = await self._offer(ALL_AT_ONCE, None)
        if burst.result.was_interrupted or not burst.result.answered:
            self._done.num_failed += len(burst.result.failed)
            return
        capacity = burst.figures["requests_per_s"]
        self._report(f"all at once: {capacity:g} requests/s")
        search = RateSearch(float(f"{_FIRST_SHARE * capacity:.3g}") or 0.001, plan.saturation_tolerance)
        while (rate := search.next_rate()) is not None:
            rate = float(f"{rate:.4g}")
            level = await self._offer(rate, None)
            if level.result.was_interrupted or not level.result.answered:
                self._done.num_failed += len(level.result.failed)
                break
            is_sustained = self._is_sustained(level.result)
            self._report(f"{level.name}: {self._verdict(level, is_sustained)}")
            search.record(rate, is_sustained=is_sustained)
            self._done.num_failed += len(level.result.failed) if is_sustained else 0
            if not is_sustained and level.figures["peak_in_flight"] <= 1:
                self._report("even a request that is alone is too much")
                break
        self._done.saturation = search.sustained, search.failed

    def _is_sustained(self, result: LoadResult) -> bool:
        if self._plan.slo:
            return self._plan.slo.share(result) >= self._plan.saturation_share
        return keeps_up(result)

    def _verdict(self, level: Level, is_sustained: bool) -> str:
        what = "keeps up" if is_sustained else "falls behind"
        if self._plan.slo:
            what = f"{self._plan.slo.share(level.result):.1%} within {self._plan.slo}"
        return f"{what}: {'sustained' if is_sustained else 'too much'}"

    async def _offer(self, rate: float, concurrency: int | None) -> Level:
        """Runs one load. A limit without a rate is a closed loop; a trace has its own times."""
        self._num_loads += 1
        count = self._plan.count(rate, self._dataset.size)
        requests = self._dataset.requests(count, self._num_loads)
        arrivals: list[float] | None
        if requests and requests[0].arrival_s is not None:
            arrivals = [request.arrival_s or 0.0 for request in requests]
        elif rate == ALL_AT_ONCE and concurrency is not None:
            arrivals = None
        else:
            arrivals = arrival_times(rate, len(requests), self._plan.seed + self._num_loads, self._plan.burstiness)
        name = Level(None if rate == ALL_AT_ONCE else rate, concurrency, LoadResult(0.0), {}).name
        before = await self._read_metrics()
        result = await self._load(requests, arrivals, concurrency, name)
        level = self._add(None if rate == ALL_AT_ONCE else rate, concurrency, result)
        drafts = draft_figures(before, await self._read_metrics())
        if drafts is not None:
            level.figures["speculative_decoding"] = drafts
        return level

    def _add(self, rate: float | None, concurrency: int | None, result: LoadResult) -> Level:
        level = Level(rate, concurrency, result, figures(result, self._plan.slo))
        self._done.levels.append(level)
        return level

    async def _load(
        self, requests: Sequence[LoadRequest], arrivals: Sequence[float] | None, concurrency: int | None, name: str
    ) -> LoadResult:
        with tqdm(total=len(requests), desc=name, unit="req", disable=None, leave=False) as bar:

            def on_end(outcome: Outcome) -> None:
                bar.update()

            run = LoadRun(
                self._send,
                max_concurrency=concurrency,
                request_limit_s=self._plan.request_limit_s,
                on_end=on_end,
            )
            return await _until_interrupt(run.run(requests, arrivals))


async def _until_interrupt(load: Awaitable[LoadResult]) -> LoadResult:
    """Returns the load's result; the first Ctrl-C ends the load early, a second one the program."""
    task = asyncio.ensure_future(load)
    with _on_interrupt(task.cancel):
        return await task


@contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def handle() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        act()

    try:
        loop.add_signal_handler(signal.SIGINT, handle)
    except (ValueError, RuntimeError):  # only the main thread receives signals
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)

"""Reports of `quire bench serve`: one load in full, several as the rows of a table, and everything as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.cli.bench.outcomes import LATENCIES, Level, Outcome, client_warning, latency_lines
from quire.cli.bench.serve_run import ServeRun

_ROWS = (*LATENCIES, ("TTFT, sent", "sent_ttft_ms"), ("end to end, sent", "sent_e2e_ms"))


def format_run(heading: str, run: ServeRun) -> str:
    """Returns the whole report."""
    levels = run.levels
    if run.saturation is not None:
        levels = sorted(levels, key=lambda level: level.rate or math.inf)
    body = format_level(levels[0]) if len(levels) == 1 else format_sweep(levels)
    lines = [heading, *body, *_saturation(run)]
    lines += [f"  failed: {words}" for words in failure_lines(levels)]
    if run.was_interrupted:
        lines.append(f"  stopped with Ctrl-C; {run.levels[-1].result.num_unfinished} requests had not ended")
    return "\n".join(lines)


def format_level(level: Level) -> list[str]:
    """Returns the lines of one load."""
    f = level.figures
    failed = f", {f['num_failed']} failed" if f["num_failed"] else ""
    cached = f" ({f['cached_tokens']} cached)" if f["cached_tokens"] else ""
    lines = [
        f"  {level.name}: {f['num_requests']} requests{failed}, {f['prompt_tokens']} prompt{cached} + "
        f"{f['output_tokens']} output tokens in {f['wall_s']:.2f} s",
        f"  {'requests':<22}{f['requests_per_s']:>12.2f} /s   ({f['peak_in_flight']} in flight at most)",
        f"  {'output':<22}{f['output_tokens_per_s']:>12.1f} tok/s",
        f"  {'prompt + output':<22}{f['total_tokens_per_s']:>12.1f} tok/s",
    ]
    if "goodput" in f:
        goodput = f["goodput"]
        bounds = " ".join(f"{name}:{bound:g}" for name, bound in goodput["bounds_ms"].items())
        lines.append(
            f"  {'goodput':<22}{goodput['requests_per_s']:>12.2f} /s   ({goodput['share']:.1%} within {bounds})"
        )
    lines += ["", *latency_lines(f, _ROWS)]
    lag = f["client"]["lag_ms"].get("p99", 0.0)
    lines += ["", f"  the client took {f['client']['cpu_share']:.1%} of a core, and sent {lag:.1f} ms late at p99"]
    return lines


def format_sweep(levels: Sequence[Level]) -> list[str]:
    """Returns a table with a row per load."""
    has_goodput = any("goodput" in level.figures for level in levels)
    columns = ["requests/s", "tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "p99", "failed"]
    columns += ["within"] if has_goodput else []
    width = max(len("offered"), *(len(level.name) for level in levels))
    lines = [f"  {'offered':<{width}}" + "".join(f"{column:>11}" for column in columns)]
    for level in levels:
        f = level.figures
        cells = [f"{f['requests_per_s']:.2f}", f"{f['output_tokens_per_s']:.1f}"]
        for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
            cells += [f"{f[key][q]:.1f}" if f[key] else "-" for q in ("p50", "p99")]
        cells.append(str(f["num_failed"]))
        if has_goodput:
            cells.append(f"{f['goodput']['share']:.1%}")
        lines.append(f"  {level.name:<{width}}" + "".join(f"{cell:>11}" for cell in cells))
    return lines


def failure_lines(levels: Sequence[Level]) -> list[str]:
    """Returns, per kind of failure over all loads, its count and the first one's message."""
    kinds: dict[str, dict[str, Any]] = {}
    for level in levels:
        for kind, failure in level.figures["failures"].items():
            kinds.setdefault(kind, {"count": 0, "first": failure["first"]})["count"] += failure["count"]
    return [f"{failure['count']} {kind}: {failure['first']}" for kind, failure in kinds.items()]


def warnings(levels: Sequence[Level]) -> list[str]:
    """Returns what puts the figures into question."""
    found = [(level, client_warning(level.figures)) for level in levels]
    return [f"{level.name}: {words}" for level, words in found if words is not None]


def _saturation(run: ServeRun) -> list[str]:
    if run.saturation is None:
        return []
    sustained, failed = run.saturation
    if sustained is None:
        return ["", f"  no rate was sustained: {failed:g} requests/s was still too much" if failed else ""]
    above = f"; {failed:g} was too much" if failed is not None else ", the highest that was tried"
    return ["", f"  saturation: {sustained:g} requests/s was sustained{above}"]


def to_json(facts: dict[str, Any], done: ServeRun, *, is_detailed: bool) -> dict[str, Any]:
    """Returns the content of --save-result and --json."""
    loads = []
    for level in done.levels:
        load: dict[str, Any] = {"request_rate": level.rate, "max_concurrency": level.concurrency, **level.figures}
        if is_detailed:
            load["requests"] = [_request_row(o, level.result.start_s) for o in level.result.outcomes]
        loads.append(load)
    content = {**facts, "was_interrupted": done.was_interrupted, "loads": loads}
    if done.saturation is not None:
        sustained, failed = done.saturation
        content["saturation"] = {"sustained_requests_per_s": sustained, "too_much_requests_per_s": failed}
    return content


def _request_row(outcome: Outcome, start_s: float) -> dict[str, Any]:
    timing = outcome.timing

    def since_start(stamp: float | None) -> float | None:
        return None if stamp is None else round(stamp - start_s, 6)

    return {
        "intended_s": since_start(outcome.intended_s),
        "sent_s": since_start(timing.added_s),
        "first_token_s": since_start(timing.first_token_s),
        "end_s": since_start(outcome.end_s),
        "prompt_tokens": timing.num_prompt_tokens,
        "output_tokens": timing.num_output_tokens,
        "gaps_s": [round(gap, 6) for gap in timing.gaps_s],
        "failure": None if outcome.failure is None else outcome.failure.kind,
    }

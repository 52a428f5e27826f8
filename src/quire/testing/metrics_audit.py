"""The conservation laws of the metrics, checked at every scrape (promise P12).

::

    audit = MetricsAudit()
    audit.check(metrics.snapshot())          # as often as you like, at any moment; AssertionError if a law is broken
    audit.check(read_exposition(text))       # the same of what a server has answered

Each check also compares with the one before: what counts never goes down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from quire.frontend.metrics.catalog.spec import Kind
from quire.frontend.metrics.publish.prometheus import PrometheusStatLogger
from quire.frontend.metrics.publish.snapshot import Family, MetricsSnapshot, Series

_PER_FINISHED_REQUEST = (
    "vllm:e2e_request_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_num_preemptions",
)
_STAGES = {stage: f"vllm:request_{stage}_time_seconds" for stage in ("queue", "prefill", "decode", "inference")}
_DRAFTS_PER_REQUEST = {
    "quire_request_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "quire_request_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens",
}
_KINDS: dict[str, Kind] = {"counter": "counter", "histogram": "histogram", "summary": "summary"}
TOLERANCE_S = 1e-6
"""Tolerance per request: end to end is measured by another clock than its stages."""


class MetricsAudit:
    """Checks the metrics of one server over its life. `num_checks` is the number of checks made.

    `one_clock` is False for an engine with invented stamps: then stages are not compared with end to end.
    """

    def __init__(self, *, one_clock: bool = True) -> None:
        self.num_checks = 0
        self._one_clock = one_clock
        self._before: dict[tuple[str, tuple[str, ...]], tuple[float, int]] = {}
        self._num_blocks: dict[str, float] = {}
        """Blocks of each engine that has reported any."""

    def check(self, snapshot: MetricsSnapshot) -> None:
        """Raises AssertionError that lists all broken laws."""
        self.num_checks += 1
        wrong = [*_check_ledger(snapshot), *_check_tokens(snapshot), *_check_histograms(snapshot)]
        wrong += _check_stages(snapshot) if self._one_clock else []
        wrong += [*self._check_blocks(snapshot), *_check_shares(snapshot), *self._check_growth(snapshot)]
        wrong += [*_check_drafts(snapshot), *_check_transfers(snapshot)]
        assert not wrong, f"scrape {self.num_checks}: " + "; ".join(wrong)

    def check_at_rest(self, snapshot: MetricsSnapshot) -> None:
        """Checks, and also the laws that hold while no request is live, if no core has died and no output came late.

        Drafts of ended requests then are all drafts.
        """
        self.check(snapshot)
        assert snapshot.value("quire_requests_live") == 0, "the engine is not at rest"
        wrong = []
        for name, total in _DRAFTS_PER_REQUEST.items():
            if snapshot.has(name):
                wrong += _differ(f"{name}, and {total}", snapshot.value(name), snapshot.value(total))
        assert not wrong, f"scrape {self.num_checks}, at rest: " + "; ".join(wrong)

    def _check_blocks(self, snapshot: MetricsSnapshot) -> list[str]:
        family = snapshot.find("quire_kv_blocks")
        engine = family.label_names.index("engine") if "engine" in family.label_names else 0
        now: dict[str, float] = {}
        for series in family.series:
            now[series.labels[engine]] = now.get(series.labels[engine], 0.0) + series.value
        for name, num_blocks in now.items():
            if num_blocks:
                self._num_blocks.setdefault(name, num_blocks)
        wrong = [_differ(f"blocks of engine {name}", now.get(name, 0), num) for name, num in self._num_blocks.items()]
        return [message for messages in wrong for message in messages]

    def _check_growth(self, snapshot: MetricsSnapshot) -> list[str]:
        wrong = []
        for family in snapshot.families:
            if family.kind == "gauge":
                continue
            for series in family.series:
                key, now = (family.name, series.labels), (series.value, series.count)
                before = self._before.get(key, (0.0, 0))
                if now[0] < before[0] - 1e-9 or now[1] < before[1]:
                    wrong.append(f"{family.name}{series.labels} went from {before} to {now}")
                self._before[key] = now
        return wrong


def _differ(what: str, left: float, right: float) -> list[str]:
    return [] if left == right else [f"{what}: {left:g} is not {right:g}"]


def _check_ledger(of: MetricsSnapshot) -> list[str]:
    accepted = of.value("quire_requests_accepted")
    decided = accepted + of.value("quire_requests_rejected") + of.value("quire_requests_in_admission")
    finished, lost = of.value("quire_requests_finished"), of.value("quire_requests_lost")
    return [
        *_differ("received, and accepted + rejected + in admission", of.value("quire_requests_received"), decided),
        *_differ("accepted, and finished + live + lost", accepted, finished + of.value("quire_requests_live") + lost),
        *_differ("finished, and request_success", finished, of.value("vllm:request_success")),
    ]


def _check_tokens(of: MetricsSnapshot) -> list[str]:
    prompt, generation = of.value("vllm:prompt_tokens"), of.value("vllm:generation_tokens")
    cached = of.value("vllm:prompt_tokens_cached")
    used = of.value("quire_delivered_tokens") + of.value("quire_discarded_tokens")
    computed = of.value("vllm:prompt_tokens_by_source", "local_compute")
    wrong = []
    if any(family.name == "quire_lora_prompt_tokens" for family in of.families):
        wrong += _differ("prompt tokens, and those of all adapters", prompt, of.value("quire_lora_prompt_tokens"))
        of_adapters = of.value("quire_lora_generation_tokens")
        wrong += _differ("generated tokens, and those of all adapters", generation, of_adapters)
    return [
        *wrong,
        *_differ("prompt tokens, and their sources", prompt, of.value("vllm:prompt_tokens_by_source")),
        *_differ("prompt tokens, and computed + cached", prompt, computed + cached),
        *_differ("cached tokens, and their sources", cached, of.value("vllm:prompt_tokens_cached_by_source")),
        *_differ("generated tokens, and delivered + discarded", generation, used),
    ]


def _check_transfers(of: MetricsSnapshot) -> list[str]:
    by_source = of.value("vllm:prompt_tokens_cached_by_source")
    external = by_source - of.value("vllm:prompt_tokens_cached_by_source", "device")
    hits = of.value("vllm:external_prefix_cache_hits")
    wrong = [] if external <= hits else [f"{external:g} prompt tokens were loaded, and {hits:g} were found"]
    held = of.value("quire_kv_blocks", "held")
    references = of.value("quire_kv_held_blocks") if any(f.name == "quire_kv_held_blocks" for f in of.families) else 0
    if held > references:
        wrong.append(f"{held:g} blocks are held by transfers, which have {references:g} references")
    if any(family.name == "quire_kv_loads" for family in of.families) and not of.value("quire_engine_restarts"):
        checked = of.value("quire_kv_records_accepted") + of.value("quire_kv_records_rejected")
        wrong += _differ("records read, and accepted + rejected", of.value("quire_kv_records_read"), checked)
        ended = of.value("quire_kv_loads") + of.value("quire_kv_loads_in_flight")
        wrong += _differ("loads begun, and ended + in flight", of.value("quire_kv_loads_begun"), ended)
        saves = sum(of.value(f"quire_kv_{name}") for name in ("saved_blocks", "saves_dropped", "saves_waiting"))
        wrong += _differ("saves begun, and saved + dropped + waiting", of.value("quire_kv_saves_begun"), saves)
        puts = of.value("quire_kv_remote_saves") + of.value("quire_kv_remote_saves_waiting")
        wrong += _differ("puts begun, and ended + waiting", of.value("quire_kv_remote_saves_begun"), puts)
    return wrong


def _check_histograms(of: MetricsSnapshot) -> list[str]:
    finished = of.value("vllm:request_success")
    wrong = []
    for name in _PER_FINISHED_REQUEST:
        wrong += _differ(f"observations of {name}, and finished requests", of.count(name), finished)
    first, later = of.count("vllm:time_to_first_token_seconds"), of.count("vllm:inter_token_latency_seconds")
    if first + later > of.value("vllm:generation_tokens"):
        wrong.append(f"{first} first and {later} later outputs have only {of.value('vllm:generation_tokens'):g} tokens")
    if of.value("vllm:request_params_n") > finished:
        wrong.append("more outputs were asked for by finished user requests than have finished")
    if of.value("vllm:request_generation_tokens") > of.value("vllm:generation_tokens"):
        wrong.append("finished requests have more tokens than were generated")
    for name in _STAGES.values():
        if of.count(name) > finished or of.value(name) < 0:
            wrong.append(f"{name}: {of.count(name)} observations, {of.value(name)} s, of {finished:g} requests")
    return wrong


def _check_stages(of: MetricsSnapshot) -> list[str]:
    stages_s = sum(of.value(_STAGES[stage]) for stage in ("queue", "prefill", "decode"))
    finished = of.value("vllm:request_success")
    end_to_end_s = of.value("vllm:e2e_request_latency_seconds")
    if stages_s <= end_to_end_s + TOLERANCE_S * (finished + 1):
        return []
    return [f"the stages took {stages_s} s in all, end to end {end_to_end_s} s"]


def _check_drafts(of: MetricsSnapshot) -> list[str]:
    """Checks the laws of speculation, where there is one."""
    if not of.has("quire_spec_decode_enabled"):
        return []
    drafts, drafted, accepted = (
        of.value(f"vllm:spec_decode_num_{name}") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    ends = accepted + of.value("quire_spec_decode_rejected_tokens") + of.value("quire_spec_decode_cut_tokens")
    unused, proposed = of.value("quire_spec_decode_unused_tokens"), of.value("quire_spec_decode_proposed_tokens")
    family = of.find("vllm:spec_decode_num_accepted_tokens_per_pos")
    engine, position = family.label_names.index("engine"), family.label_names.index("position")
    per_engine: dict[str, list[tuple[int, float]]] = {}
    for series in family.series:
        per_engine.setdefault(series.labels[engine], []).append((int(series.labels[position]), series.value))
    positions = [[value for _, value in sorted(found)] for found in per_engine.values()]
    wrong = [
        *_differ("draft tokens, and accepted + rejected + cut", drafted, ends),
        *_differ("accepted draft tokens, and their sum over positions", accepted, sum(map(sum, positions))),
    ]
    if drafted + unused > proposed:
        wrong.append(f"{drafted:g} draft tokens and {unused:g} unused ones are more than the {proposed:g} proposed")
    if not drafts <= drafted <= max(map(len, positions), default=0) * drafts:
        wrong.append(f"{drafts:g} drafts have {drafted:g} tokens")
    if any(values != sorted(values, reverse=True) for values in positions):
        wrong.append(f"accepted draft tokens do not fall with the position: {positions}")
    if sum(values[0] for values in positions) > drafts:
        wrong.append(f"more than {drafts:g} drafts were accepted in part: {positions}")
    return wrong


def _check_shares(of: MetricsSnapshot) -> list[str]:
    names = ("vllm:kv_cache_usage_perc", "quire_saturation", "quire_saturation_by_resource")
    return [
        f"{name}{series.labels} is {series.value}, not within 0 and 1"
        for name in names
        for series in of.find(name).series
        if not 0 <= series.value <= 1
    ]


def read_exposition(text: str) -> MetricsSnapshot:
    """Parses the answer of a server into a snapshot."""
    families = []
    for found in text_string_to_metric_families(text):
        series: dict[tuple[str, ...], Series] = {}
        cumulative: dict[tuple[str, ...], list[int]] = {}
        for sample in found.samples:
            labels = tuple(value for name, value in sample.labels.items() if name != "le")
            one = series.setdefault(labels, Series(labels))
            if sample.name.endswith("_bucket"):
                cumulative.setdefault(labels, []).append(int(sample.value))
            elif not sample.name.endswith("_count") or found.type not in ("histogram", "summary"):
                one.value = sample.value
        for labels, totals in cumulative.items():
            series[labels].counts = [after - before for before, after in zip([0, *totals], totals, strict=False)]
        names = tuple(name for name in (found.samples[0].labels if found.samples else ()) if name != "le")
        kind = _KINDS.get(found.type, "gauge")
        families.append(Family(found.name, kind, found.documentation, names, series=list(series.values())))
    return MetricsSnapshot(families)


@asynccontextmanager
async def audited(metrics: PrometheusStatLogger, interval_s: float = 0.05) -> AsyncIterator[MetricsAudit]:
    """Checks every `interval_s` of event-loop time while the block runs, and at its end."""
    audit = MetricsAudit()

    async def watch() -> None:
        while True:
            await asyncio.sleep(interval_s)
            audit.check(metrics.snapshot())

    async with watching(watch()):
        yield audit
    audit.check(metrics.snapshot())


@asynccontextmanager
async def watching(watch: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `watch` while the block runs, and no longer. The end of the block raises what `watch` has raised."""
    watcher = asyncio.create_task(watch)
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait({watcher})
        if not watcher.cancelled():
            watcher.result()

"""Figures of a served load: throughput, times to a first token and per token, their percentiles."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from quire.replay.study import RecordedRequest, Study

PERCENTILES = (50, 90, 99)


class Figures(msgspec.Struct):
    """Figures of a served load. Times to a first token are from a request's arrival; per output token, after the
    first."""

    num_requests: int
    num_finished: int
    output_tokens: int
    duration_s: float
    """From the first arrival to the last token."""
    output_tokens_per_s: float
    num_steps: int
    num_preemptions: int
    cached_tokens: int
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]


def measure(study: Study) -> Figures:
    """Returns the figures of the recording."""
    return make_figures(study.requests, study.num_steps, study.num_preemptions)


def make_figures(requests: Iterable[RecordedRequest], num_steps: int, num_preemptions: int) -> Figures:
    """Returns the figures of requests that have been served."""
    requests = list(requests)
    begun = [request for request in requests if request.first_token_s is not None]
    start = min((request.arrival_s for request in requests), default=0.0)
    duration = max((request.last_token_s for request in begun), default=start) - start
    tokens = sum(request.num_outputs for request in requests)
    return Figures(
        num_requests=len(requests),
        num_finished=sum(request.reason is not None for request in requests),
        output_tokens=tokens,
        duration_s=duration,
        output_tokens_per_s=tokens / duration if duration else 0.0,
        num_steps=num_steps,
        num_preemptions=num_preemptions,
        cached_tokens=sum(request.num_cached_tokens or 0 for request in requests),
        ttft_ms=_percentiles_ms([r.first_token_s - r.arrival_s for r in begun if r.first_token_s is not None]),
        tpot_ms=_percentiles_ms(
            [
                (r.last_token_s - r.first_token_s) / (r.num_outputs - 1)
                for r in begun
                if r.first_token_s is not None and r.num_outputs > 1
            ]
        ),
    )


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    places = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in PERCENTILES}
    return {name: value * 1e3 for name, value in {"mean": statistics.fmean(ordered), **places}.items()}


def share_within(requests: Iterable[RecordedRequest], ttft_s: float | None, tpot_s: float | None) -> float:
    """Returns the share of requests that kept to both limits (None: no limit). One without a token did not."""
    kept = total = 0
    for request in requests:
        total += 1
        first_s = request.first_token_s
        if first_s is None or (ttft_s is not None and first_s - request.arrival_s > ttft_s):
            continue
        is_slow = tpot_s is not None and request.last_token_s - first_s > tpot_s * (request.num_outputs - 1)
        kept += not is_slow
    return kept / total if total else 1.0

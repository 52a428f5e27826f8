"""The JSON of traces keeps the rules of the format, whatever the times are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.wire.trace import FRONTEND, REQUESTS, ChromeTrace, PhaseTrace, StepTrace, TraceWindow, encode_window

from .trace_rules import check_events

STEP = StepTrace(1.0, 1.001, 1.010, 1.012, 1.013, 40, 2, 2, 1, 17)


def decode(window: TraceWindow, **fields: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(encode_window(window, **fields))["traceEvents"]
    return events


def test_a_step_has_a_slice_on_each_track_and_counters() -> None:
    events = decode(TraceWindow(0.0, 2.0, [STEP], []))
    check_events(events)
    slices = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        ("schedule", 1_000_000, 1000),
        ("40 tokens", 1_001_000, 9000),
        ("sample", 1_010_000, 2000),
        ("update", 1_012_000, 1000),
    ]
    counters = {e["name"]: e["args"] for e in events if e["ph"] == "C"}
    assert counters["requests"] == {"running": 2, "waiting": 1}
    assert counters["KV blocks in use"] == {"blocks": 17}


def test_requests_have_a_track_each_and_frontends_their_own() -> None:
    phases = [
        PhaseTrace("a", "queued", 1.0, 1.5),
        PhaseTrace("b", "queued", 1.0, 1.2),
        PhaseTrace("a", "prefill", 1.5, 1.6, 32, 16, True),
        PhaseTrace("a", "decode", 1.6, 2.0, 9),
    ]
    events = decode(TraceWindow(0.0, 2.0, [], phases), batches=[(1.0, 1.1, 1.3), (1.05, 1.3, 1.4)])
    check_events(events)
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M" and e["pid"] == REQUESTS and e["tid"]}
    assert tracks == {"a": 1, "b": 2}
    names = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == REQUESTS and e["tid"] == 1]
    assert names == ["queued", "resumed: prefill 32", "decode"]
    ipc = [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (FRONTEND, 1)]
    assert ipc == [(1_000_000, 100_000), (1_100_000, 200_000)]  # the second began in the first


def test_time_between_steps_is_shown_and_rest_is_not() -> None:
    later = StepTrace(1.02, 1.021, 1.03, 1.03, 1.031, 1, 1, 1, 0, 3)
    after_a_rest = StepTrace(9.0, 9.1, 9.2, 9.3, 9.4, 1, 1, 1, 0, 3)
    events = decode(TraceWindow(0.0, 10.0, [STEP, later, after_a_rest], []))
    assert [e["ts"] for e in events if e["name"] == "between"] == [1_013_000]


STAMPS = st.lists(st.floats(0, 1e6), min_size=5, max_size=5).map(sorted)
STEPS = st.builds(lambda t, n: StepTrace(*t, n, 1, 1, 0, 0), STAMPS, st.integers(1, 99))
PHASES = st.builds(
    lambda i, t, p: PhaseTrace(i, p, t[0], t[1]), st.sampled_from("abc"), STAMPS, st.sampled_from(["queued", "prefill"])
)


@given(st.lists(STEPS).map(lambda steps: sorted(steps, key=lambda s: (s.end, s.start))), st.lists(PHASES))
def test_whatever_the_stamps_no_slices_overlap(steps: list[StepTrace], phases: list[PhaseTrace]) -> None:
    trace = ChromeTrace()
    events = [*trace.start(), *trace.steps(steps), *trace.phases(phases)]
    check_events([e for e in events if e["ph"] != "C"])


def test_the_rules_can_be_broken() -> None:
    names = [
        {"ph": "M", "name": n, "pid": 1, "tid": t, "args": {}} for n, t in (("process_name", 0), ("thread_name", 1))
    ]
    one = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0.0, "dur": 10.0}
    check_events([*names, one, {**one, "ts": 2.0, "dur": 3.0}, {**one, "ts": 10.0}])
    for broken in (
        [*names, one, {**one, "ts": 5.0}],
        [*names, {**one, "ts": 5.0}, one],
        [*names, {**one, "dur": -1.0}],
        [*names, {**one, "tid": 2}],
        [one],
        [*names, {"ph": "B", "name": "a", "pid": 1, "tid": 1, "ts": 0.0}],
    ):
        with pytest.raises(AssertionError):
            check_events(broken)

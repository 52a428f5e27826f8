"""The rules of the Trace Event Format that a trace must keep for Perfetto to load it as it is meant."""

from __future__ import annotations

import math
from typing import Any

REQUIRED = {"X": {"name", "pid", "tid", "ts", "dur"}, "C": {"name", "pid", "ts", "args"}, "M": {"name", "pid", "args"}}


def check_events(events: list[dict[str, Any]]) -> None:
    """Every event is complete, every number finite and not negative, slices of a track are in order and nest or follow
    one another, counters advance, and every process and track has a name."""
    named: set[tuple[str, int, int]] = set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    counters: dict[tuple[int, str], float] = {}
    for event in events:
        assert event["ph"] in REQUIRED, event
        assert REQUIRED[event["ph"]] <= event.keys(), event
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event.get("tid", 0)))
            continue
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert math.isfinite(event["dur"])
            assert event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert all(isinstance(value, int | float) for value in event["args"].values())
            key = event["pid"], event["name"]
            assert event["ts"] >= counters.get(key, 0.0), f"the counter {key} goes back in time"
            counters[key] = event["ts"]
    for (pid, tid), track in slices.items():
        assert ("process_name", pid, 0) in named, f"process {pid} has no name"
        assert ("thread_name", pid, tid) in named, f"track {tid} of process {pid} has no name"
        open_ends: list[float] = []
        last = 0.0
        for start, end in track:
            assert start >= last, f"slices of track {pid}/{tid} are not in order"
            last = start
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3, f"slices of track {pid}/{tid} overlap without nesting"
            open_ends.append(end)

"""Traces of a real scheduler: when each request waited, computed, generated and lost its blocks."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.engine.sched.interface import ObservedScheduler
from quire.engine.tracing import TraceBuffer, TraceFile
from quire.errors import ConfigError
from quire.wire.trace import PhaseTrace, encode_window
from tests.unit.replay.test_replay import RecordedLife
from tests.unit.wire.trace_rules import check_events

from .harness import Clock, Engine, make_request, make_scheduler


class Traced:
    """An engine whose clock ticks once a look."""

    def __init__(self, max_events: int = 1000, **fields: Any) -> None:
        self.buffer = TraceBuffer(max_events)
        self.clock = Clock()
        scheduler = ObservedScheduler(make_scheduler(**fields), [self.buffer.tracer], self.clock)
        scheduler.kv_cache_manager = scheduler.observed.kv_cache_manager  # type: ignore[attr-defined]
        self.engine = Engine(scheduler)  # type: ignore[arg-type]
        self.scheduler = scheduler

    def phases(self, request_id: str) -> list[PhaseTrace]:
        window = self.buffer.get_window(1e9, self.clock.now)
        return [phase for phase in window.phases if phase.request_id == request_id]


def test_a_request_is_queued_computed_in_chunks_and_generates() -> None:
    traced = Traced(max_num_batched_tokens=8)
    traced.engine.add(make_request("a", 18, max_tokens=4))
    traced.engine.run()
    phases = traced.phases("a")
    assert [(p.phase, p.num_tokens, p.num_computed) for p in phases] == [
        ("queued", 0, 0),
        ("prefill", 8, 0),
        ("prefill", 8, 8),
        ("prefill", 2, 16),
        ("decode", 3, 0),
    ]
    for before, after in pairwise(phases):
        assert before.start <= before.end <= after.start


def test_a_preempted_request_says_so_and_is_computed_again() -> None:
    traced = Traced(num_blocks=9, max_num_batched_tokens=32)
    traced.engine.add(make_request("a", 12, max_tokens=12), make_request("b", 12, max_tokens=12))
    traced.engine.run()
    names = [(p.phase, p.is_resumed) for p in traced.phases("b")]
    assert names[:3] == [("queued", False), ("prefill", False), ("decode", False)]
    assert ("preempted", False) in names
    assert ("prefill", True) in names
    assert names[-1][0] == "decode"


def test_what_has_not_ended_is_shown_up_to_now() -> None:
    traced = Traced()
    traced.engine.add(make_request("a", 8, max_tokens=40))
    for _ in range(3):
        traced.engine.step()
    traced.engine.add(make_request("b", 8))
    window = traced.buffer.get_window(1e9, 1e6)
    assert [(p.request_id, p.phase, p.end) for p in window.phases[-2:]] == [("a", "decode", 1e6), ("b", "queued", 1e6)]
    assert window.num_blocks == 100
    assert [step.num_tokens for step in window.steps] == [8, 1, 1]
    assert window.steps[-1].used_blocks == 3
    assert window.steps[-1].running == 1


def test_only_the_last_events_and_seconds_are_kept() -> None:
    traced = Traced(max_events=5)
    traced.engine.add(make_request("a", 8, max_tokens=40))
    traced.engine.run()
    assert len(traced.buffer.get_window(1e9, traced.clock.now).steps) == 4
    last = traced.buffer.get_window(8.0, traced.clock.now).steps
    assert 0 < len(last) < 4
    assert last[-1].end > traced.clock.now - 8


def traced_life(seed: int, observers: list[Any]) -> None:
    life = RecordedLife(seed)
    recorded = life.engine.scheduler
    recorded.observers = (*recorded.observers, *observers)  # type: ignore[attr-defined]
    for observer in observers:
        observer.attach(recorded.observed)  # type: ignore[attr-defined]
    for _ in range(200):
        life.act()
    recorded.finish_requests(None, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_make_valid_traces(seed: int, tmp_path: Path) -> None:
    """Preemptions, ids used again, grammars, drafts, aborts, steps in flight and given up."""
    buffer, file = TraceBuffer(100_000), TraceFile(tmp_path / "trace.json")
    traced_life(seed, [buffer.tracer, file])
    file.close()
    file.close()
    window = buffer.get_window(1e9, 1e9)
    events = json.loads(encode_window(window))["traceEvents"]
    check_events(events)
    assert len([e for e in events if e["ph"] == "X"]) > 50
    written = json.loads((tmp_path / "trace.json").read_text())
    check_events(written)
    key = lambda event: json.dumps(event, sort_keys=True)  # noqa: E731
    requests = [[e for e in part if e["ph"] == "X" and e["pid"] == 2] for part in (events, written)]
    assert sorted(map(key, requests[0])) == sorted(map(key, requests[1]))
    assert buffer.tracer._lives == {}
    assert buffer.tracer._computing == set()


def test_a_trace_file_that_was_not_ended_lacks_one_bracket(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    traced_life(1, [file])
    file.close()
    text = path.read_text()
    check_events(json.loads(text))
    check_events(json.loads(text.rpartition("\n]")[0].rpartition(",\n")[0] + "]"))


def test_a_trace_file_is_new_and_ends_with_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    with pytest.raises(ConfigError, match=r"--trace-file .*the file exists"):
        TraceFile(path)
    traced_life(2, [file])

    def full(fd: int, data: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    file.close()
    monkeypatch.undo()
    assert "--trace-file" in caplog.text
    assert "No space left on device" in caplog.text

"""Random operations on the real engine core, and tests of the simulation itself."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.seeds import FRESH, seed_of, seeds, volume
from tests.simulation.episode import run_episode
from tests.simulation.harness import SimulationError
from tests.simulation.mutants import MUTANTS, weak_hashes
from tests.simulation.run import EPISODE_OPERATIONS, replay, run_parallel, shrink

NUM_OPERATIONS = volume(10_000)
NUM_SLOW_OPERATIONS = int(os.environ.get("QUIRE_SIMULATION_OPERATIONS", "50_000_000"))
FIRST_SLOW_SEED = 1_000_000

SITUATIONS = (
    *("step", "add", "abort", "abort_in_flight", "reset_prefix_cache", "pause", "resume", "crash", "drain", "refused"),
    *("sleep", "wake_up", "update_weights", "verbs with steps in flight", "answers changed by weights"),
    *("failed steps", "preemptions", "admissions with cached tokens", "admissions with outputs", "window hits"),
    *("admissions in chunks", "preempted in flight", "aborted in flight"),
    *("finished: stop", "finished: length", "finished: repetition"),
    *("drafts", "accepted tokens", "runs cut by a stop"),
    *("adapters", "blocked by adapters", "requests without their adapter", "adapters that begin inside a prompt"),
    *("feed", "segments", "ids used again at once", "sessions closed", "sessions without room"),
)
"""Situations that a million operations must have met a thousand times each, or they prove little."""


@pytest.mark.fresh
@pytest.mark.timeout(0 if FRESH else 600)  # a million operations take a bit over a minute on two idle cores
def test_random_operations_keep_every_invariant(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    seen, seconds = run_parallel(NUM_OPERATIONS, 2 if FRESH else 1, seed_of(118))
    with capsys.disabled():
        print(f"\n{seen['operations']} operations in {seconds:.0f} s: {seen['operations'] / seconds:.0f} per second")
        print(", ".join(f"{name} {seen[name]}" for name in SITUATIONS))
    assert seen["operations"] >= NUM_OPERATIONS
    assert [name for name in SITUATIONS if seen[name] < NUM_OPERATIONS // 1000] == []


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_more_operations() -> None:
    """QUIRE_SIMULATION_OPERATIONS of them, on seeds the default suite does not use."""
    seen, _ = run_parallel(NUM_SLOW_OPERATIONS, os.cpu_count() or 2, FIRST_SLOW_SEED)
    assert seen["operations"] >= NUM_SLOW_OPERATIONS


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_hundred_thousand_scrapes(capsys: pytest.CaptureFixture[str]) -> None:
    """A frontend on every episode, its metrics held against the laws after each operation (promise P12)."""
    seen, seconds = run_parallel(100_000, first_seed=2 * FIRST_SLOW_SEED, audited=True)
    with capsys.disabled():
        print(f"\n{seen['scrapes']} scrapes in {seconds:.0f} s, over {seen['crash']} deaths of the core")
    assert seen["scrapes"] >= 100_000


@pytest.mark.fresh
def test_colliding_hashes_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hashes of one byte every look-up meets blocks of other prefixes; none of them may be used."""
    weak_hashes(monkeypatch)
    seen: Counter[str] = Counter()
    for seed in seeds(8):
        seen += run_episode(seed, EPISODE_OPERATIONS)
    assert seen["admissions with cached tokens"] > 20


def transcript(seed: int) -> list[str]:
    """Everything that happens in an episode."""
    lines: list[str] = []
    run_episode(seed, EPISODE_OPERATIONS // 2, log=lines.append)
    return lines


def test_a_seed_tells_the_same_story_in_every_process() -> None:
    """Sets of strings are ordered differently in each: nothing may depend on that."""
    digest = hashlib.sha256("\n".join(transcript(3) + transcript(4)).encode()).hexdigest()
    code = (
        "import hashlib; from tests.simulation.test_simulation import transcript;"
        "print(hashlib.sha256('\\n'.join(transcript(3) + transcript(4)).encode()).hexdigest())"
    )
    root = Path(__file__).parents[2]
    for hash_seed in ("1", "2") if FRESH else ("1",):  # this process has another
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split()[-1] == digest


def test_a_failure_is_replayed_and_made_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MUTANTS["leak_on_abort"](monkeypatch)
    with pytest.raises(SimulationError) as first:
        run_episode(0, EPISODE_OPERATIONS)
    with pytest.raises(SimulationError) as second:
        run_episode(0, EPISODE_OPERATIONS)
    assert (first.value.operation, str(first.value)) == (second.value.operation, str(second.value))

    kept = shrink(0, EPISODE_OPERATIONS, first.value)
    assert len(kept) <= 3  # a request is added, runs, and is aborted
    assert not replay(0, EPISODE_OPERATIONS)
    story = capsys.readouterr().out
    assert f"{len(kept)} of {first.value.operation + 1} operations are enough" in story
    assert "abort" in story


def test_a_clean_seed_is_said_to_be_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(1, 50)
    assert "51 operations, nothing wrong" in capsys.readouterr().out

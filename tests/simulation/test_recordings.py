"""Random engines are recorded, and replayed without a model: every decision must be the same again."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire.config.observability import ObservabilityConfig
from quire.engine import core as core_module
from quire.engine.recording.format import RecordingReader
from quire.engine.sched.interface import ObservedScheduler
from quire.replay.replay import Replayer
from tests.seeds import FRESH, seeds
from tests.simulation.harness import Simulation
from tests.simulation.world import World, draw_operations

NUM_EPISODES = 12
NUM_EPISODES_WITH_A_STORE = 4
NUM_OPERATIONS = 300


class TransparentScheduler(ObservedScheduler):
    """The invariants look into the scheduler."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.observed, name)


class RecordedSimulation(Simulation):
    """Each start of the engine makes a recording."""

    def __init__(self, world: World, directory: Path) -> None:
        self.directory = directory
        self.paths: list[Path] = []
        super().__init__(world)

    def _start_engine(self) -> None:
        self.paths.append(self.directory / f"{len(self.paths)}.rec")
        observability = ObservabilityConfig(record=str(self.paths[-1]))
        config = dataclasses.replace(self.world.config, observability_config=observability)
        self.world = dataclasses.replace(self.world, config=config)
        super()._start_engine()


def record(seed: int, directory: Path, *, has_tier: bool = False) -> tuple[list[Path], Counter[str]]:
    rng = random.Random(seed)
    world = World.draw(rng)
    if has_tier:
        world = world.with_tier(rng)
    if seed % 3 == 1:
        world = world.with_adapters(random.Random(seed + 0.5))
    operations = draw_operations(rng, world, NUM_OPERATIONS)
    simulation = RecordedSimulation(world, directory)
    for operation in [*operations, ("drain", 0)]:
        simulation.apply(operation)
    simulation.close()
    return simulation.paths, simulation.seen


@pytest.fixture(autouse=True)
def _transparent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "ObservedScheduler", TransparentScheduler)


def replay_all(paths: list[Path], seed: int, kinds: Counter[str]) -> None:
    """Replays recordings, and counts their events."""
    for path in paths:
        with path.open("rb") as file:
            reader = RecordingReader(file)
            replayer = Replayer(reader.header)
            for event in reader.events():
                kinds[type(event).__name__] += 1
                difference = replayer.apply(event)
                assert difference is None, f"seed {seed}, {path.name}: {difference}"
                with suppress(AttributeError):
                    replayer.scheduler.kv_cache_manager.check_integrity()
        assert reader.torn_bytes == 0


@pytest.mark.fresh
def test_random_engines_replay_to_the_last_decision(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for seed in seeds(NUM_EPISODES):
        directory = tmp_path / str(seed)
        directory.mkdir()
        paths, happened = record(seed, directory)
        seen += happened
        replay_all(paths, seed, kinds)
    for situation in (
        *("preemptions", "admissions with cached tokens", "abort", "abort_in_flight", "failed steps", "segments"),
        *("ids used again at once", "finished: repetition", "admissions with outputs"),
        *("blocked by adapters", "requests without their adapter"),
    ):
        assert seen[situation] > (NUM_EPISODES if FRESH else 0), (situation, seen)
    assert set(kinds) == {"Add", "End", "Step", "Update", "Abandon", "Reset", "Pause"}


@pytest.mark.fresh
def test_engines_with_a_store_replay_without_it(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for seed in seeds(NUM_EPISODES_WITH_A_STORE):
        directory = tmp_path / str(seed)
        directory.mkdir()
        paths, happened = record(seed, directory, has_tier=True)
        seen += happened
        replay_all(paths, seed, kinds)
    for situation in (
        *("loads: ok", "loads: failed", "loads: cancelled", "external tokens", "saved blocks", "blocked by transfers"),
        *("held: loading", "held: pinned", "held: leased", "preemptions", "reset_prefix_cache", "crash"),
        *(("held: loaded", "held: zombie", "held: quarantined", "loads: partial") if FRESH else ()),
    ):
        assert seen[situation] > (NUM_EPISODES if FRESH else 0), (situation, seen)
    assert kinds["Transfers"] > 10 * NUM_EPISODES_WITH_A_STORE

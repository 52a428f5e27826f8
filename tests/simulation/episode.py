"""One seed, one episode: the engine, its traffic, and in one of ten a frontend whose metrics are audited."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tests.simulation.audited import AuditedSimulation
from tests.simulation.harness import Simulation, SimulationError
from tests.simulation.world import World, draw_operations

AUDITED = 10
"""One episode in so many has a frontend: a scrape costs three times what an operation does."""
ADAPTING = 5
"""One episode in so many has adapters that compete for memory and places, fail and change."""
TIERED = 10
"""One episode in so many has a store outside the engine, whose transfers end late, in parts, twice or never."""


def is_audited(seed: int) -> bool:
    """Returns whether the metrics of this episode are scraped after each operation."""
    return seed % AUDITED == AUDITED - 1


def run_episode(
    seed: int,
    num_operations: int,
    *,
    keep: Callable[[int], bool] | None = None,
    log: Callable[[str], None] | None = None,
    audited: bool | None = None,
    tiered: bool | None = None,
) -> Counter[str]:
    """Run the operations that follow from `seed`, then drain; `keep` picks a part of them by index.

    `audited` of None is what `is_audited` says; `tiered` of None, whether there is a store, follows from `TIERED`.
    Returns how often each situation was met, "operations" among them.
    Raises SimulationError.
    """
    rng = random.Random(seed)
    world = World.draw(rng)
    has_frontend = is_audited(seed) if audited is None else audited
    if seed % ADAPTING == 1 and not has_frontend:
        world = world.with_adapters(random.Random(seed + 0.5))
    if seed % TIERED == 0 < seed if tiered is None else tiered:
        world = world.with_tier(random.Random(seed + 0.25))
    operations = draw_operations(rng, world, num_operations)
    if seed % 2:
        world = world.with_drafts(random.Random(~seed))
    if log is not None:
        log(str(world))
    simulation = AuditedSimulation(world, log, seed=seed) if has_frontend else Simulation(world, log)
    for index, operation in enumerate([*operations, ("drain", 0)]):
        if keep is not None and index < num_operations and not keep(index):
            continue
        try:
            simulation.apply(operation)
        except Exception as e:
            raise SimulationError(seed, index, e) from e
        simulation.seen["operations"] += 1
    simulation.close()
    return simulation.seen

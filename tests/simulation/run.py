"""Run, replay and shrink simulations: ``python -m tests.simulation.run --seed S [--ops N]``.

One integer is the whole test case. Without --seed, episodes with seeds 0, 1, 2, ... run until --ops operations are
done. A failure prints its seed, its operations up to the failure with everything that happened, and a smaller list of
operations that fails, too.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import re
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.episode import run_episode
from tests.simulation.harness import SimulationError

EPISODE_OPERATIONS = 500


def run_seeds(seeds: Iterable[int], *, audited: bool | None = None) -> Counter[str]:
    """Run one episode per seed. What was seen in all of them."""
    return sum((run_episode(seed, EPISODE_OPERATIONS, audited=audited) for seed in seeds), Counter())


def _be_quiet() -> None:
    """Failing steps are part of the plan, and Ctrl-C ends a process of simulations at once: no step is to be shielded
    from it."""
    logging.disable(logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_parallel(
    num_operations: int, num_processes: int = 2, first_seed: int = 0, *, audited: bool | None = None
) -> tuple[Counter[str], float]:
    """At least `num_operations` operations over spawned processes, or in this one: (what was seen, seconds).

    Raises SimulationError.
    """
    num_episodes = -(-num_operations // EPISODE_OPERATIONS)
    chunk = 20
    starts = range(first_seed, first_seed + num_episodes, chunk)
    chunks = [range(start, min(start + chunk, first_seed + num_episodes)) for start in starts]
    began = time.monotonic()
    if num_processes == 1:
        return sum((run_seeds(seeds, audited=audited) for seeds in chunks), Counter()), time.monotonic() - began
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=spawn, initializer=_be_quiet) as pool:
        try:
            seen = sum(pool.map(partial(run_seeds, audited=audited), chunks), Counter())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return seen, time.monotonic() - began


def shrink(seed: int, num_operations: int, failure: SimulationError) -> list[int]:
    """Indices of fewer operations that fail in the same way: drop halves, quarters, ... as long as they do."""

    def fails(kept: list[int]) -> bool:
        try:
            run_episode(seed, num_operations, keep=set(kept).__contains__)
        except SimulationError as e:
            return _kind(e) == _kind(failure)
        return False

    kept = list(range(min(failure.operation + 1, num_operations)))
    size = len(kept) // 2
    while size:
        start = 0
        while start < len(kept):
            shorter = kept[:start] + kept[start + size :]
            if fails(shorter):
                kept = shorter
            else:
                start += size
        size //= 2
    return kept


def _kind(failure: SimulationError) -> tuple[type, str]:
    """Returns what two failures of one kind have in common: the words of the message, not its numbers."""
    return type(failure.cause), re.sub(r"\[.*?\]|\{.*?\}|'.*?'|\w*\d\w*", "", str(failure.cause))[:40]


def replay(seed: int, num_operations: int) -> bool:
    """Runs one seed. Returns whether nothing was wrong; otherwise prints the operations of the smallest known
    failure."""
    try:
        done = run_episode(seed, num_operations)["operations"]
    except SimulationError as failure:
        print(failure)
        kept = shrink(seed, num_operations, failure)
        print(f"{len(kept)} of {failure.operation + 1} operations are enough: {kept}")
        try:
            run_episode(seed, num_operations, keep=set(kept).__contains__, log=print)
        except SimulationError as smaller:
            print(smaller)
            traceback.print_exception(smaller.cause)
        return False
    print(f"seed {seed}: {done} operations, nothing wrong")
    return True


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--ops", type=int, help=f"operations: per episode with --seed (default {EPISODE_OPERATIONS})")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    _be_quiet()
    if args.seed is not None:
        raise SystemExit(not replay(args.seed, args.ops or EPISODE_OPERATIONS))
    try:
        seen, seconds = run_parallel(args.ops or 1_000_000, args.processes)
    except SimulationError as failure:
        raise SystemExit(f"{failure}\nreplay: python -m tests.simulation.run --seed {failure.seed}") from None
    print(f"{seen['operations']} operations in {seconds:.1f} s: {seen['operations'] / seconds:.0f} per second")
    print(dict(seen))


if __name__ == "__main__":
    main()

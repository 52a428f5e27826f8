"""The start of a process: its stamps, which `quire bench startup` compares, and its garbage collector, which rests.

Each process keeps one list; the engine core's is sent to its frontend in `EngineCoreReadyResponse`. Times are
CLOCK_MONOTONIC, which on Linux is one clock for all processes of a machine, and a core runs on its frontend's machine.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

OWN_PROCESSES = frozenset({"quire.engine.proc", "quire.frontend.fleet.proc", "quire.worker.proc"})
"""Modules that Quire starts as processes (`python -m`)."""


class Stamp(NamedTuple):
    """`name` was done at `time_s` (CLOCK_MONOTONIC), when the process had used `cpu_s` of CPU time."""

    name: str
    time_s: float
    cpu_s: float


_stamps: dict[str, Stamp] = {}
_listeners: list[Callable[[int, float], None]] = []


def stamp(name: str, *, allowance_s: float = 0.0) -> None:
    """Notes that `name` is done. The first time counts, so code that runs again later may stamp, too. What follows may
    take `allowance_s`, where it waits for others; 0: as long as it usually does."""
    if name not in _stamps:
        _stamps[name] = Stamp(name, time.monotonic(), time.process_time())
        for listener in _listeners:
            listener(len(_stamps), allowance_s)


def listen(listener: Callable[[int, float], None]) -> Callable[[], None]:
    """Calls `listener` with the number of stamps and the allowance of the last one, now and after each further one;
    returns a function that ends this."""
    _listeners.append(listener)
    listener(len(_stamps), 0.0)
    return lambda: _listeners.remove(listener)


def get_stamps() -> list[Stamp]:
    """Returns the stamps of this process so far, its creation first."""
    return [Stamp("process", process_start(), 0.0), *_stamps.values()]


def process_start(stat: str = "/proc/self/stat") -> float:
    """Returns the time at which this process was created, to 10 ms (proc(5), starttime). Without /proc: at which Quire
    was first imported."""
    try:
        with open(stat, encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # the name before it may hold blanks
    except (OSError, ValueError, IndexError):
        return min((s.time_s for s in _stamps.values()), default=time.monotonic())
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()  # of the machine; starttime counts from it
    return ticks / os.sysconf("SC_CLK_TCK") - asleep


def hold_garbage() -> None:
    """Turns the garbage collector off. What a start makes lives as long as its process, and looking through it for
    garbage again and again takes a sixth of the start."""
    gc.disable()


def release_garbage() -> None:
    """Turns the garbage collector on at the end of a start. No collection looks through what was made before."""
    gc.freeze()
    gc.enable()


def runs_own_process(command: Sequence[str]) -> bool:
    """Returns whether this command line of Python is one of `OWN_PROCESSES`."""
    words = list(command)
    return "-m" in words[:-1] and words[words.index("-m") + 1] in OWN_PROCESSES


stamp("interpreter")
if runs_own_process(sys.orig_argv):
    hold_garbage()  # before the imports of that module

"""Deliberate faults: the grammar of QUIRE_FAILPOINTS, and the actions at a `failpoint()`.

::

    faults  = fault (";" fault)*
    fault   = name "=" action ("," option)*
    name    = one of quire.failpoints.FAILPOINTS
    action  = kill | abort | segv | exit(code) | raise | memory(MiB) | sleep(seconds) | hang | freeze | stop
    option  = key=TEXT     only hits whose key contains TEXT (spaces count)
            | skip=N       let the first N hits pass
            | times=N      fire N times at most (default: no limit)
            | p=0.01       fire at a hit with this probability
            | seed=N       of the generator behind p (default 0)
            | after=PATH   only once this file exists, for example another fault's tally
            | tally=PATH   add a byte to this file before each firing; `times` then counts those of all processes

Options apply in the order key, after, skip, p, times. Several faults of one name are tried in the order written; all
that match fire. For example, the core dies once, at the fifth step in which request "r7" takes part, and never again
however often it is restarted::

    QUIRE_FAILPOINTS="core.step.execute=kill,key=r7,skip=4,times=1,tally=/tmp/deaths"

A test in one process needs no variable: `injected` runs a function at a failpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quire import failpoints
from quire.errors import ConfigError, nearest
from quire.failpoints import FAILPOINTS, Hit

_MEBIBYTE = 1 << 20
_FAULT = re.compile(
    r"(?P<name>[\w.]+)\s*=\s*(?P<action>\w+)\s*(?:\((?P<argument>[^)]*)\))?\s*(?P<options>,.*)?", re.DOTALL
)


class InjectedError(RuntimeError):
    """Error of the action `raise`: no code of Quire expects it."""


# -- actions -------------------------------------------------------------------------------------------------------


def _kill(_: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _abort(_: float) -> None:
    _leave_no_core_file()
    os.abort()


def _segv(_: float) -> None:
    _leave_no_core_file()
    ctypes.string_at(0)


def _exit(code: float) -> None:
    os._exit(int(code))


def _raise(_: float) -> None:
    raise InjectedError("a failpoint was told to raise")


def _exhaust_memory(mebibytes: float) -> None:
    """Allows this process `mebibytes` more address space and uses it up: raises MemoryError, and the limit stays."""
    limit = _address_space_bytes() + int(mebibytes) * _MEBIBYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    hoard = []
    while True:
        hoard.append(bytearray(_MEBIBYTE))


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _hang(_: float) -> None:
    while True:  # an infinite loop: other threads of the process still run
        pass


def _freeze(_: float) -> None:
    while True:  # native code that never returns and keeps the interpreter's lock: no thread runs
        ctypes.PyDLL(None).sleep(3600)


def _stop(_: float) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class _ActionSpec:
    """One action. `default` is its argument when none is written; None if it takes none."""

    run: Callable[[float], None]
    default: float | None = None


ACTIONS: dict[str, _ActionSpec] = {
    "kill": _ActionSpec(_kill),
    "abort": _ActionSpec(_abort),
    "segv": _ActionSpec(_segv),
    "exit": _ActionSpec(_exit, 1),
    "raise": _ActionSpec(_raise),
    "memory": _ActionSpec(_exhaust_memory, 64),
    "sleep": _ActionSpec(_sleep, 1),
    "hang": _ActionSpec(_hang),
    "freeze": _ActionSpec(_freeze),
    "stop": _ActionSpec(_stop),
}
"""Actions by name. kill: SIGKILL. segv: a read of address 0. stop: SIGSTOP."""


def _leave_no_core_file() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _address_space_bytes() -> int:
    """Returns the size that RLIMIT_AS limits (Linux)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


# -- when they happen ----------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """One fault and its hits. Not thread-safe: `Injector` holds a lock around `is_due`."""

    name: str
    run: Callable[[], None]
    key: str = ""
    skip: int = 0
    times: int | None = None
    probability: float = 1.0
    seed: int = 0
    after: Path | None = None
    tally: Path | None = None
    num_hits: int = 0
    num_fired: int = 0
    _random: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._random.seed(f"{self.seed}/{self._fired_anywhere()}")  # a restarted process must not repeat its history

    def is_due(self, key: str) -> bool:
        """Returns whether it fires at this hit; counts the hit and the firing."""
        if self.key not in key or (self.after is not None and not self.after.exists()):
            return False
        self.num_hits += 1
        if self.num_hits <= self.skip:
            return False
        if self.probability < 1.0 and self._random.random() >= self.probability:
            return False
        if self.times is not None and self._fired_anywhere() >= self.times:
            return False
        self.num_fired += 1
        if self.tally is not None:
            with self.tally.open("ab") as file:
                file.write(b".")
        return True

    def _fired_anywhere(self) -> int:
        if self.tally is None:
            return self.num_fired
        return self.tally.stat().st_size if self.tally.exists() else 0


class Injector:
    """The faults of a process. Called at every failpoint, from any thread."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults: dict[str, list[Fault]] = {}
        for fault in faults:
            self._faults.setdefault(fault.name, []).append(fault)
        self._lock = threading.Lock()

    def __call__(self, name: str, key: str) -> None:
        for fault in self._faults.get(name, ()):
            with self._lock:
                due = fault.is_due(key)
            if due:
                fault.run()


def arm(text: str) -> Hit:
    """Parses a value of QUIRE_FAILPOINTS. Raises ConfigError for an invalid one."""
    return Injector([parse_fault(part.strip()) for part in text.split(";") if part.strip()])


@contextlib.contextmanager
def injected(name: str, run: Hit) -> Iterator[None]:
    """Calls `run(name, key)` at failpoint `name` until the end of the block; for tests in one process.

    The failpoint raises what `run` raises. Blocks may be nested. QUIRE_FAILPOINTS is not read.
    """
    _check_name(name)
    before = failpoints.installed()

    def hit(hit_name: str, key: str) -> None:
        if before is not None:
            before(hit_name, key)
        if hit_name == name:
            run(hit_name, key)

    failpoints.install(hit)
    try:
        yield
    finally:
        failpoints.install(before)


# -- grammar -------------------------------------------------------------------------------------------------------


def parse_fault(text: str) -> Fault:
    """Parses one fault. Raises ConfigError."""
    match = _FAULT.fullmatch(text)
    if match is None:
        raise _not_understood(text, "write it as name=action,option=value")
    _check_name(match["name"])
    word, argument = match["action"], match["argument"]
    spec = ACTIONS.get(word)
    if spec is None:
        raise _not_understood(text, f"the actions are {', '.join(ACTIONS)}")
    if spec.default is None and argument is not None:
        raise _not_understood(text, f"{word} takes no argument")
    value = spec.default or 0.0
    if argument is not None:
        value = _number(text, word, argument)
    fault_run, options = spec.run, _parse_options(text, match["options"] or "")
    return Fault(
        match["name"],
        lambda: fault_run(value),
        key=options.pop("key", ""),
        skip=_count(text, "skip", options.pop("skip", "0")),
        times=_count(text, "times", options.pop("times")) if "times" in options else None,
        probability=_probability(text, options.pop("p", "1")),
        seed=_count(text, "seed", options.pop("seed", "0")),
        after=Path(options.pop("after")) if "after" in options else None,
        tally=Path(options.pop("tally")) if "tally" in options else None,
    )


OPTIONS = ("key", "skip", "times", "p", "seed", "after", "tally")
"""Parses an option of a fault."""


def _parse_options(fault: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in text.split(",")[1:]:
        name, equals, value = part.strip().partition("=")
        if not equals or name not in OPTIONS or not value:
            raise _not_understood(fault, f"{part.strip()!r} is none of the options {', '.join(OPTIONS)} with a value")
        if name in options:
            raise _not_understood(fault, f"{name} is given twice")
        options[name] = value
    return options


def _number(fault: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e9:
        raise _not_understood(fault, f"{name} is {text!r}, which is no number from 0 to 1e9")
    return value


def _count(fault: str, name: str, text: str) -> int:
    value = _number(fault, name, text)
    if value != int(value):
        raise _not_understood(fault, f"{name} is {text!r}, which is no whole number")
    return int(value)


def _probability(fault: str, text: str) -> float:
    value = _number(fault, "p", text)
    if value > 1.0:
        raise _not_understood(fault, f"p is {text!r}, which is no number from 0 to 1")
    return value


def _check_name(name: str) -> None:
    if name not in FAILPOINTS:
        hint = nearest(name, FAILPOINTS, f"they are {', '.join(FAILPOINTS)}")
        raise ConfigError(f"QUIRE_FAILPOINTS names {name!r}, which is no failpoint; {hint}")


def _not_understood(fault: str, hint: str) -> ConfigError:
    return ConfigError(f"QUIRE_FAILPOINTS holds {fault!r}, which cannot be understood: {hint}")

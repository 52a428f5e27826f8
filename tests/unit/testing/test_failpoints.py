"""QUIRE_FAILPOINTS: what it may say, and what happens then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import failpoints
from quire.errors import ConfigError
from quire.failpoints import FAILPOINTS, arm_failpoints, failpoint
from quire.testing.failpoints import ACTIONS, InjectedError, arm, injected, parse_fault

STEP = "core.step.execute"
SRC = Path(failpoints.__file__).parents[1]


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.install(None)


def _fires(text: str, keys: list[str]) -> list[bool]:
    """Which of the hits with these keys the fault fires at."""
    fault = parse_fault(f"{STEP}={text}")
    return [fault.is_due(key) for key in keys]


# -- grammar and filters -------------------------------------------------------------------------------------------


def test_nothing_happens_unless_the_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_FAILPOINTS", raising=False)
    arm_failpoints()
    assert failpoints.installed() is None
    failpoint(STEP)


def test_the_variable_is_read_when_armed_and_again_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FAILPOINTS", f"{STEP}=raise; core.start = raise , times=1 ;")
    arm_failpoints()
    for name in (STEP, "core.start"):
        with pytest.raises(InjectedError):
            failpoint(name)
    failpoint("core.start")
    failpoint("core.shutdown")
    monkeypatch.delenv("QUIRE_FAILPOINTS")
    arm_failpoints()
    failpoint(STEP)


def test_key_matches_a_part_of_any_of_the_keys() -> None:
    assert _fires("raise,key=r7", ["r1 r2", "r6 r7", "r77", ""]) == [False, True, True, False]
    seen = []
    with injected(STEP, lambda name, key: seen.append((name, key))):
        failpoint(STEP, {"a": 1, "b": 2})
        failpoint(STEP, "c")
    assert seen == [(STEP, "a b"), (STEP, "c")]


def test_skip_and_times_count_only_hits_whose_key_matches() -> None:
    hits = ["x", "y", "x", "x", "y", "x", "x"]
    assert _fires("raise,key=x,skip=1,times=2", hits) == [False, False, True, True, False, False, False]


def test_probability_is_a_pure_function_of_the_seed() -> None:
    runs = [_fires(f"raise,p=0.1,seed={seed}", [""] * 2000) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert 120 < sum(runs[0]) < 280


def test_a_tally_makes_times_hold_over_processes_and_changes_their_random_numbers(tmp_path: Path) -> None:
    tally = tmp_path / "tally"
    first = _fires(f"raise,times=3,tally={tally}", [""] * 2)
    second = _fires(f"raise,times=3,tally={tally}", [""] * 3)
    assert (first, second) == ([True, True], [True, False, False])
    assert tally.read_bytes() == b"..."
    before = _fires(f"raise,p=0.5,times=0,tally={tmp_path / 'none'}", [""] * 4)
    assert before == [False] * 4
    fault, later = parse_fault(f"{STEP}=raise,p=0.5"), parse_fault(f"{STEP}=raise,p=0.5,tally={tally}")
    assert [fault.is_due("") for _ in range(64)] != [later.is_due("") for _ in range(64)]


def test_a_fault_may_wait_for_another(tmp_path: Path) -> None:
    first = tmp_path / "first"
    failpoints.install(arm(f"core.start=sleep(0),tally={first};{STEP}=raise,after={first},skip=1"))
    for _ in range(3):
        failpoint(STEP)
    failpoint("core.start")
    failpoint(STEP)
    with pytest.raises(InjectedError):
        failpoint(STEP)


def test_all_faults_of_a_name_fire_in_order() -> None:
    failpoints.install(arm(f"{STEP}=sleep(0);{STEP}=raise,skip=1"))
    failpoint(STEP)
    with pytest.raises(InjectedError):
        failpoint(STEP)


def test_hits_of_many_threads_are_all_counted() -> None:
    fired = []
    hit = arm(f"{STEP}=raise,times=100")

    def run() -> None:
        for _ in range(100):
            try:
                hit(STEP, "")
            except InjectedError:
                fired.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fired) == 100


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("core.step.exekute=kill", "did you mean core.step.execute"),
        ("nonsense=kill", "core.start, core.ready"),
        (f"{STEP}", "name=action"),
        (f"{STEP}=", "name=action"),
        (f"{STEP}=explode", "the actions are kill, abort"),
        (f"{STEP}=kill(3)", "kill takes no argument"),
        (f"{STEP}=sleep(x)", "sleep is 'x'"),
        (f"{STEP}=sleep(-1)", "sleep is '-1'"),
        (f"{STEP}=sleep(nan)", "sleep is 'nan'"),
        (f"{STEP}=kill,often=3", "key, skip, times"),
        (f"{STEP}=kill,skip", "key, skip, times"),
        (f"{STEP}=kill,key=", "with a value"),
        (f"{STEP}=kill,skip=1,skip=2", "twice"),
        (f"{STEP}=kill,skip=1.5", "whole number"),
        (f"{STEP}=kill,times=inf", "times is 'inf'"),
        (f"{STEP}=kill,p=1.5", "from 0 to 1"),
        (f"{STEP}=kill;junk", "'junk'"),
    ],
)
def test_what_cannot_be_understood_is_refused_in_words(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FAILPOINTS", text)
    with pytest.raises(ConfigError, match="QUIRE_FAILPOINTS") as caught:
        arm_failpoints()
    assert words in str(caught.value)
    assert failpoints.installed() is None


# -- in one process ------------------------------------------------------------------------------------------------


def test_injected_runs_at_its_name_only_and_until_the_end_of_the_block() -> None:
    outer, inner = [], []
    with injected(STEP, lambda _, key: outer.append(key)):
        failpoint(STEP, "1")
        with injected(STEP, lambda _, key: inner.append(key)), injected("core.start", lambda *_: outer.append("start")):
            failpoint(STEP, "2")
            failpoint("core.start")
        failpoint(STEP, "3")
        failpoint("core.start")
    failpoint(STEP, "4")
    assert (outer, inner) == (["1", "2", "start", "3"], ["2"])


def test_injected_refuses_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="no failpoint"), injected("core.stepp", lambda *_: None):
        pass


def test_every_failpoint_says_where_it_is() -> None:
    assert all(FAILPOINTS.values())


# -- actions -------------------------------------------------------------------------------------------------------

CHILD = f"""
import sys
from quire.failpoints import arm_failpoints, failpoint
arm_failpoints()
print("armed", flush=True)
failpoint({STEP!r})
print("passed", flush=True)
"""


def _start(action: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(SRC), "QUIRE_FAILPOINTS": f"{STEP}={action}"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("action", "code", "words"),
    [
        ("kill", -signal.SIGKILL, ""),
        ("abort", -signal.SIGABRT, ""),
        ("segv", -signal.SIGSEGV, ""),
        ("exit(7)", 7, ""),
        ("exit", 1, ""),
        ("raise", 1, "InjectedError"),
        ("memory(16)", 1, "MemoryError"),
    ],
)
def test_a_process_ends_as_it_is_told(action: str, code: int, words: str) -> None:
    if action.startswith("memory") and not sys.platform.startswith("linux"):
        pytest.skip("RLIMIT_AS is not enforced here")
    process = _start(action)
    out, err = process.communicate(timeout=60)
    assert out.split() == ["armed"]
    assert process.returncode == code
    assert words in err


def test_sleep_passes_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    process = _start("sleep(0.3)")
    out, _ = process.communicate(timeout=60)
    assert out.split() == ["armed", "passed"]
    assert process.returncode == 0
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    failpoints.install(arm(f"{STEP}=sleep(0.3)"))
    failpoint(STEP)
    assert slept == [0.3]


def _state(pid: int) -> str:
    """The letter of /proc: R running, S sleeping, T stopped."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("action", "state"), [("hang", "R"), ("freeze", "S"), ("stop", "T")])
def test_a_process_that_hangs_must_be_killed(action: str, state: str) -> None:
    process = _start(action)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "armed\n"
        deadline = time.monotonic() + 60
        while _state(process.pid) != state and time.monotonic() < deadline:
            time.sleep(0.005)
        assert _state(process.pid) == state
        assert process.poll() is None
    finally:
        process.kill()
        out, _ = process.communicate(timeout=60)
    assert out == ""
    assert process.returncode == -signal.SIGKILL


def test_every_action_is_tested_above() -> None:
    assert set(ACTIONS) == {"kill", "abort", "segv", "exit", "raise", "memory", "sleep", "hang", "freeze", "stop"}

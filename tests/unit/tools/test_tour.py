"""docs/tour.md lists what a request really passes: each stop was called, and its files can be read in an afternoon."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "quire"
MAX_FILES, MAX_LINES = 24, 6482  # 360 for transfers, stores, holds and leases of blocks, stages, waves, sizes
STOP = re.compile(r"^\| `([\w/]+\.py):([\w.]+)`( \(recorded\))? \|", re.MULTILINE)
FILE = re.compile(r"^\| `([\w/]+\.py)` \|", re.MULTILINE)
START_UP = "## Where it all began"


@cache
def tour() -> str:
    """Returns the page without the section on start-up, which a request does not pass."""
    page = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    return page[: page.index(START_UP)]


@cache
def path() -> frozenset[tuple[str, str]]:
    """Returns (file, function) of everything that the second request of an engine calls."""
    command = [sys.executable, "-m", "tools.path_of_a_request", "--list"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    found, file = set(), ""
    for line in output.splitlines():
        match = re.fullmatch(r"(\S+\.py)?\s+([\w.<>]+)", line)
        if match:
            file = match[1] or file
            found.add((file, match[2].removesuffix(".<locals>").split(".<locals>")[0]))
    return frozenset(found)


def test_a_request_passes_each_stop() -> None:
    stops = STOP.findall(tour())
    assert len(stops) > 30
    assert [(file, name) for file, name, recorded in stops if not recorded and (file, name) not in path()] == []


def test_the_files_hold_the_stops_and_can_be_read_in_an_afternoon() -> None:
    files = FILE.findall(tour())
    assert {file for file, _, _ in STOP.findall(tour())} <= set(files)
    num_lines = sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert len(files) == len(set(files)) <= MAX_FILES
    assert num_lines <= MAX_LINES, f"the files of the tour have {num_lines} lines"


def test_a_stop_that_is_not_passed_is_found() -> None:
    assert ("engine/sched/scheduler.py", "Scheduler.finish_requests") not in path()
    assert ("engine/sched/scheduler.py", "Scheduler.schedule") in path()

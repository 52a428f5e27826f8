"""Parts of every test: seeds, workers, times, and a cache directory of the run, apart from the user's.

Hypothesis tries the same examples in every run, and a slow machine fails none of them. In the fresh tier it tries
others.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import core as hypothesis_core

from tests.checkpoints import MakeCheckpoint, shared_checkpoints
from tests.logs import capture_few_loggers
from tests.rows import ALL_ROWS, keep_pairwise
from tests.seeds import BASE_SEED, FRESH, examples, seed_of
from tests.times import COVERED, Times
from tests.workers import Workers, coverage_controller, shared_directory

_HERE = Path(__file__).parent
_UNTIMED = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fresh", _UNTIMED, database=None, max_examples=examples(50))
settings.register_profile("same", _UNTIMED, database=None, max_examples=examples(50), derandomize=True)
settings.load_profile("fresh" if FRESH else "same")
if FRESH:
    hypothesis_core.global_force_seed = seed_of(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="print processor seconds per folder, and enforce the budgets")
    parser.addoption("--store-times", action="store_true", help="write tests/times.json")
    parser.addoption("--workers", type=int, default=1, metavar="N", help="run the files of tests in N processes")


def pytest_configure(config: pytest.Config) -> None:
    capture_few_loggers()
    config.pluginmanager.register(Times(config), "times")
    num_workers = config.getoption("--workers")
    if num_workers > 1:
        config.pluginmanager.register(Workers(config, num_workers), "workers")


def pytest_collection() -> None:
    """Modules of tests live as long as the session: looking through them for garbage again and again takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str:
    return f"seeds: fresh, again with TESTS_SEED={BASE_SEED}" if FRESH else "seeds: the same in every run"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FRESH:
        terminalreporter.write_line(pytest_report_header())


TIERS = ("gpu", "browser", "prometheus", "scripts")
"""Marks that stand in the file of each test that has them."""


@cache
def tests_of(tier: str) -> frozenset[Path]:
    """Returns the files of tests that name the mark of a tier, and the folders above them."""
    files = [path for path in _HERE.rglob("test_*.py") if f"mark.{tier}" in path.read_text(encoding="utf-8")]
    return frozenset(place for file in files for place in (file, *file.parents))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no file without a test of the tier that `-m` asks for: importing all takes longer than some tiers."""
    first, _, rest = config.option.markexpr.partition(" ")
    is_one_tier = first in TIERS and " or " not in f" {rest} "
    return True if is_one_tier and collection_path not in tests_of(first) else None


SLOW_TIMEOUT_S = 4 * 3600
"""Limit of a slow test that names none: they take minutes to hours."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("fresh")
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if not ALL_ROWS:
        rows = [item for item in items if item.nodeid.startswith("tests/unit/worker/")]
        dropped = set(rows).difference(keep_pairwise(rows))
        config.hook.pytest_deselected(items=[item for item in rows if item in dropped])
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(autouse=True, scope="session")
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """QUIRE_CACHE_ROOT, for the processes that tests start, too. Workers share the verdicts on instruction sets.

    The only fixture of every test: each takes a tenth of a millisecond for each of ten thousand tests."""
    root, trials = tmp_path_factory.mktemp("cache"), shared_directory(tmp_path_factory) / "trials"
    trials.mkdir(exist_ok=True)
    (root / "trials").symlink_to(trials)
    with pytest.MonkeyPatch.context() as patch, _ctrl_c_is_heard():
        patch.setenv("QUIRE_CACHE_ROOT", str(root))
        _keep_heap_small(patch)
        yield root


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Lets `scripts/test --coverage` count branches in the tests of the parts with a floor: it takes time."""
    controller, is_covered = coverage_controller(item.config), item.nodeid.startswith(COVERED)
    if controller is not None and controller.started != is_covered:
        (controller.resume if is_covered else controller.pause)()
    return (yield)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`tiny_checkpoint(family, **overrides)`: its directory, made once per run. Do not write into it."""
    return shared_checkpoints(shared_directory(tmp_path_factory))


@contextmanager
def _ctrl_c_is_heard() -> Iterator[None]:
    """Lets Ctrl-C interrupt the tests and what they start: a shell that runs them in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _keep_heap_small(patch: pytest.MonkeyPatch) -> None:
    """Lets engine cores in the process of the tests not walk the whole heap, as each does once, when it starts.

    In a process of its own that is little; that of a test session is large, and hundreds of cores start in it: walking
    it was most of what many tests did. Tests of the freezing put the real `gc` back.
    """
    heap = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    patch.setattr("quire.engine.core.gc", heap)

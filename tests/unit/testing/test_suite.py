"""The suite's own parts: seeds, pairwise rows, the order of files, time budgets."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, seeds, times, workers
from tests.rows import pairwise_rows


def test_the_default_suite_has_constant_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "BASE_SEED", None)
    monkeypatch.setattr(seeds, "FRESH", False)
    assert seeds.seeds(3) == [0, 1, 2]
    assert seeds.seed_of(17) == 17
    assert (seeds.volume(1000), seeds.examples(60), seeds.examples(7)) == (1000, 30, 4)


def test_fresh_seeds_follow_from_the_base_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "FRESH", True)
    drawn = {}
    for base in ("1", "2"):
        monkeypatch.setattr(seeds, "BASE_SEED", base)
        drawn[base] = seeds.seeds(3)
        assert drawn[base] == seeds.seeds(3)
        assert len(set(drawn[base])) == 300
    assert not set(drawn["1"]) & set(drawn["2"])
    assert (seeds.volume(1000), seeds.examples(60)) == (100_000, 1800)


def test_pairwise_rows_hold_every_pair_of_values() -> None:
    sizes = {"shape": 7, "spec": 6, "dtype": 2, "instructions": 5}
    rows = [dict(zip(sizes, values, strict=True)) for values in product(*(range(size) for size in sizes.values()))]
    kept = [rows[i] for i in pairwise_rows(rows)]
    assert len(kept) <= 49  # of 420; no fewer than 42 can be enough

    def pairs(some: list[dict[str, int]]) -> set[object]:
        return {pair for row in some for pair in combinations(row.items(), 2)}

    assert pairs(kept) == pairs(rows)


def test_a_small_tier_is_in_the_files_that_name_it() -> None:
    """The others are not imported when it runs alone."""
    tests = Path(conftest.__file__).parent
    for tier in conftest.TIERS:
        naming = [path for path in tests.rglob("*.py") if f"mark.{tier}" in path.read_text(encoding="utf-8")]
        assert naming
        assert {path for path in naming if not path.name.startswith("test_")} == set()
        assert {tests, *naming} <= conftest.tests_of(tier)
    assert Path(__file__) not in conftest.tests_of("browser")


def test_two_workers_begin_with_servers_and_no_third_one_starts_any() -> None:
    files = ["tests/process/test_deaths.py", "tests/process/test_kills.py", "tests/unit/test_logger.py"]
    assert [workers.next_file(files, worker) for worker in range(3)] == [files[0], files[0], files[2]]
    assert workers.next_file(files[:2], worker=2) is None


def test_long_files_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"tests/process/test_a.py": 1.5, "tests/process/test_b.py": 30.0, "tests/unit/test_c.py": 90.0}
    monkeypatch.setattr(times, "stored_seconds", lambda: stored)
    items = [SimpleNamespace(nodeid=f"{file}::test_{i}") for file in ("tests/unit/test_new.py", *stored) for i in "xy"]
    files = workers.by_files(items)  # type: ignore[arg-type]  # of an item only its id is read
    assert list(files) == [
        "tests/process/test_b.py",
        "tests/process/test_a.py",
        "tests/unit/test_c.py",
        "tests/unit/test_new.py",
    ]
    assert [item.nodeid[-1] for item in files["tests/unit/test_c.py"]] == ["x", "y"]


def test_the_architecture_tests_go_to_one_worker() -> None:
    """They share the parsed sources."""
    items = [SimpleNamespace(nodeid=f"tests/architecture/test_{name}.py::test_it") for name in "ab"]
    assert workers.by_files(items) == {"tests/architecture": items}  # type: ignore[arg-type]


def test_a_folder_over_its_budget_is_named() -> None:
    limits = {"tests/a": 10.0, "tests/unit/engine": 10.0}
    assert not times.exceeded({"tests/a": 19.0, "tests/unit/engine": 19.0}, limits)
    assert times.exceeded({"tests/a": 21.0}, limits) == ["tests/a took 21 s, and its budget is 10 s"]
    assert times.exceeded({"tests/b": 1.0}, limits) == ["tests/b has no time budget"]
    assert times.exceeded({"tests/unit/engine": 30.0}, limits)
    assert not times.exceeded({"tests/unit/engine": 30.0}, limits, counts_branches=True)


def test_a_file_counts_for_the_narrowest_folder_with_a_budget() -> None:
    limits = {"tests/unit": 1.0, "tests/unit/worker": 1.0}
    assert times.folder_of("tests/unit/worker/kernels/test_linear.py", limits) == "tests/unit/worker"
    assert times.folder_of("tests/unit/test_logger.py", limits) == "tests/unit"
    assert times.folder_of("tests/wire/test_fuzz.py", limits) == "tests/wire"

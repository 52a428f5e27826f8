"""The suite's own parts: seeds, pairwise rows, the order of files, time budgets."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests import seeds, times, workers
from tests.rows import pairwise_rows


def test_the_default_suite_has_constant_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "BASE_SEED", None)
    monkeypatch.setattr(seeds, "FRESH", False)
    assert seeds.seeds(3) == [0, 1, 2]
    assert seeds.seed_of(17) == 17
    assert (seeds.volume(1000), seeds.examples(60)) == (1000, 60)


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


def test_long_files_come_first_and_those_with_servers_alternate_with_others() -> None:
    servers = {f"tests/process/test_{name}.py": seconds for name, seconds in (("a", 10.0), ("b", 30.0), ("c", 9.0))}
    others = {f"tests/unit/test_{name}.py": seconds for name, seconds in (("d", 8.0), ("e", 20.0), ("f", 15.0))}
    order = workers.file_order({**others, **servers})
    assert "".join(file[-4] for file in order) == "befadc"


def test_a_folder_over_its_budget_is_named() -> None:
    limits = {"tests/a": 10.0, "tests/unit/engine": 10.0}
    assert not times.exceeded({"tests/a": 14.0, "tests/unit/engine": 14.0}, limits)
    assert times.exceeded({"tests/a": 16.0}, limits) == ["tests/a took 16 s, and its budget is 10 s"]
    assert times.exceeded({"tests/b": 1.0}, limits) == ["tests/b has no time budget"]
    assert times.exceeded({"tests/unit/engine": 20.0}, limits)
    assert not times.exceeded({"tests/unit/engine": 20.0}, limits, counts_branches=True)


def test_a_file_counts_for_the_narrowest_folder_with_a_budget() -> None:
    limits = {"tests/unit": 1.0, "tests/unit/worker": 1.0}
    assert times.folder_of("tests/unit/worker/kernels/test_linear.py", limits) == "tests/unit/worker"
    assert times.folder_of("tests/unit/test_logger.py", limits) == "tests/unit"
    assert times.folder_of("tests/wire/test_fuzz.py", limits) == "tests/wire"

"""The budgets of budgets.toml: how much of each is used, and what exceeds its own."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.measures import Checkout

Budgets = Mapping[str, Mapping[str, int]]
BUDGETS: Budgets = tomllib.loads((Path(__file__).parent / "budgets.toml").read_text(encoding="utf-8"))


def _totals(checkout: Checkout) -> dict[str, int]:
    return {
        "lines": sum(len(source.lines) for source in checkout.sources),
        "files": len(checkout.sources),
        "core ring": checkout.core_ring()[0],
        "unearned files": len(checkout.unearned()),
    }


def _rows(checkout: Checkout, budgets: Budgets) -> Iterator[tuple[str, int, int | None]]:
    """Yields (name, used, budget or None). A folder without a budget of its own counts for the folder above it."""
    for name, used in _totals(checkout).items():
        yield name, used, budgets["totals"].get(name)
    lines: dict[str, int] = {}
    for folder, (count, _) in checkout.lines_per_folder().items():
        owner = folder or "vocabulary"
        while owner not in budgets["lines"] and "/" in owner:
            owner = owner.rpartition("/")[0]
        lines[owner] = lines.get(owner, 0) + count
    for owner, used in lines.items():
        yield owner, used, budgets["lines"].get(owner)


def over_budget(checkout: Checkout, budgets: Budgets = BUDGETS) -> list[str]:
    """Returns a sentence for each total or folder that exceeds its budget or has none."""
    return [
        f"{name} has no budget" if budget is None else f"{name}: {used:,} of {budget:,}"
        for name, used, budget in _rows(checkout, budgets)
        if budget is None or used > budget
    ]


def table(checkout: Checkout) -> str:
    """Returns the files that do not earn their names, the table of all budgets, and what exceeds its own."""
    unearned = ", ".join(
        f"{source.module.removeprefix('quire.')} {len(source.lines)}" for source in checkout.unearned()
    )
    rows = [f"files with neither two importers, nor 120 lines, nor a door: {unearned or 'none'}"]
    rows.append(f"{'':<24}{'used':>8}{'budget':>8}")
    rows += [f"{name:<24}{used:>8,}{budget or 0:>8,}" for name, used, budget in _rows(checkout, BUDGETS)]
    return "\n".join([*rows, *(f"over its budget: {line}" for line in over_budget(checkout))])

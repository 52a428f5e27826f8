"""Rows of tests with many parameters: pairwise in the default suite, all of them in the fresh tier.

A kernel's test has a row for each combination of shape, specification, type and instruction set. Faults of kernels
show with one value or with two together, so the default suite takes rows until every pair of values has met. All rows
run with TESTS_ROWS=all, which `scripts/test` sets when the kernels have changed.

Tests of whole models take EVERY_KIND of family in full, and of the others what `family_rows` leaves them.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import Any

import pytest

from tests.seeds import FRESH

ALL_ROWS = FRESH or os.environ.get("TESTS_ROWS") == "all"
Row = Mapping[str, Hashable]
EVERY_KIND = {
    *("llama", "mistral", "gemma2", "gemma3_text"),  # full attention, windows, both with soft caps, both with two ropes
    *("gpt_oss", "llama4_text", "deepseek_v3", "gemma4_text"),  # sinks, chunks, latent attention, shared caches
    *("opt", "bloom", "mixtral"),  # learned positions, slopes, plain experts
}
"""Families that together have every kind of kernel and cache. The others repeat these in other orders, with other norms
and activations: tests/unit/worker compares the logits and the bits of each."""


def each_family(families: Sequence[str]) -> list[Any]:
    """Returns a parameter for each family; those that repeat others run with `-m slow`."""
    return [pytest.param(family, marks=() if family in EVERY_KIND else pytest.mark.slow) for family in families]


def family_rows(families: Sequence[str], values: Sequence[Hashable]) -> list[Any]:
    """Returns parameters (family, value): with EVERY_KIND all values, with each other family one of them in turn; the
    rest runs with `-m slow`, or when the kernels changed."""
    return [
        pytest.param(
            family,
            value,
            marks=() if family in EVERY_KIND or i % len(values) == j or ALL_ROWS else pytest.mark.slow,
        )
        for i, family in enumerate(families)
        for j, value in enumerate(values)
    ]


def pairwise_rows(rows: Sequence[Row]) -> list[int]:
    """Returns ascending indices of rows that together hold every pair of values that any row holds."""
    pairs = [frozenset(combinations(sorted(row.items()), 2)) for row in rows]
    missing = frozenset().union(*pairs)
    # (minus the number of pairs a row would add, when last counted; its index). The number only falls: a row that is
    # first with its present number adds the most
    queue = [(-len(own), i) for i, own in enumerate(pairs)]
    heapify(queue)
    chosen = []
    while missing:
        i = heappop(queue)[1]
        present = -len(pairs[i] & missing), i
        if queue and present > queue[0]:
            heappush(queue, present)
        else:
            chosen.append(i)
            missing -= pairs[i]
    return sorted(chosen)


def keep_pairwise(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests without the rows that add no pair of values; tests of one or two parameters keep all."""
    rows: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            rows.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    for group in rows.values():
        # rows that have a value in common have the same object: a value need not be hashable
        values = [{name: id(value) for name, value in item.callspec.params.items()} for item in group]
        if len(values[0]) > 2:
            kept = set(pairwise_rows(values))
            dropped.update(item for i, item in enumerate(group) if i not in kept)
    return [item for item in items if item not in dropped]

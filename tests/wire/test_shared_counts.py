"""Counts of several processes in one page."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from quire.wire.peers import SharedCounts


def test_each_sees_what_the_others_have(tmp_path: Path) -> None:
    """Against plain lists, over random changes and deaths."""
    rng = random.Random(3)
    pages = [SharedCounts.create(tmp_path / "counts", 4, 3)]
    pages += [SharedCounts.attach(tmp_path / "counts", 3, row) for row in range(1, 4)]
    numbers = [[0] * 3 for _ in range(4)]
    for _ in range(500):
        row, column = rng.randrange(4), rng.randrange(3)
        if rng.random() < 0.05:
            pages[0].clear_row(row)
            numbers[row] = [0] * 3
        else:
            numbers[row][column] = value = rng.randrange(-(1 << 40), 1 << 40)
            pages[row].column(column).put(value)
        for other, page in enumerate(pages):
            expected = sum(numbers[r][column] for r in range(4) if r != other)
            assert page.column(column).others() == expected


def test_another_process_sees_it(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    page = SharedCounts.create(path, 2, 1)
    program = (
        "import sys; from pathlib import Path; from quire.wire.peers import SharedCounts;"
        "count = SharedCounts.attach(Path(sys.argv[1]), 1, 1).column(0); count.put(41 + count.others())"
    )
    page.column(0).put(1)
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert page.column(0).others() == 42
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("num_columns", "row"), [(3, 2), (5, 0), (3, 10)])
def test_a_page_of_another_form_is_refused(tmp_path: Path, num_columns: int, row: int) -> None:
    SharedCounts.create(tmp_path / "counts", 2, 3)
    with pytest.raises(ValueError, match=f"has no row {row} of {num_columns} columns"):
        SharedCounts.attach(tmp_path / "counts", num_columns, row)


def test_a_column_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="column 3 of 3"):
        SharedCounts.create(tmp_path / "counts", 2, 3).column(3)

"""Promise P21: the files of a model are data. A hundred repositories that mean ill are loaded, with and without -O."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.testing.tiny_models import make_tiny_checkpoint

from .loader import misdeeds
from .repositories import LOADS, REPOSITORIES, SECRET, write_all

ROOT = Path(__file__).resolve().parents[2]
MAX_CPU_S = 10.0
MAX_GROWTH_MIB = 256.0


Line = dict[str, Any]
"""Report of the loader on a repository."""


@pytest.fixture(scope="module")
def lines_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[Line]]:
    """`lines_of(optimized)`: of each repository, then of each misdeed of the loader itself; a run of it is enough."""
    root = tmp_path_factory.mktemp("corpus").resolve()
    write_all(root, make_tiny_checkpoint(tmp_path_factory.mktemp("good") / "good", "llama"))
    (root / "repositories" / "link.json").symlink_to("../outside/secret.json")
    return functools.cache(lambda optimized: Loader(root, optimized=optimized).lines())


class Loader:
    """A loader under way. It may not take more memory than a machine has to spare."""

    def __init__(self, root: Path, *, optimized: bool = False) -> None:
        interpreter = [sys.executable, *(["-O"] if optimized else [])]
        python_path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [*interpreter, "-m", "tests.security.loader", str(root)],
            env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def lines(self) -> list[Line]:
        """Returns what it says of each repository."""
        output, errors = self._process.communicate(timeout=400)
        assert self._process.returncode == 0, errors[-3000:]
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("optimized", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "-O"])
def test_repositories_that_mean_ill(lines_of: Callable[[bool], list[Line]], optimized: bool) -> None:
    lines = lines_of(optimized)[: len(REPOSITORIES)]
    assert {line["name"] for line in lines} == {repository.name for repository in REPOSITORIES}
    expected = {repository.name: repository.outcome for repository in REPOSITORIES}
    problems = [problem for line in lines for problem in problems_of(line, expected[line["name"]])]
    assert not problems, "\n".join(problems)
    assert all(line["is_optimized"] is optimized for line in lines)
    assert sum(line["outcome"] == LOADS for line in lines) < len(lines) / 3
    assert not Path("/tmp/owned").exists()


def problems_of(line: Line, outcome: str) -> list[str]:
    found = []
    if outcome not in line["outcome"] or line["outcome"].startswith("UNPLANNED"):
        found.append(f"expected {outcome!r}, got {line['outcome']!r}")
    if line["seen"]:
        found.append(f"did {line['seen']}")
    if SECRET in line["outcome"]:
        found.append("tells what stands in another file")
    if line["cpu_s"] > MAX_CPU_S or line["grown_mib"] > MAX_GROWTH_MIB:
        found.append(f"took {line['cpu_s']:.1f} s and {line['grown_mib']:.0f} MiB")
    return [f"{line['name']}: {problem}" for problem in found]


def test_the_auditor_notices_everything_it_is_there_for(tmp_path: Path, lines_of: Callable[[bool], list[Line]]) -> None:
    (tmp_path / "repositories").mkdir()
    lines = lines_of(False)[len(REPOSITORIES) :]
    assert [line["name"] for line in lines] == list(misdeeds(tmp_path))
    assert [line["name"] for line in lines if not line["seen"]] == []

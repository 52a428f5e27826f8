"""Promise P21: the files of a model are data. A hundred repositories that mean ill are loaded, with and without -O."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.testing.tiny_models import make_tiny_checkpoint

from .loader import misdeeds
from .repositories import LOADS, REPOSITORIES, SECRET, write_all

ROOT = Path(__file__).resolve().parents[2]
MAX_CPU_S = 10.0
MAX_GROWTH_MIB = 256.0


@pytest.fixture
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus").resolve()
    write_all(root, make_tiny_checkpoint(tmp_path_factory.mktemp("good") / "good", "llama"))
    return root


class Loader:
    """A loader under way. It may not take more memory than a machine has to spare."""

    def __init__(self, root: Path, *flags: str, optimized: bool = False) -> None:
        interpreter = [sys.executable, *(["-O"] if optimized else [])]
        python_path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [*interpreter, "-m", "tests.security.loader", str(root), *flags],
            env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def lines(self) -> list[dict[str, Any]]:
        """Returns what it says of each repository."""
        output, errors = self._process.communicate(timeout=400)
        assert self._process.returncode == 0, errors[-3000:]
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("optimized", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "-O"])
def test_repositories_that_mean_ill(corpus: Path, optimized: bool) -> None:
    lines = Loader(corpus, optimized=optimized).lines()
    assert {line["name"] for line in lines} == {repository.name for repository in REPOSITORIES}
    expected = {repository.name: repository.outcome for repository in REPOSITORIES}
    problems = [problem for line in lines for problem in problems_of(line, expected[line["name"]])]
    assert not problems, "\n".join(problems)
    assert all(line["is_optimized"] is optimized for line in lines)
    assert sum(line["outcome"] == LOADS for line in lines) < len(lines) / 3
    assert not Path("/tmp/owned").exists()


def problems_of(line: dict[str, Any], outcome: str) -> list[str]:
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


def test_the_auditor_notices_everything_it_is_there_for(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "repositories").mkdir()
    (tmp_path / "outside" / "secret.json").write_text("{}")
    (tmp_path / "repositories" / "link.json").symlink_to("../outside/secret.json")
    lines = Loader(tmp_path, "--self-check").lines()
    assert [line["name"] for line in lines] == list(misdeeds(tmp_path))
    assert [line["name"] for line in lines if not line["seen"]] == []

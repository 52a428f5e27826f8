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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus").resolve()
    write_all(root, make_tiny_checkpoint(tmp_path_factory.mktemp("good") / "good", "llama"))
    return root


def run_loader(root: Path, *flags: str, optimized: bool = False) -> list[dict[str, Any]]:
    """What the loader says of each repository. It may not take more memory than a machine has to spare."""
    interpreter = [sys.executable, *(["-O"] if optimized else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*interpreter, "-m", "tests.security.loader", str(root), *flags],
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("optimized", [False, True], ids=["", "-O"])
def test_repositories_that_mean_ill(corpus: Path, optimized: bool) -> None:
    lines = run_loader(corpus, optimized=optimized)
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
    lines = run_loader(tmp_path, "--self-check")
    assert [line["name"] for line in lines] == list(misdeeds(tmp_path))
    assert [line["name"] for line in lines if not line["seen"]] == []

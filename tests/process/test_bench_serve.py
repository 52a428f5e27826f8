"""`quire bench serve` with a server of its own: it starts one, loads it, and leaves none behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .serving import SRC, environment


def bench(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "bench", "serve", "--json", *flags]
    marked = {**environment(), "STARTED_BY_TEST": str(tmp_path)}
    return subprocess.run(command, env=marked, capture_output=True, text=True, timeout=400, cwd=SRC.parent)


def processes_with(mark: Path) -> list[int]:
    """Returns the ids of processes that have `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(mark).encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_a_server_of_its_own(tmp_path: Path) -> None:
    flags = ["--num-prompts", "6", "--input-len", "30", "--output-len", "8", "--max-num-seqs", "4"]
    done = bench(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    (load,) = content["loads"]
    assert (content["model"], load["num_requests"], load["num_failed"]) == ("demo", 6, 0)
    assert (load["prompt_tokens"], load["output_tokens"]) == (180, 48)
    assert processes_with(tmp_path) == []


def test_a_model_that_is_not_there_starts_nothing(tmp_path: Path) -> None:
    done = bench(tmp_path, "--model", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "starting" not in done.stderr
    assert "Traceback" not in done.stderr

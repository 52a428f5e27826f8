"""`quire batch` over the death of its core: a row is lost by none, and one that kills every core fails alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main

FLAGS = ["--distributed-executor-backend", "tests.process.executors:Quick", "--num-gpu-blocks-override", "256"]


def test_deaths_of_the_core_cost_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = [{"prompt": [i + 1] * 9, "max_tokens": 5 + i, "ignore_eos": True} for i in range(24)]
    bodies[7]["request_id"] = "poison"
    source = tmp_path / "in.jsonl"
    lines = [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(name: str) -> tuple[int, dict[str, object], list[object]]:
        code = main(["batch", str(source), "-o", str(tmp_path / name), "--max-num-seqs", "4", *FLAGS])
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        bodies = {row["custom_id"]: row["response"]["body"].get("choices") for row in rows}
        return code, bodies, [row["error"] for row in rows if row["error"]]

    with monkeypatch.context() as patch:
        patch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
        _, expected, _ = run("undisturbed")
    once = f"core.step.execute=kill,skip=9,times=1,tally={tmp_path}/tally"
    monkeypatch.setenv("QUIRE_FAILPOINTS", f"core.step.execute=exit(3),key=poison;{once}")
    code, answers, errors = run("disturbed")
    assert code == 1
    assert answers == {**expected, "7": None}
    assert [error["code"] for error in errors] == [500]  # type: ignore[index]
    assert "24 results" in capsys.readouterr().err
    assert (tmp_path / "tally").exists()

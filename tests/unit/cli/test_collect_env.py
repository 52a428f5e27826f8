"""`quire collect-env`: facts, and no secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import __version__
from quire.cli.collect_env import quire_variables, redact
from quire.cli.machine import cpu_facts, memory_facts
from quire.cli.main import main

Capture = pytest.CaptureFixture[str]


def test_json_and_text(capsys: Capture) -> None:
    assert main(["collect-env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["software"]["quire"] == __version__
    assert facts["software"]["torch"]
    assert facts["hardware"]["usable_cores"] >= 1
    assert facts["threads"]["torch_threads"] >= 1
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    assert f"  quire                 {__version__}\n" in out
    assert "environment:\n" in out


def test_variables_are_shown_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("QUIRE_API_KEY", "canary-1")
    monkeypatch.setenv("QUIRE_MADE_UP", "x")
    monkeypatch.setenv("HF_TOKEN", "canary-2")
    assert main(["collect-env"]) == 0  # an unknown variable stops every other command
    out = capsys.readouterr().out
    assert "canary" not in out
    assert quire_variables()["QUIRE_LOGGING_LEVEL"] == "WARNING"
    assert quire_variables()["QUIRE_MADE_UP"] == "x  (not known to Quire)"


@pytest.mark.parametrize("name", ["QUIRE_API_KEY", "QUIRE_HF_TOKEN", "QUIRE_DB_PASSWORD", "quire_secret"])
def test_secrets_are_not_shown(name: str) -> None:
    assert redact(name, "value") == "(redacted)"


def test_cpu_of_both_kinds(tmp_path: Path) -> None:
    intel = tmp_path / "intel"
    intel.write_text("processor\t: 0\nmodel name\t: Fast CPU\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile sse\n\n")
    facts = cpu_facts(intel)
    assert facts["cpu"] == "Fast CPU"
    assert facts["instruction_sets"] == ["avx2", "avx512f", "amx_tile", "amx_bf16"]
    arm = tmp_path / "arm"
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n")
    assert cpu_facts(arm)["instruction_sets"] == ["asimd", "bf16", "i8mm"]
    assert cpu_facts(tmp_path / "none")["instruction_sets"] == []


def test_free_memory_is_part_of_all_memory() -> None:
    facts = memory_facts()
    assert 0 < facts["free_bytes"] <= facts["memory_bytes"]

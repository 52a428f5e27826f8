"""`quire models`, and the page that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.cli import models
from quire.cli.main import main
from quire.config.model_impl import Verdict
from quire.worker.models.registry import MODELS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
Capture = pytest.CaptureFixture[str]


def table(monkeypatch: pytest.MonkeyPatch, **rows: Verdict) -> None:
    """Sets the certified classes of transformers."""
    monkeypatch.setattr(models, "certified_models", lambda: ("5.23.0", rows))


def test_the_page_is_what_the_command_writes() -> None:
    expected = models.format_page(models.make_facts())
    assert PAGE.read_text(encoding="utf-8") == expected, "run: quire models --markdown > docs/models.md"


def test_every_native_model_has_a_line(capsys: Capture) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if line.split()[1] == "native"} == set(MODELS)
    assert lines[-1].endswith("refused")
    assert f"{len(MODELS)} native" in lines[-1]


def test_a_pattern_chooses(capsys: Capture) -> None:
    assert main(["models", "QWEN3MOE"]) == 0
    assert (
        capsys.readouterr().out
        == "Qwen3MoeForCausalLM  native\n1 architectures: 1 native, 0 text part, 0 transformers, 0 refused\n"
    )
    assert main(["models", "zeus"]) == 2
    assert "no architecture has 'zeus' in its name" in capsys.readouterr().err


def test_the_ways_of_a_model(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    table(monkeypatch, ZeusForCausalLM=Verdict(), HeraForCausalLM=Verdict("it keeps a|state"),
          LlamaForCausalLM=Verdict(), Qwen2LMHeadModel=Verdict("x"))  # fmt: skip
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["architectures"]
    assert rows["ZeusForCausalLM"]["path"] == "transformers"
    assert rows["HeraForCausalLM"] == {"path": "refused", "why": "it keeps a|state"}
    assert rows["LlamaForCausalLM"]["path"] == "native"  # Quire's own class comes first
    assert "Qwen2LMHeadModel" not in rows  # a head of a native family
    assert rows["Gemma3ForConditionalGeneration"]["path"] == "text part"
    assert rows["BertModel"]["is_encoder"]
    assert main(["models", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert "| `HeraForCausalLM` | it keeps a\\|state |" in page
    assert "compared with transformers 5.23.0" in page.replace("\n", " ")


def test_the_page_knows_every_decoder_of_transformers() -> None:
    known = models.make_facts()["architectures"]
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert sorted(name for name in names if name not in known and models._model(name).family not in known) == []

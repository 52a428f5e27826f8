from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .scripted_engine import ScriptedEngine

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_LOGGING_LEVEL", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A checkpoint directory with a config and generation defaults, and no weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9}))
    return directory


@pytest.fixture
def use_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[ScriptedEngine], ScriptedEngine]:
    """Make every command run on a scripted engine."""

    def use(engine: ScriptedEngine) -> ScriptedEngine:
        for module in ("complete", "chat", "bench.throughput"):
            monkeypatch.setattr(f"quire.cli.{module}.make_engine", lambda args: engine)
        return engine

    return use


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pipe a text into the command."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))

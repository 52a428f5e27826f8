from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.frontend.text.tokenizer import Tokenizer

from .toy_tokenizers import KINDS, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint's tokenizer directory of each kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: write_tokenizer(kind, root / kind) for kind in KINDS}


@pytest.fixture(scope="session")
def tokenizers_by_kind(tokenizer_dirs: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.from_dir(path) for kind, path in tokenizer_dirs.items()}


@pytest.fixture(scope="session")
def tokenizer(tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    """The byte-level one: what most tests need."""
    return tokenizers_by_kind["byte_level"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights: enough for everything that does not compute."""
    directory = write_tokenizer("byte_level", tmp_path_factory.mktemp("model") / "toy")
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 500, "hidden_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "max_position_embeddings": 64, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": [1, 2]}))
    return directory

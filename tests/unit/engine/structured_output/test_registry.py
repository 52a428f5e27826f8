"""Which engines read their vocabulary before a request needs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.config.hf_config import HFConfig
from quire.engine.structured_output.manager import PRELOAD_VOCAB_SIZE, make_structured_output_manager


def make_config(vocab_size: int, **model: Any) -> EngineConfig:
    """The demo model's, as if it had so many tokens."""
    config = EngineArgs("demo").create_engine_config()
    raw = HFConfig({"vocab_size": vocab_size}, Path())
    return dataclasses.replace(config, model_config=dataclasses.replace(config.model_config, hf_config=raw, **model))


@pytest.mark.parametrize(
    ("vocab_size", "model", "preloads"),
    [
        (PRELOAD_VOCAB_SIZE, {}, True),
        (PRELOAD_VOCAB_SIZE - 1, {}, False),
        (PRELOAD_VOCAB_SIZE, {"tokenizer_dir": Path("nowhere")}, False),
    ],
)
def test_grammars_are_loaded_early_for_large_vocabularies_only(
    vocab_size: int, model: dict[str, Any], preloads: bool
) -> None:
    assert make_structured_output_manager(make_config(vocab_size, **model))._preloads is preloads

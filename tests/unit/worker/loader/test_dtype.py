"""Which type a model runs in, from the flag, the checkpoint and the device."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.errors import ModelLoadError
from quire.worker.platform import resolve_dtype

from ..models.oracle import CPU, model_config_of

CUDA = torch.device("cuda")


def with_dtype(path: Path, folder: Path, **dtype: str) -> Path:
    config = json.loads((path / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config | dtype))
    shutil.copy(path / "model.safetensors", folder)
    return folder


@pytest.mark.parametrize(
    ("flag", "stored", "device", "expected"),
    [
        ("auto", "float32", CPU, torch.float32),
        ("auto", "bfloat16", CPU, torch.bfloat16),
        ("auto", "float16", CPU, torch.bfloat16),
        ("auto", "float16", CUDA, torch.float16),
        ("bfloat16", "float32", CPU, torch.bfloat16),
        ("float", "bfloat16", CPU, torch.float32),
        ("float32", "bfloat16", CPU, torch.float32),
        ("float16", "float32", CPU, torch.float16),
        ("half", "float32", CUDA, torch.float16),
    ],
)
def test_the_type_follows_from_flag_checkpoint_and_device(
    flag: str,
    stored: str,
    device: torch.device,
    expected: torch.dtype,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = with_dtype(tiny_checkpoint("llama"), tmp_path, torch_dtype=stored)
    assert resolve_dtype(model_config_of(path, dtype=flag), device) is expected


def test_float16_on_cpu_is_said_in_the_log(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    path = with_dtype(tiny_checkpoint("llama"), tmp_path, dtype="float16")
    with caplog.at_level(logging.INFO, logger="quire"):
        resolve_dtype(model_config_of(path), CPU)
    assert "float16; on CPU it runs as bfloat16" in caplog.text


def test_without_a_word_in_the_config_the_weights_decide(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = with_dtype(tiny_checkpoint("llama", dtype="bfloat16"), tmp_path)
    assert resolve_dtype(model_config_of(path), CPU) is torch.bfloat16


def test_a_type_nobody_can_run(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = with_dtype(tiny_checkpoint("llama"), tmp_path, dtype="int4")
    with pytest.raises(ModelLoadError, match=r"config\.json gives the dtype 'int4', which cannot be run"):
        resolve_dtype(model_config_of(path), CPU)

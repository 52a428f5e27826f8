"""`quire info` names the size of the weights that the worker reports once they are loaded: config/quantization.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli.info import make_report
from quire.config.engine_args import EngineArgs
from quire.worker.layers.weights import weight_bytes

from ..models.oracle import load
from .test_checkpoints import CASES, SIZES
from .writers import GPTQ_CONFIG, quantize_checkpoint

Make = Callable[..., Path]
MIXED = ("gptq", "awq", "compressed, 4 bits", "compressed, int8 weights", "fp8")
"""Cases of mixtures: each method once."""


def report(path: Path, **flags: Any) -> dict[str, Any]:
    found = make_report(EngineArgs(str(path), dtype="float32", **flags).create_engine_config())
    assert found["problems"] == []
    return found


@pytest.mark.parametrize("method", [None, "int8", "int4"])
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "opt", "gemma2", "mixtral", "qwen3_moe", "glm4", "gptj", "cohere", "gpt2"),
        *("granitemoe", "gpt_oss", "aria_text", "ernie4_5_moe", "deepseek_v3"),
    ],
)
def test_quantized_at_load(tiny_checkpoint: Make, family: str, method: str | None) -> None:
    path = tiny_checkpoint(family)
    weights = report(path, quantization=method)["weights"]
    assert weights["memory_bytes"] == weight_bytes(load(path, quantization=method))
    assert weights["quantization"] == method
    assert (weights["quantized_parameters"] > 0) == (method is not None)
    assert weights["parameters"] == plain_parameters(path)


@functools.cache
def plain_parameters(path: Path) -> int:
    number: int = report(path)["weights"]["parameters"]
    return number


@pytest.mark.parametrize(
    ("family", "case"), [*(("llama", case) for case in CASES), *(("mixtral", c) for c in MIXED), ("deepseek_v3", "fp8")]
)
def test_stored_in_integers(tiny_checkpoint: Make, tmp_path: Path, case: str, family: str) -> None:
    stored, plain = quantize_checkpoint(tiny_checkpoint(family, **SIZES), tmp_path, *CASES[case])
    weights, of_plain = report(stored)["weights"], report(plain)["weights"]
    assert weights["memory_bytes"] == weight_bytes(load(stored)) < of_plain["memory_bytes"]
    assert weights["parameters"] == of_plain["parameters"]
    assert weights["quantized_parameters"] > 0


def test_groups_that_are_no_neighbours_are_plain_weights(tiny_checkpoint: Make, tmp_path: Path) -> None:
    make, write, _ = CASES["gptq"]
    config = {**GPTQ_CONFIG, "desc_act": True}
    stored, plain = quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path, make, write, config)
    assert report(stored)["weights"]["memory_bytes"] == report(plain)["weights"]["memory_bytes"]


def test_there_is_more_room_for_the_kv_cache(tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory less the weights, as they really are."""
    path = tiny_checkpoint("llama")
    free = report(path)["weights"]["memory_bytes"] + 300_000
    monkeypatch.setattr("quire.cli.info.available_cpu_memory", lambda: free)
    flags = {"max_num_seqs": 256, "max_model_len": 64}
    blocks = [report(path, quantization=method, **flags)["capacity"]["blocks"] for method in (None, "int8")]
    assert blocks[0] < blocks[1]

"""Loading a checkpoint takes the memory of its file, a tenth more, and the pages of its largest tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.checkpoint import CheckpointIndex
from quire.config.engine import LoadConfig
from quire.wire.process import peak_memory_bytes
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.loader import Placement, load_model
from quire.worker.platform import release_free_memory

from ..models.oracle import CPU, model_config_of
from ..quantization.writers import FP8_CONFIG, float8, mxfp4_checkpoint, quantize_checkpoint, random_float8

SLACK = 4 << 20
"""Bytes for what is no weight: modules, kernels, the C library's heap."""
SIZES: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 20, "vocab_size": 32768, "dtype": "bfloat16"}
EXPERTS: dict[str, Any] = {"num_local_experts": 8, "intermediate_size": 256}


def fp8(source: Path, target: Path) -> Path:
    return quantize_checkpoint(
        source, target, partial(random_float8, rows=16, columns=32), partial(float8, rows=16), FP8_CONFIG
    )[0]


Make = Callable[[Callable[..., Path], Path], Path]
CHECKPOINTS: dict[str, Make] = {
    "bfloat16": lambda tiny, _: tiny("llama", **SIZES, intermediate_size=768),
    "stacked experts": lambda tiny, _: tiny("granitemoe", **SIZES, **EXPERTS),
    "experts one by one": lambda tiny, _: tiny("qwen3_moe", **SIZES, moe_intermediate_size=128, mlp_only_layers=[]),
    "MXFP4": lambda tiny, target: mxfp4_checkpoint(tiny("gpt_oss", **SIZES, **EXPERTS), target)[0],
    "fp8": lambda tiny, target: fp8(tiny("llama", **SIZES, intermediate_size=1536), target),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("form", CHECKPOINTS)
def test_a_tenth_more_than_the_file(
    form: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, library: NativeLibrary
) -> None:
    config = model_config_of(CHECKPOINTS[form](tiny_checkpoint, tmp_path))
    index = CheckpointIndex.from_dir(config.model_dir)
    largest = max(tensor.nbytes for tensor in index.tensors.values())
    kernels = NativeKernels(Context(library, 2, library.instruction_sets()[0]))
    load_model(model_config_of(tiny_checkpoint("llama")), LoadConfig(), Placement(CPU, torch.bfloat16, kernels))
    release_free_memory(CPU)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_memory_bytes()
    model = load_model(config, LoadConfig(), Placement(CPU, torch.bfloat16, kernels))
    grown = peak_memory_bytes() - before
    assert grown < 1.1 * index.total_bytes + largest + SLACK
    del model

"""gpt-oss with its experts in MXFP4 computes what the plain weights that they stand for compute."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.cli.info import make_report
from quire.config.engine import LoadConfig
from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.layers.moe import Experts
from quire.worker.layers.weights import weight_bytes
from quire.worker.loader import Placement, load_model

from ..quantization.writers import mxfp4_checkpoint
from .oracle import CPU, load, model_config_of, quire_logits
from .test_oracle import assert_same_logits, random_tokens

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and the plain one that it stands for."""
    return mxfp4_checkpoint(tiny_checkpoint("gpt_oss"), tmp_path_factory.mktemp("mxfp4"))


def native(library: NativeLibrary, dtype: torch.dtype) -> Placement:
    return Placement(CPU, dtype, NativeKernels(Context(library, 2, library.instruction_sets()[0])))


def test_logits_are_those_of_transformers(checkpoints: tuple[Path, Path]) -> None:
    stored, plain = checkpoints
    assert_same_logits(stored, 1, 40, 200, oracle_path=plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_forms_have_the_same_bits(
    library: NativeLibrary, checkpoints: tuple[Path, Path], dtype: torch.dtype
) -> None:
    """On native kernels, which read the experts as they are stored."""
    models = [load_model(model_config_of(path), LoadConfig(), native(library, dtype)) for path in checkpoints]
    experts = [[m for m in model.modules() if isinstance(m, Experts)] for model in models]
    assert all(module.quantized_bytes is not None for module in experts[0])
    assert all(module.quantized_bytes is None for module in experts[1])
    stored, plain = (quire_logits(model, random_tokens(50)) for model in models)
    assert torch.equal(stored, plain)
    if dtype == torch.float32:
        torch.testing.assert_close(stored, quire_logits(load(checkpoints[1]), random_tokens(50)), rtol=0, atol=1e-3)


def test_info_has_the_memory_of_the_weights(checkpoints: tuple[Path, Path]) -> None:
    stored, plain = checkpoints
    report, of_plain = (
        make_report(EngineArgs(str(path), dtype="float32").create_engine_config())["weights"] for path in checkpoints
    )
    assert report["memory_bytes"] == weight_bytes(load(stored)) < weight_bytes(load(plain))
    assert report["parameters"] == of_plain["parameters"]
    assert report["quantization"] == "mxfp4"


def edited(stored: Path, target: Path, edit: Callable[[dict[str, Any], str], Any]) -> Path:
    path = Path(shutil.copytree(stored, target / "edited"))
    tensors = load_file(path / "model.safetensors")
    edit(tensors, "model.layers.1.mlp.experts.down_proj")
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, b: t.pop(f"{b}_scales"), "belongs to a quantized matrix that has no scales"),
        (lambda t, b: t.pop(f"{b}_blocks"), "has no tensor .*down_proj"),
        (lambda t, b: t.pop(f"{b}_bias"), "has no tensor .*down_proj_bias"),
        (lambda t, b: t.update({f"{b}_blocks": t[f"{b}_blocks"][..., :8].clone()}), "blocks of 16 bytes"),
        (lambda t, b: t.update({f"{b}_scales": t[f"{b}_scales"][..., :1].clone()}), "but the blocks make it"),
        (lambda t, b: t.update({f"{b}_scales": t[f"{b}_scales"].int()}), "MXFP4 is stored as U8"),
        (lambda t, b: t[f"{b}_scales"][0, 0].fill_(255), "down_proj: has a scale of 2\\^128, or NaN"),
        (
            lambda t, b: t.update({f"{b}_{s}": t[f"{b}_{s}"][:, 1:].clone() for s in ("blocks", "scales")}),
            r"has shape \[5, 64, 95\], but config.json makes it \[5, 64, 96\]",
        ),
    ],
)
def test_damaged_experts_are_named(
    checkpoints: tuple[Path, Path], tmp_path: Path, edit: Callable[[dict[str, Any], str], Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(edited(checkpoints[0], tmp_path, edit))


def test_blocks_too_small_for_bfloat16_are_zeros(
    library: NativeLibrary, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """A block that is all zero may have any scale."""
    small = edited(checkpoints[0], tmp_path, lambda t, b: t[f"{b}_scales"][:, :40].fill_(1))
    other = edited(checkpoints[0], tmp_path / "other", lambda t, b: t[f"{b}_blocks"][:, :40].fill_(0))
    models = [load_model(model_config_of(p), LoadConfig(), native(library, torch.bfloat16)) for p in (small, other)]
    logits = [quire_logits(model, random_tokens(9)) for model in models]
    assert torch.equal(*logits)


def test_what_is_refused(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoints[1], tmp_path / "plain"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"swiglu_limit": 5.0}))
    with pytest.raises(UnsupportedModelError, match=r"swiglu_limit = 5\.0; only 7\.0 is implemented"):
        load(path)
    with pytest.raises(ConfigError, match="quantized already, by mxfp4"):
        load(checkpoints[0], quantization="int8")


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_quantized_at_load(checkpoints: tuple[Path, Path], library: NativeLibrary, method: str) -> None:
    """The plain form in integers, by both kinds of kernels."""
    config = model_config_of(checkpoints[1], quantization=method)
    ours = quire_logits(load_model(config, LoadConfig(), native(library, torch.float32)), random_tokens(20))
    torch.testing.assert_close(
        ours, quire_logits(load(checkpoints[1], quantization=method), random_tokens(20)), rtol=2e-2, atol=5e-2
    )
    similarity = torch.cosine_similarity(ours, quire_logits(load(checkpoints[1]), random_tokens(20))).median()
    assert (0.98 if method == "int8" else 0.5) < similarity < 1.0 - 1e-7

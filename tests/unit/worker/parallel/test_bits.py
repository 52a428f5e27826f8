"""The promise of tensor parallelism: the logits of a request are the same to the last bit for every number of workers,
whatever the number of heads, of key/value heads and of tokens in the vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ConfigError, UnsupportedModelError
from quire.testing.tiny_models import FAMILIES
from quire.worker.kernels.library import NativeLibrary
from quire.worker.layers.moe import Experts
from tests.checkpoints import MakeCheckpoint

from ..quantization.test_checkpoints import CASES, SIZES
from ..quantization.writers import quantize_checkpoint
from .together import run_together

ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20, "vocab_size": 261, "intermediate_size": 72}
BY_TURNS = {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"}
QUICK: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "llama": ("llama", ODD, {}, (2, 3, 5)),
    "llama, float32": ("llama", ODD, {"dtype": "float32"}, (3,)),
    "llama, W8A8": ("llama", ODD, {"quantization": "int8"}, (2, 5)),
    "llama, 4 bits": ("llama", ODD, {"quantization": "int4"}, (2, 3)),
    "norms of all heads": ("olmo2", {}, {}, (3,)),
    "norms of heads": ("qwen3", ODD, {}, (2,)),
    "transposed, one key/value head": ("gpt_bigcode", {}, {}, (3,)),
    "latent attention and experts": ("deepseek_v3", {}, {}, (2,)),
    "columns of experts": ("qwen2_moe", {}, {"quantization": "int8"}, (2,)),
    "whole experts": ("mixtral", {}, {"enable_expert_parallel": True}, (2, 3)),
    "whole experts by turns": ("qwen3_moe", {}, {**BY_TURNS, "quantization": "int4"}, (3,)),
    "inputs of layers": ("gemma4_text", {}, {}, (2,)),
}
STAGED = ("llama", "llama, W8A8", "transposed, one key/value head", "latent attention and experts")
SHARED_KEYS = ("gemma4_text",)
"""Families with layers that read the keys of layers in another half: test_stages.py."""
TOO_FEW_HEADS = {"laguna": 3}
"""Families whose tiny checkpoint has fewer heads in some layer."""


def check_bits(
    path: Path,
    sizes: tuple[int, ...],
    library: NativeLibrary,
    *,
    stages: tuple[tuple[int, int], ...] = (),
    **flags: Any,
) -> None:
    """Compares engines of several workers with one worker. `stages` are pairs of sizes: stages, workers in each."""
    with pytest.MonkeyPatch.context() as patch:
        logits, tokens, _ = run_together(path, 1, library, patch, **flags)
        for size in sizes:
            found, found_tokens, workers = run_together(path, size, library, patch, **flags)
            assert torch.equal(found.view(torch.int32), logits.view(torch.int32)), size
            assert found_tokens == tokens
            tables: list[Any] = [worker.get_model().get_submodule("model.embed_tokens") for worker in workers]
            assert all(table.weight.shape[0] < logits.shape[-1] for table in tables)
        for count, size in stages:
            found, found_tokens, workers = run_together(path, size, library, patch, count, **flags)
            assert torch.equal(found.view(torch.int32), logits.view(torch.int32)), (count, size)
            assert found_tokens == tokens
            assert all(len(worker.runner.attention_layers) < worker._num_layers for worker in workers)


@pytest.mark.parametrize("case", QUICK)
def test_logits_do_not_depend_on_the_number_of_workers(
    case: str, tiny_checkpoint: MakeCheckpoint, library: NativeLibrary
) -> None:
    family, sizes, flags, workers = QUICK[case]
    stages = ((2, 1), (2, 2)) if case in STAGED else ()
    check_bits(tiny_checkpoint(family, **sizes), workers, library, stages=stages, **{"dtype": "bfloat16", **flags})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])
def test_nor_do_those_of_any_family(
    family: str, dtype: str, tiny_checkpoint: MakeCheckpoint, library: NativeLibrary
) -> None:
    sizes = tuple(size for size in (2, 3) if size < TOO_FEW_HEADS.get(family, 4))
    stages = () if family in SHARED_KEYS else ((2, 1), (2, 2))
    check_bits(tiny_checkpoint(family), sizes, library, stages=stages, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nor_do_those_of_quantized_checkpoints(
    case: str, tiny_checkpoint: MakeCheckpoint, tmp_path: Path, library: NativeLibrary
) -> None:
    stored, _ = quantize_checkpoint(tiny_checkpoint("llama", **SIZES), tmp_path, *CASES[case])
    check_bits(stored, (2, 3), library, stages=((2, 1), (2, 2)), dtype="bfloat16")


def test_random_weights_are_those_of_one_worker(tiny_checkpoint: MakeCheckpoint, library: NativeLibrary) -> None:
    check_bits(tiny_checkpoint("llama", **ODD), (3,), library, dtype="bfloat16", load_format="dummy")


def test_a_worker_holds_its_part_only(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, (whole,) = run_together(tiny_checkpoint("llama", **ODD), 1, library, monkeypatch)
    _, _, workers = run_together(tiny_checkpoint("llama", **ODD), 3, library, monkeypatch)

    def matrix_rows(worker: Any) -> int:
        return sum(p.shape[0] for p in worker.runner.model.parameters() if p.dim() == 2)

    assert sum(map(matrix_rows, workers)) == matrix_rows(whole)
    heads = [[layer.spec.num_kv_heads for layer in w.runner.attention_layers.values()] for w in workers]
    assert heads == [[1] * 3] * 3


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "float32"}])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe", "olmoe"])
def test_nor_where_workers_have_whole_experts(
    family: str, flags: dict[str, Any], tiny_checkpoint: MakeCheckpoint, library: NativeLibrary
) -> None:
    for more in ({"enable_expert_parallel": True}, BY_TURNS):
        check_bits(tiny_checkpoint(family), (2, 3), library, stages=((2, 2),), **{"dtype": "bfloat16", **flags, **more})


@pytest.mark.parametrize("flags", [{}, {"enable_expert_parallel": True}, BY_TURNS])
def test_a_worker_holds_its_part_of_the_experts(
    flags: dict[str, Any], tiny_checkpoint: MakeCheckpoint, library: NativeLibrary
) -> None:
    """Random weights are those of one worker, too."""
    with pytest.MonkeyPatch.context() as patch:
        flags = {"load_format": "dummy", "dtype": "bfloat16", **flags}
        expected, _, (whole,) = run_together(tiny_checkpoint("mixtral"), 1, library, patch, **flags)
        found, _, workers = run_together(tiny_checkpoint("mixtral"), 2, library, patch, **flags)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))

    def sizes(worker: Any) -> list[int]:
        return [
            matrix.numel()
            for module in worker.get_model().modules()
            if isinstance(module, Experts)
            for matrix in (module.gate_up_proj, module.down_proj)
        ]

    assert [sum(pair) for pair in zip(*map(sizes, workers), strict=True)] == sizes(whole)
    assert all(size for worker in workers for size in sizes(worker))


def test_experts_in_one_tensor_are_computed_by_all(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModelError, match="the experts of this model are stored in one tensor"):
        run_together(tiny_checkpoint("gpt_oss"), 2, library, monkeypatch, enable_expert_parallel=True)


def test_what_cannot_be_divided_is_refused(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModelError, match="OPTForCausalLM cannot be divided among workers"):
        run_together(tiny_checkpoint("opt"), 2, library, monkeypatch)
    with pytest.raises(ConfigError, match=r"the model has 4 attention heads, .* use 4 or less"):
        run_together(tiny_checkpoint("llama"), 5, library, monkeypatch)

"""Adapters on several workers: the logits of a request with an adapter, and of one beside it without, are those of one
worker to the last bit, whatever the number of workers and the order in which they read adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.adapter_targets import AdapterTarget
from quire.config.engine_args import EngineArgs
from quire.lora_request import LoRARequest
from quire.testing.tiny_models import FAMILIES
from quire.worker.kernels.library import NativeLibrary
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.loader.load import _build
from quire.worker.lora import sites
from quire.worker.lora.sites import make_sites
from quire.worker.worker import Worker
from tests.adapters import PREFIX, factors, write_adapter
from tests.checkpoints import MakeCheckpoint

from .test_bits import BY_TURNS, ODD, SHARED_KEYS, TOO_FEW_HEADS
from .together import run_together

RANKS = {"k_proj": 40, "v_proj": 3}
QUICK: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...], tuple[tuple[int, int], ...]]] = {
    "heads of 20": ("llama", ODD, {}, (2, 3), ((2, 1), (2, 2))),
    "float32": ("llama", ODD, {"dtype": "float32"}, (3,), ((2, 1),)),
    "one table, 4 bits": ("llama", {**ODD, "tie_word_embeddings": True}, {"quantization": "int4"}, (2,), ((2, 1),)),
    "columns of experts": ("mixtral", {}, {}, (3,), ((2, 2),)),
    "whole experts": ("qwen3_moe", {}, BY_TURNS, (2,), ()),
}


def targets_of(path: Path) -> dict[str, AdapterTarget]:
    """Returns the matrices of a model that adapters may change, one by one."""
    hf = EngineArgs(str(path), device="cpu").create_engine_config().model_config.hf_config
    targets = make_sites(_build(hf, None, None), TORCH_KERNELS, torch.float32, pools=False).targets.targets
    return {name.removesuffix(".weight"): target for name, target in targets.items() if target.kind != "experts"}


def write_whole_adapter(path: Path, targets: dict[str, AdapterTarget], rank: int, seed: int) -> LoRARequest:
    """Writes an adapter that changes all matrices."""
    content: dict[str, np.ndarray] = {}
    for module, target in targets.items():
        own_rank = RANKS.get(module.rpartition(".")[2], rank)
        made = factors(module, (target.in_features, target.out_features), own_rank, seed, 0.1)
        if target.kind == "embedding":
            a, b = made.values()
            made = {f"{PREFIX}{module}.lora_embedding_{end}": m for end, m in (("A", a), ("B", b))}
        content |= made
    write_adapter(path, content, r=rank, lora_alpha=rank, rank_pattern=RANKS, alpha_pattern=RANKS)
    return LoRARequest(path.name, seed, str(path))


def run_with_adapters(
    path: Path,
    directory: Path,
    library: NativeLibrary,
    sizes: tuple[int, ...],
    stages: tuple[tuple[int, int], ...],
    *,
    is_small: bool = False,
    **flags: Any,
) -> list[Worker]:
    """Compares engines of several workers with one worker. Returns the workers of the last engine. With `is_small` the
    matrices are so small that padding may take more memory than is saved."""
    targets, flags = targets_of(path), {"dtype": "bfloat16", **flags}
    adapters = [write_whole_adapter(directory / f"{rank}", targets, rank, i) for i, rank in enumerate((5, 36), start=1)]
    with pytest.MonkeyPatch.context() as patch:
        base, _, _ = run_together(path, 1, library, patch, **flags)
        expected, tokens, (alone,) = run_together(path, 1, library, patch, adapters=adapters, **flags)
        changed = (expected[0] != base[0]).any(dim=1)
        assert changed.tolist() == [False, True, True], "the first request has no adapter"
        for count, size in [*((1, size) for size in sizes), *stages]:
            found, found_tokens, workers = run_together(path, size, library, patch, count, adapters=adapters, **flags)
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (count, size)
            assert found_tokens == tokens
            assert is_small or all(memory_of(worker) < memory_of(alone) for worker in workers), "each has its part"
    return workers


def memory_of(worker: Worker) -> int:
    """Bytes of the packed adapters."""
    assert worker._adapters is not None
    return sum(adapter.info.num_bytes for _, adapter in worker._adapters._installed.values())


@pytest.mark.parametrize("case", QUICK)
def test_logits_with_adapters_do_not_depend_on_the_number_of_workers(
    case: str, tiny_checkpoint: MakeCheckpoint, tmp_path: Path, library: NativeLibrary
) -> None:
    family, changes, flags, sizes, stages = QUICK[case]
    run_with_adapters(tiny_checkpoint(family, **changes), tmp_path, library, sizes, stages, **flags)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])
def test_nor_do_those_of_any_family(
    family: str,
    dtype: str,
    tiny_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sites, "NamedWeights", ())  # adapters have the model's own names
    sizes = tuple(size for size in (2, 3) if size < TOO_FEW_HEADS.get(family, 4))
    stages = () if family in SHARED_KEYS else ((2, 1), (2, 2))
    run_with_adapters(tiny_checkpoint(family), tmp_path, library, sizes, stages, is_small=True, dtype=dtype)


def test_a_worker_reads_what_is_another_s_and_keeps_its_own_layers(
    tiny_checkpoint: MakeCheckpoint, tmp_path: Path, library: NativeLibrary
) -> None:
    """All workers have the same digest."""
    first, second = run_with_adapters(tiny_checkpoint("llama"), tmp_path, library, (), ((2, 1),))
    loaded = []
    for worker in (first, second):
        assert worker._adapters is not None
        (_, adapter), _ = worker._adapters._installed.values()
        loaded.append(adapter)
    assert loaded[0].info.digest == loaded[1].info.digest
    assert not set(loaded[0].packed) & set(loaded[1].packed)
    assert {"model.embed_tokens", "model.layers.0.mlp.down_proj"} <= set(loaded[0].packed)
    assert {"lm_head", "model.layers.2.mlp.down_proj"} <= set(loaded[1].packed)

"""Loading: every tensor lands in its place; a wrong checkpoint is refused in one line before memory is taken."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.config.checkpoint import TensorInfo
from quire.errors import ModelLoadError
from quire.testing.tiny_models import FAMILIES
from quire.worker.layers.weights import checkpoint_tensors
from quire.worker.loader import load as load_module

from ..models.oracle import load, quire_logits

Make = Callable[..., Path]
TOKENS = [7, 100, 30, 200, 9]
QKV = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def llama(tiny_checkpoint: Make, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may spoil."""
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "llama"))


def edit_weights(path: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def split_into_shards(path: Path, num_shards: int = 3) -> None:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {name: f"shard-{i % num_shards}.safetensors" for i, name in enumerate(tensors)}
    for file_name in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file_name}, path / file_name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refusal(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message `load` must fail with: one line, in under a second of a processor, before memory is taken."""

    def allocate(*_: object) -> None:
        raise AssertionError("memory was taken for a checkpoint that is wrong")

    monkeypatch.setattr(load_module, "allocate", allocate)
    start = time.thread_time()
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    assert time.thread_time() - start < 1.0
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_tensor_lands_in_its_place(tiny_checkpoint: Make) -> None:
    path = tiny_checkpoint("llama")
    model = load(path)
    stored = load_file(path / "model.safetensors")
    found = checkpoint_tensors(model)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
    assert not model.training
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())


def test_shards_give_the_same_model(llama: Path) -> None:
    expected = quire_logits(load(llama), TOKENS)
    split_into_shards(llama)
    assert torch.equal(quire_logits(load(llama), TOKENS), expected)


def test_each_tensor_is_read_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split_into_shards(llama)
    read: list[str] = []

    class CountingFile(load_module.MappedFile):
        def read(self, info: TensorInfo) -> Tensor:
            read.append(info.name)
            return super().read(info)

    monkeypatch.setattr(load_module, "MappedFile", CountingFile)
    wanted = checkpoint_tensors(load(llama))
    assert sorted(read) == sorted(wanted)


def test_a_missing_shard_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split_into_shards(llama)
    (llama / "shard-1.safetensors").unlink()
    assert "shard-1.safetensors is missing" in refusal(llama, monkeypatch)


def test_a_truncated_shard_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split_into_shards(llama)
    shard = llama / "shard-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    message = refusal(llama, monkeypatch)
    assert f"{shard} is truncated: tensor " in message


def test_a_wrong_shape_is_explained(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_weights(llama, lambda t: t.update({QKV: torch.zeros(24, 47)}))
    expected = f"{llama / 'model.safetensors'}: tensor {QKV} has shape [24, 47], but config.json makes it [24, 48]"
    assert refusal(llama, monkeypatch) == expected


def test_config_of_another_size(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(llama, intermediate_size=96)
    assert "has shape [80, 48], but config.json makes it [96, 48]" in refusal(llama, monkeypatch)


def test_a_missing_tensor_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_weights(llama, lambda t: t.pop(QKV))
    assert refusal(llama, monkeypatch) == (f"{llama / 'model.safetensors'} has no tensor {QKV}, which the model needs")


def test_more_layers_than_stored(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(llama, num_hidden_layers=5)
    message = refusal(llama, monkeypatch)
    assert "has no tensor model.layers.3." in message
    assert "(and 17 more)" in message


def test_an_unexpected_tensor_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_weights(llama, lambda t: t.update({"model.layers.0.self_attn.k_proj.bias": torch.zeros(24)}))
    assert "holds tensor model.layers.0.self_attn.k_proj.bias" in refusal(llama, monkeypatch)


def test_plain_weights_in_integers_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_weights(llama, lambda t: t.update({QKV: torch.zeros(24, 48, dtype=torch.int8)}))
    assert f"tensor {QKV} is I8" in refusal(llama, monkeypatch)


def test_an_unknown_quantization_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(llama, quantization_config={"quant_method": "bitsandbytes"})
    assert "config.json has a quantization_config of method 'bitsandbytes'" in refusal(llama, monkeypatch)


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        (
            ["LlamaForCausalLm"],
            "'LlamaForCausalLm' of config.json is not implemented; similar ones are LlamaForCausalLM",
        ),
        (["Zzz"], "known are AfmoeForCausalLM, ApertusForCausalLM, "),
        ([], "does not name an architecture"),
    ],
)
def test_an_unknown_architecture_is_refused(
    architectures: list[str], message: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(llama, architectures=architectures)
    assert message in refusal(llama, monkeypatch)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "swish9"}, "activation 'swish9'"),
        ("llama", {"rope_parameters": {"rope_type": "spiral"}}, "type 'spiral'"),
        ("qwen2", {"layer_types": ["linear_attention"] * 4}, "layer of type 'linear_attention'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "which must be a list of 4"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers [1], which must be a list of 4"),
        ("granite", {"logits_scaling": "much"}, "config.json does not describe a GraniteForCausalLM: ValueError"),
    ],
)
def test_configs_that_cannot_be_served(
    family: str,
    changes: dict[str, Any],
    message: str,
    tiny_checkpoint: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = Path(shutil.copytree(tiny_checkpoint(family), tmp_path / family))
    edit_config(path, **changes)
    assert message in refusal(path, monkeypatch)


def test_harmless_extras_are_ignored(llama: Path) -> None:
    expected = quire_logits(load(llama), TOKENS)
    edit_weights(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}))
    assert torch.equal(quire_logits(load(llama), TOKENS), expected)


def test_a_stored_copy_of_a_tied_head_is_ignored(tiny_checkpoint: Make, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("qwen2"), tmp_path / "qwen2"))
    expected = quire_logits(load(path), TOKENS)
    edit_weights(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(quire_logits(load(path), TOKENS), expected)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_exports_without_the_leading_model(family: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    """Checkpoints of the bare decoder leave out "model."."""
    path = Path(shutil.copytree(tiny_checkpoint(family), tmp_path / family))
    expected = quire_logits(load(path), TOKENS)
    tensors = load_file(path / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, path / "model.safetensors")
    assert torch.equal(quire_logits(load(path), TOKENS), expected)


def test_converts_the_type(llama: Path) -> None:
    edit_weights(llama, lambda t: t.update({n: v.half() for n, v in t.items()}))
    stored = load_file(llama / "model.safetensors")
    model = load(llama, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(t, stored[n].bfloat16()) for n, t in checkpoint_tensors(model).items())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_are_not_finite_are_refused(name: str, value: float, dtype: torch.dtype, llama: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    edit_weights(llama, spoil)
    with pytest.raises(ModelLoadError, match=re.escape(f"model.safetensors: tensor {name} holds NaN or infinity")):
        load(llama, dtype=dtype)


def test_weights_that_are_too_large_for_the_type_are_refused(llama: Path) -> None:
    edit_weights(llama, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    load(llama, dtype=torch.bfloat16)
    with pytest.raises(ModelLoadError, match=r"holds NaN or infinity as float16.*another --dtype"):
        load(llama, dtype=torch.float16)


def test_logs_one_line(llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="quire.worker.loader"):
        load(llama)
    assert len(set(map(id, caplog.records))) == 1  # one record, which some versions of pytest catch at two loggers
    assert caplog.messages[0].startswith(f"Loaded LlamaForCausalLM from {llama}: 0.00 GiB of float32 in 0.")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.data.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dummy_weights_follow_the_seed_and_never_overflow(
    family: str, dtype: torch.dtype, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    """Random weights need no weight files, follow the seed, and never overflow."""
    shutil.copy(tiny_checkpoint(family) / "config.json", tmp_path)
    model = load(tmp_path, load_format="dummy", dtype=dtype)
    logits = quire_logits(model, TOKENS)
    assert logits.isfinite().all()
    assert logits.std() > 0
    same, other = (weights_of(load(tmp_path, load_format="dummy", dtype=dtype, seed=s)) for s in (0, 1))
    assert all(torch.equal(w, same[n]) for n, w in weights_of(model).items())
    assert any(not torch.equal(w, same[n]) for n, w in other.items())


TRANSPOSED = ("aria_text", "gpt2", "gpt_oss", "llama4_text")


@pytest.mark.parametrize(
    "family", [f if f in TRANSPOSED else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_every_family_loads_random_weights(tiny_checkpoint: Make, family: str) -> None:
    parameters = load(tiny_checkpoint(family), load_format="dummy").parameters()
    assert all(p.isfinite().all() and p.any() for p in parameters)

"""`quire convert-gguf`: a checkpoint written as GGUF and converted back is the model it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from quire.cli.gguf_checkpoint import convert, make_config, part_halves, to_bfloat16
from quire.cli.main import main
from quire.config.checkpoint import CheckpointIndex
from quire.config.model import resolve_model_dir
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.testing.tiny_models import make_tiny_checkpoint

gguf = pytest.importorskip("gguf")

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 96}
F32, F16, Q8_0, Q4_0 = "F32", "F16", "Q8_0", "Q4_0"


def gguf_name(name: str) -> str:
    base, kind = name.rsplit(".", 1)
    if not base.startswith("model.layers."):
        return f"{NAMES[base]}.{kind}"
    _, _, layer, module = base.split(".", 3)
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def write_gguf(
    source: Path, target: Path, kind: str, quantization: str, **more: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Write checkpoint `source` as GGUF; what each tensor holds after quantization, by its name in the checkpoint."""
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(str(target), kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(more.get("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    held = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(source / "model.safetensors").items():
        rows, module = tensor.float().numpy(), name.split(".")[-2]
        if kind == "llama" and module in heads:  # rotary pairs become neighbours
            rows = rows.reshape(heads[module], 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        wanted = gguf.GGMLQuantizationType[quantization if rows.ndim == 2 else F32]
        stored = gguf.quantize(rows, wanted)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=wanted)
        back = gguf.dequantize(stored, wanted).astype(np.float32)
        held[name] = part_halves(back, heads[module]) if kind == "llama" and module in heads else back
    for name, tensor in more.get("tensors", {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("gguf")
    return {family: make_tiny_checkpoint(root / family, family, head_dim=16, **SIZES) for family in ("llama", "qwen3")}


@pytest.mark.parametrize(("family", "quantization"), [("llama", F32), ("llama", Q8_0), ("qwen3", Q4_0), ("qwen3", F16)])
def test_the_model_is_what_it_was(
    checkpoints: Mapping[str, Path], tmp_path: Path, family: str, quantization: str, capsys: Any
) -> None:
    source = checkpoints[family]
    held = write_gguf(source, tmp_path / "model.gguf", family, quantization)
    assert main(["convert-gguf", str(tmp_path / "model.gguf"), str(tmp_path / "out")]) == 0
    assert "holds the model of" in capsys.readouterr().out
    index = CheckpointIndex.from_dir(tmp_path / "out")
    assert index.tensors.keys() == held.keys()
    for file in {tensor.file for tensor in index.tensors.values()}:
        for name, tensor in load_file(file).items():
            expected = torch.from_numpy(held[name])
            assert torch.equal(tensor, expected if quantization == F32 else expected.bfloat16()), name
    ours, theirs = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "out", source))
    for key in ("architectures", "vocab_size", *SIZES, "num_hidden_layers", "head_dim", "num_key_value_heads"):
        assert ours[key] == theirs[key], key
    assert ours["eos_token_id"] == 1


def test_the_tokenizer_is_what_it_was(checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    source = checkpoints["llama"]
    write_gguf(source, tmp_path / "model.gguf", "llama", Q8_0)
    assert convert(tmp_path / "model.gguf", tmp_path / "out") == []
    ours, theirs = (Tokenizer.from_file(str(p / "tokenizer.json")) for p in (tmp_path / "out", source))
    text = "<|user|>The engine keeps  the keys, don't you?\n\n 1234 — ünï<|end|>"
    assert ours.encode(text).ids == theirs.encode(text).ids
    assert ours.decode(theirs.encode(text).ids) == theirs.decode(theirs.encode(text).ids)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert settings["eos_token"] == "<|end|>"


def test_a_tokenizer_that_cannot_be_converted(checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    write_gguf(checkpoints["llama"], tmp_path / "model.gguf", "llama", F16, pre="tekken")
    notes = convert(tmp_path / "model.gguf", tmp_path / "out")
    assert "a tokenizer of kind 'gpt2', 'tekken'" in notes[0]
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_llama_3s_rotary_factors(checkpoints: Mapping[str, Path]) -> None:
    base = {
        "general.architecture": "llama", "llama.attention.head_count": 32, "llama.embedding_length": 2048,
        "llama.feed_forward_length": 8192, "llama.block_count": 16, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 131072, "llama.rope.freq_base": 500000.0,
    }  # fmt: skip
    factors = np.ones(32, dtype=np.float32)
    factors[18:] = 32.0
    with pytest.raises(UnsupportedModelError, match="not those of Llama 3"):
        make_config(base, set(), factors)
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(32) / 32)
    smooth = (8192 / wavelengths - 1) / 3
    blended = np.where(wavelengths > 8192, 32.0, 1 / ((1 - smooth) / 32 + smooth))
    config = make_config(base, set(), np.where(wavelengths < 2048, 1.0, blended).astype(np.float32))
    assert config["rope_scaling"]["factor"] == 32.0
    assert config["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("kind", "tensors", "message"),
    [
        ("mamba", {}, "architecture 'mamba'; those that can be converted: llama, qwen2, qwen3"),
        ("llama", {"blk.0.ffn_gate_exps.weight": np.ones((2, 32), np.float32)}, "a mixture of experts"),
        (
            "llama",
            {"blk.0.strange.weight": np.ones((2, 32), np.float32)},
            "tensor blk.0.strange.weight has no counterpart",
        ),
        ("llama", {"rope_freqs.weight": np.full(8, 3.0, np.float32)}, "not those of Llama 3"),
    ],
)
def test_what_cannot_be_converted(
    checkpoints: Mapping[str, Path], tmp_path: Path, kind: str, tensors: Any, message: str
) -> None:
    write_gguf(checkpoints["llama"], tmp_path / "model.gguf", kind, F16, tensors=tensors)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        convert(tmp_path / "model.gguf", tmp_path / "out")
    assert "model.gguf: " in str(caught.value)


def test_a_damaged_file_is_named(checkpoints: Mapping[str, Path], tmp_path: Path, capsys: Any) -> None:
    write_gguf(checkpoints["llama"], tmp_path / "model.gguf", "llama", F16)
    whole = (tmp_path / "model.gguf").read_bytes()
    for number, content in enumerate((b"", b"GGUF", b"no file of this kind", whole[:200], whole[:2000], whole[:-5000])):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=f"{number}.gguf"):
            convert(path, tmp_path / f"out{number}")
    assert main(["convert-gguf", str(tmp_path / "absent.gguf"), str(tmp_path / "out")]) == 2
    assert main(["convert-gguf", str(tmp_path / "model.gguf")]) == 2
    assert main(["convert-gguf", str(tmp_path / "model.gguf"), str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "absent.gguf is not a file" in errors
    assert "takes FILE.gguf and DIRECTORY" in errors
    assert "is not an empty directory" in errors


def test_a_gguf_file_as_model_is_told_the_way(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"quire convert-gguf .*a\.gguf DIRECTORY"):
        resolve_model_dir(str(tmp_path / "a.gguf"))


def test_rounding_to_bfloat16() -> None:
    wide = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    wide = torch.cat([wide, torch.tensor([torch.inf, -torch.inf, 0.0, 1.00390625, 1.01171875])])
    bits = torch.from_numpy(to_bfloat16(wide.numpy()).view(np.int16))
    assert torch.equal(bits.view(torch.bfloat16), wide.bfloat16())

"""The benchmark checkpoints in llama.cpp's format: bfloat16 matrices, float32 vectors. Run by llama.cpp's interpreter.

to_gguf.py MODELS_FOLDER GGUF_FOLDER [tiny half oneb]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2"}
PRE_TOKENIZERS = {"llama": "gpt-2", "qwen2": "qwen2"}
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_bf16(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (name, bits as uint16) of every tensor of a safetensors file that holds nothing but bfloat16."""
    header_size = int.from_bytes(path.open("rb").read(8), "little")
    with path.open("rb") as file:
        header = json.loads(file.read(8 + header_size)[8:])
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + header_size)
    for name, entry in header.items():
        if name != "__metadata__":
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}, not BF16")
            begin, end = entry["data_offsets"]
            yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    """Returns blk.3.ffn_up.weight for model.layers.3.mlp.up_proj.weight."""
    base, kind = name.rsplit(".", 1)
    if not base.startswith("model.layers."):
        return f"{TENSORS[base]}.{kind}"
    _, _, layer, module = base.split(".", 3)
    return f"blk.{layer}.{TENSORS[module]}.{kind}"


def interleave_halves(weight: Any, num_heads: int) -> Any:
    """Moves rotary pairs (i, i + half) to neighbours (2i, 2i + 1), the order in which llama.cpp rotates Llama."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def convert(source: Path, target: Path) -> None:
    """Converts one checkpoint."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(target), ARCHITECTURES[config["model_type"]])
    _write_shape(writer, source.name, config)
    _write_tokenizer(writer, json.loads((source / "tokenizer.json").read_text(encoding="utf-8")), config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, bits in read_bf16(source / "model.safetensors"):
        module = name.split(".")[-2]
        if config["model_type"] == "llama" and module in heads:
            bits = interleave_halves(bits, heads[module])
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            rows = np.ascontiguousarray(bits).view(np.uint8).reshape(bits.shape[0], -1)
            writer.add_tensor(gguf_name(name), rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, name: str, config: dict[str, Any]) -> None:
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _write_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts.update(special)
    ids = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS[config["model_type"]])
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in ids])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def main(argv: list[str]) -> int:
    """Converts the checkpoints named, unless they exist."""
    source, target, *names = argv
    Path(target).mkdir(parents=True, exist_ok=True)
    for name in names or ["tiny", "half", "oneb"]:
        path = Path(target) / f"{name}.gguf"
        if not path.exists():
            convert(Path(source) / name, path)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

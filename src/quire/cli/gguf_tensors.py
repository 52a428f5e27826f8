"""Tensors of a GGUF file under the names and in the order Hugging Face checkpoints have them.

Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized tensor names". In files of architecture
"llama" the rows of queries and keys stand in rotary pairs (2 i, 2 i + 1) instead of (i, i + half).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import UnsupportedModelError

Array = np.ndarray[Any, np.dtype[Any]]

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"


def checkpoint_name(name: str) -> str:
    """blk.3.ffn_up.weight -> model.layers.3.mlp.up_proj.weight. Raises UnsupportedModelError."""
    base, _, kind = name.rpartition(".")
    if base in _OUTER:
        return f"{_OUTER[base]}.{kind}"
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _INNER:
        raise UnsupportedModelError(f"tensor {name} has no counterpart in the architectures that can be converted")
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"


def part_halves(rows: Array, num_heads: int) -> Array:
    """Rotary pairs that are neighbours become (i, i + half). rows: [num_heads * head_size, ...]."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def tensors_of(reader: Any, config: Mapping[str, Any], has_pairs: bool) -> Iterator[tuple[str, Array]]:
    """Every tensor of the file by its new name, float32, one at a time."""
    import gguf  # the gguf extra

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name = checkpoint_name(tensor.name)
        wide = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        wide = wide.reshape([int(n) for n in reversed(tensor.shape)])
        module = name.split(".")[-2]
        yield name, part_halves(wide, heads[module]) if has_pairs and module in heads else wide


def to_bfloat16(wide: Array) -> Array:
    """float32 to the bits of bfloat16, rounded to the nearest even."""
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def write_safetensors(path: Path, tensors: Mapping[str, Array], *, is_bfloat16: bool) -> None:
    """One file of float32 arrays, stored as they are or as bfloat16 (format: config/checkpoint.py)."""
    stored = {name: to_bfloat16(a) if is_bfloat16 else np.ascontiguousarray(a) for name, a in tensors.items()}
    header, position = {}, 0
    for name, array in stored.items():
        end = position + array.nbytes
        kind = "BF16" if is_bfloat16 else "F32"
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in stored.values():
            file.write(array.tobytes())

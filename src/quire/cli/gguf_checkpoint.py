"""Writes a GGUF file, llama.cpp's format, as a checkpoint directory.

Keys and tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. In files of architecture "llama" the
rows of queries and keys stand in rotary pairs (2 i, 2 i + 1) instead of (i, i + half).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError

PAIRED = frozenset({"llama"})
"""Architectures whose queries and keys stand in rotary pairs."""


def convert(source: Path, target: Path) -> list[str]:
    """Writes `target`, which must not exist yet or be empty. Returns notes for the user.

    Raises ConfigError, ModelLoadError, or UnsupportedModelError naming what cannot be converted.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty directory; name another")
    reader = _open(source)
    try:
        metadata: Metadata = {name: field.contents() for name, field in reader.fields.items()}
        by_name = {tensor.name: tensor for tensor in reader.tensors}
        factors: Array | None = by_name[ROPE_FACTORS].data if ROPE_FACTORS in by_name else None
        config = make_config(metadata, set(by_name), factors)
        is_bfloat16 = by_name["token_embd.weight"].tensor_type.name != "F32"
        config["torch_dtype"] = "bfloat16" if is_bfloat16 else "float32"
        target.mkdir(parents=True, exist_ok=True)
        has_pairs = metadata["general.architecture"] in PAIRED
        _write_weights(tensors_of(reader, config, has_pairs), target, is_bfloat16=is_bfloat16)
        _write(target / "config.json", config)
        return _write_tokenizer(metadata, target)
    except UnsupportedModelError as e:
        raise UnsupportedModelError(f"{source}: {e}") from None
    except ModelLoadError as e:
        raise ModelLoadError(f"{source}: {e}") from None
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as e:  # a damaged file can raise any of them
        raise ModelLoadError(f"{source} is damaged: {type(e).__name__}: {e}") from None


def _open(source: Path) -> Any:
    try:
        import gguf  # an extra
    except ImportError:
        raise ConfigError("reading GGUF files needs the gguf package: pip install 'quire[gguf]'") from None
    if not source.is_file():
        raise ModelLoadError(f"{source} is not a file")
    try:
        return gguf.GGUFReader(source)
    except Exception as e:  # its own checks raise ValueError, damaged lengths anything
        raise ModelLoadError(f"{source} is not a GGUF file that can be read: {type(e).__name__}: {e}") from None


def _write_weights(tensors: Any, target: Path, *, is_bfloat16: bool) -> None:
    """Writes a file per layer, so that no more than one is in memory."""

    def layer_of(item: tuple[str, Array]) -> str:
        parts = item[0].split(".")
        return parts[2] if parts[1] == "layers" else "outer"

    weight_map: dict[str, str] = {}
    for number, (_, group) in enumerate(itertools.groupby(tensors, layer_of)):
        name, held = f"model-{number:05d}.safetensors", dict(group)
        write_safetensors(target / name, held, is_bfloat16=is_bfloat16)
        weight_map |= dict.fromkeys(held, name)
    _write(target / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_tokenizer(metadata: Metadata, target: Path) -> list[str]:
    _write(target / "tokenizer_config.json", make_tokenizer_config(metadata))
    try:
        _write(target / "tokenizer.json", make_tokenizer(metadata))
    except UnsupportedModelError as e:
        return [f"without a tokenizer: the file has {e}", "put the model's tokenizer.json there, or give --tokenizer"]
    return []


def _write(path: Path, value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=None if path.stem == "tokenizer" else 2)
    path.write_text(text, encoding="utf-8")


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
    """Returns model.layers.3.mlp.up_proj.weight for blk.3.ffn_up.weight. Raises UnsupportedModelError."""
    base, _, kind = name.rpartition(".")
    if base in _OUTER:
        return f"{_OUTER[base]}.{kind}"
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _INNER:
        raise UnsupportedModelError(f"tensor {name} has no counterpart in the architectures that can be converted")
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"


def part_halves(rows: Array, num_heads: int) -> Array:
    """Moves rotary pairs from neighbouring rows to (i, i + half). rows: [num_heads * head_size, ...]."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def tensors_of(reader: Any, config: Mapping[str, Any], has_pairs: bool) -> Iterator[tuple[str, Array]]:
    """Yields every tensor of the file by its new name, float32, one at a time."""
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
    """Returns the bits of float32 values as bfloat16, rounded to the nearest even."""
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def write_safetensors(path: Path, tensors: Mapping[str, Array], *, is_bfloat16: bool) -> None:
    """Writes one file of float32 arrays, as they are or as bfloat16 (format: config/checkpoint.py)."""
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


Metadata = Mapping[str, Any]

ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""Maps general.architecture to architecture and model_type of config.json."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: Mapping[str, str | None] = {
    "llama-bpe": _CONTRACTIONS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"|\p{N}" + _REST,
    "gpt-2": None,
    "default": None,
}
"""Maps tokenizer.ggml.pre to the pattern that splits text before merging; None for GPT-2's."""
_LLAMA3_FACTORS = (8.0, 32.0)
_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens that are not split in text."""


def make_config(metadata: Metadata, names: set[str], rope_factors: Array | None) -> dict[str, Any]:
    """Returns config.json. `names` are those of the file's tensors. Raises UnsupportedModelError or ModelLoadError."""
    kind = str(metadata.get("general.architecture"))
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(f"architecture {kind!r}; those that can be converted: {', '.join(ARCHITECTURES)}")
    if any("_exps." in name for name in names):
        raise UnsupportedModelError("a mixture of experts, which cannot be converted yet")
    architecture, model_type = ARCHITECTURES[kind]

    def need(key: str) -> Any:
        if f"{kind}.{key}" not in metadata:
            raise ModelLoadError(f"its metadata has no {kind}.{key}")
        return metadata[f"{kind}.{key}"]

    heads, tokens = int(need("attention.head_count")), metadata.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": int(metadata.get(f"{kind}.vocab_size", len(tokens))),
        "hidden_size": int(need("embedding_length")),
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get(f"{kind}.attention.head_count_kv", heads)),
        "head_dim": int(metadata.get(f"{kind}.attention.key_length", int(need("embedding_length")) // heads)),
        "rms_norm_eps": float(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(metadata.get(f"{kind}.rope.freq_base", 10000.0)),
        "max_position_embeddings": int(need("context_length")),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in names,
        "use_sliding_window": False,
    }
    for ours, theirs in {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id"}.items():
        if f"tokenizer.ggml.{theirs}" in metadata:
            config[ours] = int(metadata[f"tokenizer.ggml.{theirs}"])
    scaling = _rope_scaling(metadata, kind, need, rope_factors, config)
    return config if scaling is None else config | {"rope_scaling": scaling}


def _rope_scaling(
    metadata: Metadata, kind: str, need: Callable[[str], Any], factors: Array | None, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(factors, config)
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "none":
        return None
    if scaling not in ("linear", "yarn"):
        raise UnsupportedModelError(f"rotary embeddings scaled by {scaling!r}; none, linear and yarn can be converted")
    found: dict[str, Any] = {"rope_type": scaling, "factor": float(need("rope.scaling.factor"))}
    if scaling == "yarn":
        found["original_max_position_embeddings"] = int(need("rope.scaling.original_context_length"))
    return found


def _llama3_scaling(factors: Array, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Llama 3.1's scaling, of which files hold only the result.

    Raises UnsupportedModelError for another one.
    """
    half = config["head_dim"] // 2
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(half) / half)
    for factor in _LLAMA3_FACTORS:
        smooth = (8192 / wavelengths - 1.0) / 3.0
        expected = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(wavelengths < 8192 / 4, 1.0, np.where(wavelengths > 8192, factor, expected))
        if factors.shape == (half,) and np.allclose(factors, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    raise UnsupportedModelError("rope_freqs.weight, the factors of its rotary embeddings, are not those of Llama 3")


def make_tokenizer(metadata: Metadata) -> dict[str, Any]:
    """Returns tokenizer.json of a byte-level BPE. Raises UnsupportedModelError for another kind."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"a tokenizer of kind {kind!r}, {pre!r}; those that can be converted: gpt2 with {', '.join(PRE_TOKENIZERS)}"
        )
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    added = [
        {"id": i, "content": tokens[i], "special": int(kind) == _CONTROL, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for i, kind in enumerate(kinds)
        if int(kind) in (_CONTROL, _USER_DEFINED)
    ]
    pattern, bytes_only = PRE_TOKENIZERS[pre], {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    parts = {"type": "Sequence", "pretokenizers": [split, bytes_only | {"use_regex": False}]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": parts if pattern else bytes_only | {"use_regex": True},
        "post_processor": _post_processor(metadata, tokens),
        "decoder": bytes_only | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", [])],
            "ignore_merges": pre == "llama-bpe",
        },
    }


def _post_processor(metadata: Metadata, tokens: list[str]) -> dict[str, Any] | None:
    """Returns the post-processor that puts the first token before every text, if the file asks for it."""
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return None
    first = tokens[int(metadata["tokenizer.ggml.bos_token_id"])]
    special, text = {"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    pair = [special, text, {"Sequence": {"id": "B", "type_id": 1}}]
    ids = [int(metadata["tokenizer.ggml.bos_token_id"])]
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": pair,
        "special_tokens": {first: {"id": first, "ids": ids, "tokens": [first]}},
    }


def make_tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Returns tokenizer_config.json: the special tokens by name, and the chat template."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and int(token_id) < len(tokens):
            found[f"{name}_token"] = tokens[int(token_id)]
    if "tokenizer.chat_template" in metadata:
        found["chat_template"] = metadata["tokenizer.chat_template"]
    return found

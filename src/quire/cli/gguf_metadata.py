"""What a GGUF file's metadata says about its model, as config.json and tokenizer.json say it.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from quire.cli.gguf_tensors import Array
from quire.errors import ModelLoadError, UnsupportedModelError

Metadata = Mapping[str, Any]

ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""general.architecture -> architecture and model_type of config.json."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: Mapping[str, str | None] = {
    "llama-bpe": _CONTRACTIONS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"|\p{N}" + _REST,
    "gpt-2": None,
    "default": None,
}
"""tokenizer.ggml.pre -> how text is split before merging; None for GPT-2's own way."""
_LLAMA3_FACTORS = (8.0, 32.0)
_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens that stand for themselves in text."""


def make_config(metadata: Metadata, names: set[str], rope_factors: Array | None) -> dict[str, Any]:
    """config.json. `names` are those of the file's tensors. Raises UnsupportedModelError or ModelLoadError."""
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
    """Llama 3.1's scaling, of which files hold the outcome only. Raises UnsupportedModelError if it is another."""
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
    """tokenizer.json of a byte-level BPE. Raises UnsupportedModelError for another kind."""
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
    """Puts the first token of every text before it, if the file asks for it."""
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
    """tokenizer_config.json: the special tokens by name, and the chat template."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and int(token_id) < len(tokens):
            found[f"{name}_token"] = tokens[int(token_id)]
    if "tokenizer.chat_template" in metadata:
        found["chat_template"] = metadata["tokenizer.chat_template"]
    return found

"""A small model of the same architecture: every switch of a config stays, and every size becomes small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = 4
WINDOW = 16
VOCAB_SIZE = 256
HEADS, HEAD_SIZE = 4, 16
HIDDEN_SIZE = HEADS * HEAD_SIZE

SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "embedding_size", "dim"), HIDDEN_SIZE),
    **dict.fromkeys(("width", "attention_hidden_size", "word_embed_proj_dim", "emb_dim"), HIDDEN_SIZE),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "dim_ff", "n_inner", "d_ff"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "feed_forward_size", "mlp_hidden_size", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "prefix_dense_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("swa_num_attention_heads",), HEADS),
    **dict.fromkeys(
        ("head_dim", "kv_channels", "global_head_dim", "attention_head_dim", "d_kv", "swa_head_dim"), HEAD_SIZE
    ),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "dim_head", "index_head_dim", "swa_v_head_dim"), HEAD_SIZE),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), HEAD_SIZE // 2),
    "qk_head_dim": HEAD_SIZE * 3 // 2,
    **dict.fromkeys(("q_lora_rank", "o_lora_rank"), 32),
    "kv_lora_rank": 24,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), HEAD_SIZE),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    **dict.fromkeys(
        ("sliding_window", "attention_chunk_size", "window_size", "local_attention", "swa_window_size"), WINDOW
    ),
    "sliding_window_size": WINDOW,
    "max_window_layers": 1,
    "floor_scale": WINDOW,
    "original_max_position_embeddings": 2 * WINDOW,
}
"""Small sizes, by the names that families give them. A size that is smaller already stays."""
LIMITED = (
    "first_k_dense_replace",
    "num_kv_shared_layers",
    "num_dense_layers",
    "moe_layer_start_index",
    "num_shared_experts",
    "n_shared_experts",
)
CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "attention_logit_cap", "swiglu_limit")
MAX_CAP = 1.0
"""Bounds of activations, small enough that a tiny model reaches them."""
MAX_POSITIONS = 512
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")


def shrink(config: Any, **overrides: Any) -> Any:
    """Returns a small copy of a config of transformers. `overrides` replace its keys."""
    values = shrink_values(config.to_dict())
    values.update(overrides)
    return type(config)(**{key: value for key, value in values.items() if key not in ("model_type", "architectures")})


def shrink_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON object of a config with small sizes."""
    small: dict[str, Any] = {
        key: shrink_values(value) if isinstance(value, dict) else value for key, value in values.items()
    }
    for key, size in SIZES.items():
        if isinstance(small.get(key), list):  # one for each layer
            small[key] = [min(entry, size) if _is_size(entry) else entry for entry in small[key]]
        elif _is_size(small.get(key)) and small[key] > size:
            small[key] = size
    for key in _POSITIONS:
        if _is_size(small.get(key)):
            small[key] = min(small[key], MAX_POSITIONS)
    for key in LIMITED:
        if _is_size(small.get(key)):
            small[key] = min(small[key], 1)
    for key in CAPS:
        if isinstance(small.get(key), float | int) and small[key] > MAX_CAP:
            small[key] = MAX_CAP
    for place, key in enumerate(_IDS):
        if _is_size(small.get(key)) and small[key] >= VOCAB_SIZE:
            small[key] = place
        elif isinstance(small.get(key), list):
            small[key] = [place]
    if "qk_rope_head_dim" in small and values.get("head_dim") == values["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    _shrink_kv_heads(values, small)
    _shrink_lists(values, small)
    return small


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shrink_kv_heads(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    for key in (
        "num_key_value_heads",
        "num_kv_heads",
        "multi_query_group_num",
        "num_global_key_value_heads",
        "n_head_kv",
        "swa_num_key_value_heads",
        "kv_n_heads",
    ):
        if _is_size(values.get(key)):
            heads = values.get("num_attention_heads", values.get("n_heads", 0))
            small[key] = HEADS if values[key] == heads else min(2, values[key])


def _shrink_lists(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Cuts lists with an entry for each layer down to LAYERS entries that show every kind of layer."""
    count = next(
        (values[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if _is_size(values.get(key))), 0
    )
    lists = {k: v for k, v in values.items() if isinstance(v, list) and len(v) == count and count > LAYERS}
    if not lists:
        return
    kinds = list(zip(*(map(repr, entries) for entries in lists.values()), strict=True))
    turns = [(kinds[:i].count(kind), i) for i, kind in enumerate(kinds)]  # first of each kind, second of each kind, ...
    chosen = [i for _, i in sorted(turns)[:LAYERS]]
    chosen.sort()
    for key in lists:
        small[key] = [small[key][i] for i in chosen]
    by_layer = values.get("per_layer_config")
    if isinstance(by_layer, dict):
        shrunken = {int(i): shrink_values(entry) for i, entry in by_layer.items()}
        small["per_layer_config"] = {new: shrunken[old] for new, old in enumerate(chosen) if old in shrunken}

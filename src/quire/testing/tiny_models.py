"""Tiny random checkpoints of every family, written by transformers: the models of the oracle tests.

They have everything that a real checkpoint has: config.json, safetensors, a byte-level BPE tokenizer.json, a chat
template, generation_config.json. Weights are random but scaled so that greedy output varies from token to token and the
best token leads clearly. Needs transformers (the `hf` extra); nothing else in the package does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCAB_SIZE = 384
MAX_MODEL_LEN = 1024
SLIDING_WINDOW = 32
BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

_WINDOWS: Mapping[str, Any] = {"num_hidden_layers": 4, "sliding_window": SLIDING_WINDOW, "layer_types": _MIXED_LAYERS}
_TWO_ROPES: Mapping[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0},
}

_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}

FAMILY_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": SLIDING_WINDOW},
    "qwen2": {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": SLIDING_WINDOW,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 16},
    "phi3": {},
    "deepseek_v2": {
        **_LATENT,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_shared_experts": 2,
    },
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 2, "q_lora_rank": 20, "routed_scaling_factor": 1.5},
    "glm4_moe_lite": {
        **_LATENT,
        "q_lora_rank": 20,
        "v_head_dim": 20,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rms_norm_eps": 1e-3,
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "intermediate_size": 32,
        "intermediate_size_mlp": 56,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 37,
        "floor_scale": 50,
        "attn_scale": 0.4,
    },
    "glm": {"head_dim": 24},
    "glm4": {"head_dim": 16, "attention_bias": False},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 1.5,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.8,
        "logits_scaling": 0.5,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 6,
        "sliding_window": SLIDING_WINDOW,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 2,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _MIXED_LAYERS,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_global_key_value_heads": 2,
        "head_dim": 24,
        "global_head_dim": 40,
        "attention_k_eq_v": True,
        "sliding_window": 24,
        "layer_types": [*_MIXED_LAYERS[:3], "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 20,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "final_logit_softcapping": 20.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0},
        },
    },
    "afmoe": {
        **_WINDOWS,
        "head_dim": 24,
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_shared_experts": 2,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "cohere2_moe": {
        **_WINDOWS,
        "head_dim": 24,
        "logit_scale": 0.25,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "prefix_dense_intermediate_size": 56,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "num_shared_experts": 2,
        "tie_word_embeddings": True,
    },
    "granitemoe_swa": {
        **_WINDOWS,
        "embedding_multiplier": 1.5,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.8,
        "logits_scaling": 0.5,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 24,
        "layer_rope_theta": [10000.0, 0, 500.0, 10000.0],
    },
    "laguna": {
        **_WINDOWS,
        "head_dim": 24,
        "num_attention_heads_per_layer": [4, 6, 2, 4],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "moe_routed_scaling_factor": 1.5,
        "moe_router_logit_softcapping": 2.0,
    },
    "minicpm3": {
        **_LATENT,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 20,
        "scale_emb": 1.5,
        "scale_depth": 1.2,
        "dim_model_base": 32,
        "tie_word_embeddings": True,
    },
    "nanochat": {"final_logit_softcapping": 12.0},
    "phimoe": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "lm_head_bias": True,
        "attention_bias": True,
        "router_jitter_noise": 0.2,
    },
    "xglm": {
        "d_model": 48,
        "ffn_dim": 80,
        "num_layers": 3,
        "attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "youtu": {**_LATENT, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 20},
    "gemma4_unified_text": {
        "head_dim": 16,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": SLIDING_WINDOW,
        "num_kv_shared_layers": 0,
    },
    "biogpt": {"num_hidden_layers": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "bloom": {"num_key_value_heads": 3, "num_attention_heads": 3, "hidden_size": 48},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80},
    "gpt2": {"num_key_value_heads": 4, "n_inner": 80},
    "gpt_bigcode": {"n_inner": 80},
    "gpt_neo": {
        "num_key_value_heads": 4,
        "num_layers": 3,
        "num_heads": 4,
        "window_size": SLIDING_WINDOW,
        "attention_types": [[["global", "local"], 1], [["local"], 1]],
    },
    "codegen": {"num_key_value_heads": 4, "rotary_dim": 8, "n_inner": 80},
    "gptj": {"num_key_value_heads": 4, "rotary_dim": 8, "n_inner": 80},
    "jais2": {},
    "mpt": {"num_attention_heads": 6, "num_key_value_heads": 6, "attn_config": {"clip_qkv": 0.9}},
    "persimmon": {"num_key_value_heads": 4},
    "olmo": {"clip_qkv": 0.9},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25, "tie_word_embeddings": True},
    "cohere2": {
        "num_hidden_layers": 4,
        "logit_scale": 0.25,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _MIXED_LAYERS,
        "tie_word_embeddings": True,
    },
    "nemotron": {},
    "arcee": {"head_dim": 16},
    "apertus": {},
    "starcoder2": {"num_attention_heads": 6, "num_key_value_heads": 3, "sliding_window": SLIDING_WINDOW},
    "phi": {"qk_layernorm": True},
    "stablelm": {"num_attention_heads": 3, "num_key_value_heads": 3, "qk_layernorm": True, "use_qkv_bias": True},
    "gpt_neox": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "gpt_oss": {
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "seed_oss": {"head_dim": 16, "attention_out_bias": True},
    "helium": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    "ernie4_5": {"head_dim": 24, "use_bias": True, "tie_word_embeddings": True},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 10000.0},
    },
    "exaone4": _WINDOWS,
    "cwm": {**_WINDOWS, "head_dim": 16},
    "olmo3": {**_WINDOWS, "rope_parameters": _TWO_ROPES},
    "gemma": {"head_dim": 16, "tie_word_embeddings": True},
    "vaultgemma": {
        **_WINDOWS,
        "head_dim": 16,
        "query_pre_attn_scalar": 6,
        "attn_logit_softcapping": 20.0,
        "tie_word_embeddings": True,
    },
    "ministral": {**_WINDOWS, "head_dim": 24},
    "hyperclovax": {
        "embedding_multiplier": 1.5,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.8,
        "logits_scaling": 0.5,
    },
    "ministral3": {
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 96,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "granite_swa": {
        **_WINDOWS,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.8,
        "logits_scaling": 0.5,
        "layer_rope_theta": [10000.0, 500.0, 0, 10000.0],
        "tie_word_embeddings": True,
    },
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 3},
    "flex_olmo": {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "qwen2_moe": {
        "num_hidden_layers": 4,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 3, "residual_multiplier": 0.8, "logits_scaling": 0.5},
    "granitemoeshared": {
        "num_local_experts": 7,
        "shared_intermediate_size": 40,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.8,
    },
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 5, "moe_topk": [1, 2, 4]},
    "ernie4_5_moe": {
        "moe_num_experts": 7,
        "moe_k": 3,
        "moe_intermediate_size": 24,
        "moe_layer_end_index": 2,
        "moe_num_shared_experts": 2,
    },
    "glm4_moe": {
        "head_dim": 16,
        "use_qk_norm": True,
        "n_routed_experts": 12,
        "num_experts_per_tok": 5,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    },
    "dots1": {
        "head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "sliding_window": SLIDING_WINDOW,
        "max_window_layers": 2,
        "first_k_dense_replace": 1,
    },
    "solar_open": {"head_dim": 16, "n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "exaone_moe": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "sliding_window": SLIDING_WINDOW,
    },
    "hy_v3": {"head_dim": 16, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "mellum": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _MIXED_LAYERS,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "minimax_m2": {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3},
    "aria_text": {"moe_num_experts": 5, "moe_topk": 3},
}

FAMILIES: tuple[str, ...] = tuple(FAMILY_CONFIGS)
"""Families for `make_tiny_checkpoint`, by transformers' `model_type`."""

_ENCODER_BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 320,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_ENCODER_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1, "hidden_act": "gelu_new"},
    "modernbert": {
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "local_attention": 24,
        "global_attn_every_n_layers": 3,
        "classifier_pooling": "mean",
        "cls_token_id": BOS,
        "sep_token_id": EOS,
    },
}
ENCODERS: tuple[str, ...] = tuple(_ENCODER_CONFIGS)
"""Families that only pool, by `model_type`; `head` selects the task."""
_HEADS: Mapping[str, str] = {
    "generate": "AutoModelForCausalLM",
    "embed": "AutoModel",
    "classify": "AutoModelForSequenceClassification",
    "token_classify": "AutoModelForTokenClassification",
}


def make_tiny_checkpoint(
    path: Path, family: str, *, head: str | None = None, seed: int = 0, dtype: str = "float32", **config_overrides: Any
) -> Path:
    """Writes a random checkpoint of `family` to directory `path` and returns it. Equal arguments give equal bytes.

    `head` is generate (the default of a decoder), embed (of an encoder), classify or token_classify. `config_overrides`
    replace fields of the family's tiny config (transformers' keyword names).
    """
    import torch

    make_tiny_model(family, head=head, seed=seed, **config_overrides).to(getattr(torch, dtype)).save_pretrained(path)
    _write_tokenizer(path, marks_texts=family in _ENCODER_CONFIGS)
    return path


def make_tiny_model(family: str, *, head: str | None = None, seed: int = 0, **config_overrides: Any) -> Any:
    """Returns transformers' model of the checkpoint that `make_tiny_checkpoint` writes, in float32."""
    import torch
    import transformers

    is_encoder = family in _ENCODER_CONFIGS
    head = head or ("embed" if is_encoder else "generate")
    tiny = {**_ENCODER_BASE, **_ENCODER_CONFIGS[family]} if is_encoder else {**_BASE, **FAMILY_CONFIGS[family]}
    config = transformers.AutoConfig.for_model(family, **{**tiny, **config_overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, _HEADS[head]).from_config(config, dtype=torch.float32)
        randomize(model)
    if head == "generate":
        model.generation_config.update(do_sample=False, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    return model


_TOKEN_TABLES = ("embed_tokens", "word_embeddings", "wte")


def randomize(model: Any) -> None:
    """Draws matrices that keep the size of their input, and norms and biases that are not neutral."""

    model_type = model.config.model_type
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            is_norm = "norm" in name.lower() or "ln_" in name
            stores_distance = "gemma" in model_type and not model_type.startswith(("gemma3n", "gemma4"))
            is_one_based = (is_norm and name.endswith("weight") and not stores_distance) or name.endswith("scale")
            parameter.data.uniform_(-0.2, 0.2).add_(1.0 if is_one_based else 0.0)
        else:
            is_tied_head = model.config.tie_word_embeddings and any(table in name for table in _TOKEN_TABLES)
            parameter.data.normal_(std=(0.4 if is_tied_head else 1.5) * parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):  # of the choice of experts
            buffer.data.uniform_(-0.15, 0.15)
        elif name.endswith("layer_scalar"):
            buffer.data.uniform_(0.5, 1.5)


def _write_tokenizer(path: Path, *, marks_texts: bool = False) -> None:
    """Trains a byte-level BPE tokenizer of VOCAB_SIZE tokens on a few sentences.

    With `marks_texts` it puts a special token before and after a text, and distinguishes the two texts of a pair, like
    the tokenizers of encoders.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    if marks_texts:
        begin, end = SPECIAL_TOKENS[BOS], SPECIAL_TOKENS[EOS]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B:1 {end}:1", special_tokens=[(begin, BOS), (end, EOS)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": SPECIAL_TOKENS[BOS],
                "eos_token": SPECIAL_TOKENS[EOS],
                "pad_token": SPECIAL_TOKENS[PAD],
                "chat_template": CHAT_TEMPLATE,
                "model_max_length": MAX_MODEL_LEN,
            },
            indent=2,
        ),
        encoding="utf-8",
    )


_TEXT = """A quire is a gathering of pages, folded and sewn; a choir is a gathering of voices. The engine keeps the
keys and the values of every token it has read in blocks of memory, and gives each request the blocks it needs. When a
block is no longer needed it goes back to the end of the queue, where the next request that begins with the same words
can find it again. Nothing is lost when the memory is full: the request that came last waits, and what it had computed
is computed again. The same words in the same order always give the same answer, whoever else is being served."""

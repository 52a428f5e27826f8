"""Names of tensors in checkpoints, where they differ from the tree of modules.

Modules have Llama's names: `model.layers.N.self_attn.{q,k,v,o}_proj`, `mlp.{gate,up,down}_proj`, `model.norm`,
`lm_head`; a block's norms have the names of blocks.py. A family whose checkpoints say otherwise has a row here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from quire.config.attention_layout import kv_sources
from quire.config.hf_config import HFConfig


@dataclass(frozen=True)
class Names:
    """The names of one family's checkpoints. A path is one or more whole parts of a dotted name."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Paths and the modules' names for them. All are replaced at once; where two begin alike the longer one counts."""
    ignored: tuple[str, ...] = ()
    """Paths of tensors that the model does not need."""

    @cached_property
    def _renamed(self) -> re.Pattern[str] | None:
        return _any_of(self.renamed)

    @cached_property
    def _ignored(self) -> re.Pattern[str] | None:
        return _any_of(self.ignored)

    def of(self, name: str) -> str | None:
        """Returns the model's name of a checkpoint's tensor; None if the model does not need it."""
        if self._ignored is not None and self._ignored.search(name):
            return None
        if self._renamed is None:
            return name
        return self._renamed.sub(lambda path: self.renamed[path.group()], name)


TRANSPOSED: Mapping[str, int] = {
    "AriaTextForCausalLM": 3,
    "GPT2ForCausalLM": 2,
    "GptOssForCausalLM": 3,
    "Llama4ForCausalLM": 3,
}
"""Families whose matrices of so many dimensions (3: those of all experts) have inputs before outputs."""
MAX_PREDICTORS = 16
"""Layers behind the decoder's that are ignored at most."""


def names_of(hf: HFConfig) -> tuple[Names, ...]:
    """Returns the names of a checkpoint's tensors, in the order in which they apply."""
    own = (NAMES[hf.family],) if hf.family in NAMES else ()
    first, count = hf.num_hidden_layers, min(int(hf.get("num_nextn_predict_layers", 0)), MAX_PREDICTORS)
    if count:  # layers that predict tokens after the next one
        own = (Names(ignored=tuple(f"model.layers.{first + i}" for i in range(count))), *own)
    shared = [i for i, source in enumerate(kv_sources(hf)) if source is not None]
    if shared:  # some checkpoints have keys and values of layers that read those of others
        parts = ("k_proj", "v_proj", "k_norm", "v_norm")
        own = (Names(ignored=tuple(f"model.layers.{i}.self_attn.{part}" for i in shared for part in parts)), *own)
    return (TEXT_PART, *own) if hf.part_of else own


def renamed(name: str, all_names: Iterable[Names]) -> str | None:
    """Returns the model's name of a checkpoint's tensor by each of `all_names` in turn; None: not needed."""
    found: str | None = name
    for names in all_names:
        found = None if found is None else names.of(found)
    return found


def _any_of(paths: Mapping[str, str] | tuple[str, ...]) -> re.Pattern[str] | None:
    """Returns a pattern that matches each path as whole parts of a name."""
    if not paths:
        return None
    longest_first = sorted(paths, key=len, reverse=True)
    return re.compile(rf"(?<![^.])(?:{'|'.join(map(re.escape, longest_first))})(?![^.])")


TEXT_PART = Names(
    {
        "model.language_model": "model",
        "language_model.model": "model",
        "language_model.lm_head": "lm_head",
        "model.text_model": "model",
    },
    ignored=(
        *(
            "visual",
            "vision_tower",
            "vision_model",
            "vision_embedding",
            "vision_embedder",
            "audio_tower",
            "embed_vision",
            "embed_audio",
        ),
        *("multi_modal_projector", "connector", "image_newline", "mtp"),
    ),
)
"""Names in repositories that also read images or sounds: config/text_part.py. A family's own names come after it."""

_GPT = {
    "transformer.h": "model.layers",
    "transformer.wte": "model.embed_tokens",
    "transformer.wpe": "model.embed_positions",
    "transformer.ln_f": "model.norm",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
}
"""Names that GPT-2 and its successors share."""
_BLOOM = {
    "transformer.h": "model.layers",
    "transformer.word_embeddings": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "self_attention.query_key_value": "self_attn.qkv_proj",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}
"""Names that BLOOM and Falcon share."""
_GEMMA4 = Names(
    {
        "model.embed_tokens_per_layer": "model.layer_inputs.embed_tokens",
        "model.per_layer_model_projection": "model.layer_inputs.projection",
        "model.per_layer_projection_norm": "model.layer_inputs.projection_norm",
        "per_layer_input_gate": "own.gate",
        "per_layer_projection": "own.projection",
        "post_per_layer_input_norm": "own.norm",
        "experts": "moe.experts",
        "router.per_expert_scale": "moe.gate.per_expert_scale",
        "router.proj": "moe.gate",
        "router.scale": "moe.gate.norm.weight",
    }
)
_GRANITE_MOE = Names(
    {
        "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
        "block_sparse_moe.router.layer": "mlp.gate",
        "shared_mlp.input_linear": "mlp.shared_experts.gate_up_proj",
        "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
    }
)
NAMES: Mapping[str, Names] = {
    "AfmoeForCausalLM": Names(
        {
            "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
            "mlp.router.gate": "mlp.gate",
            "pre_mlp_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        }
    ),
    "ApertusForCausalLM": Names(
        {"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"}
    ),
    "AriaTextForCausalLM": Names(
        {
            "mlp.experts.fc1.weight": "mlp.experts.gate_up_proj",
            "mlp.experts.fc2.weight": "mlp.experts.down_proj",
            "mlp.router": "mlp.gate",
        }
    ),
    "BioGptForCausalLM": Names(
        {
            "biogpt.layers": "model.layers",
            "biogpt.embed_tokens": "model.embed_tokens",
            "biogpt.embed_positions": "model.embed_positions",
            "biogpt.layer_norm": "model.norm",
            "output_projection": "lm_head",
            "self_attn_layer_norm": "input_layernorm",
            "final_layer_norm": "post_attention_layernorm",
            "self_attn.out_proj": "self_attn.o_proj",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
        },
    ),
    "BloomForCausalLM": Names(
        {
            **_BLOOM,
            "transformer.word_embeddings_layernorm": "model.embed_norm",
            "h": "model.layers",
            "word_embeddings": "model.embed_tokens",
            "word_embeddings_layernorm": "model.embed_norm",
            "ln_f": "model.norm",
        },
    ),
    "CodeGenForCausalLM": Names(
        {
            **_GPT,
            "attn.qkv_proj": "self_attn.qkv_proj",
            "attn.out_proj": "self_attn.o_proj",
            "mlp.fc_in": "mlp.up_proj",
            "mlp.fc_out": "mlp.down_proj",
        },
        ignored=("attn.causal_mask",),
    ),
    "Ernie4_5_MoeForCausalLM": Names({"moe_statics.e_score_correction_bias": "gate.e_score_correction_bias"}),
    "ExaoneMoeForCausalLM": Names({"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"}),
    "FalconForCausalLM": Names(
        {
            **_BLOOM,
            "ln_attn": "input_layernorm",
            "ln_mlp": "post_attention_layernorm",
        },
    ),
    "GPT2ForCausalLM": Names(
        {
            **_GPT,
            "h": "model.layers",
            "wte": "model.embed_tokens",
            "wpe": "model.embed_positions",
            "ln_f": "model.norm",
            "attn.c_attn": "self_attn.qkv_proj",
            "attn.c_proj": "self_attn.o_proj",
            "mlp.c_fc": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
        },
        ignored=("attn.bias",),
    ),
    "GPTBigCodeForCausalLM": Names(
        {
            **_GPT,
            "attn.c_attn": "self_attn.qkv_proj",
            "attn.c_proj": "self_attn.o_proj",
            "mlp.c_fc": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
        },
        ignored=("attn.bias",),
    ),
    "GPTJForCausalLM": Names(
        {
            **_GPT,
            "attn.q_proj": "self_attn.q_proj",
            "attn.k_proj": "self_attn.k_proj",
            "attn.v_proj": "self_attn.v_proj",
            "attn.out_proj": "self_attn.o_proj",
            "mlp.fc_in": "mlp.up_proj",
            "mlp.fc_out": "mlp.down_proj",
        },
        ignored=("attn.bias",),
    ),
    "GPTNeoForCausalLM": Names(
        {
            **_GPT,
            "attn.attention": "self_attn",
            "attn.attention.out_proj": "self_attn.o_proj",
            "mlp.c_fc": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
        },
        ignored=("attn.attention.bias",),
    ),
    "GPTNeoXForCausalLM": Names(
        {
            "gpt_neox.layers": "model.layers",
            "gpt_neox.embed_in": "model.embed_tokens",
            "gpt_neox.final_layer_norm": "model.norm",
            "embed_out": "lm_head",
            "attention.query_key_value": "self_attn.qkv_proj",
            "attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        },
        ignored=("attention.bias",),
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4,
    "Glm4ForCausalLM": Names(
        {
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        }
    ),
    "GptOssForCausalLM": Names({"mlp.router": "mlp.gate"}),
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeSWAForCausalLM": Names(
        {
            "block_sparse_moe": "mlp",
            "block_sparse_moe.router": "mlp.gate",
            "shared_mlp.input_linear": "mlp.shared_experts.gate_up_proj",
            "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
        }
    ),
    "GraniteMoeSharedForCausalLM": _GRANITE_MOE,
    "HYV3ForCausalLM": Names(
        {
            "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
            "mlp.router.gate": "mlp.gate",
            "shared_mlp": "shared_experts",
        }
    ),
    "HunYuanDenseV1ForCausalLM": Names({"query_layernorm": "q_norm", "key_layernorm": "k_norm"}),
    "HunYuanMoEV1ForCausalLM": Names(
        {
            "query_layernorm": "q_norm",
            "key_layernorm": "k_norm",
            "gate.wg": "gate",
            "shared_mlp": "shared_experts",
        }
    ),
    "HyperCLOVAXForCausalLM": Names(
        {
            "post_norm1": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_norm2": "post_feedforward_layernorm",
        }
    ),
    "LagunaForCausalLM": Names(
        {
            "self_attn.g_proj": "self_attn.gate_proj",
            "experts.e_score_correction_bias": "gate.e_score_correction_bias",
            "shared_expert": "shared_experts",
        }
    ),
    "Llama4ForCausalLM": Names(
        {"feed_forward": "mlp", "feed_forward.router": "mlp.gate", "feed_forward.shared_expert": "mlp.shared_experts"}
    ),
    "MiniMaxM2ForCausalLM": Names(
        {
            "block_sparse_moe": "mlp",
            "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        }
    ),
    "MixtralForCausalLM": Names({"block_sparse_moe": "mlp"}),
    "MptForCausalLM": Names(
        {
            "transformer.blocks": "model.layers",
            "transformer.wte": "model.embed_tokens",
            "transformer.norm_f": "model.norm",
            "norm_1": "input_layernorm",
            "norm_2": "post_attention_layernorm",
            "attn.Wqkv": "self_attn.qkv_proj",
            "attn.out_proj": "self_attn.o_proj",
            "ffn.up_proj": "mlp.up_proj",
            "ffn.down_proj": "mlp.down_proj",
        },
    ),
    "NanoChatForCausalLM": Names({"mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}),
    "PersimmonForCausalLM": Names(
        {
            "model.final_layernorm": "model.norm",
            "self_attn.query_key_value": "self_attn.qkv_proj",
            "self_attn.dense": "self_attn.o_proj",
            "q_layernorm": "q_norm",
            "k_layernorm": "k_norm",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        },
    ),
    "PhiForCausalLM": Names(
        {
            "model.final_layernorm": "model.norm",
            "self_attn.dense": "self_attn.o_proj",
            "mlp.fc1": "mlp.up_proj",
            "mlp.fc2": "mlp.down_proj",
            "q_layernorm": "q_norm",
            "k_layernorm": "k_norm",
        }
    ),
    "PhimoeForCausalLM": Names({"block_sparse_moe": "mlp"}),
    "Qwen2MoeForCausalLM": Names({"shared_expert": "shared_experts"}),
    "StableLmForCausalLM": Names({"q_layernorm": "q_norm", "k_layernorm": "k_norm"}),
    "Starcoder2ForCausalLM": Names({"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    "VaultGemmaForCausalLM": Names({"pre_feedforward_layernorm": "post_attention_layernorm"}),
    "XGLMForCausalLM": Names(
        {
            "model.layer_norm": "model.norm",
            "self_attn_layer_norm": "input_layernorm",
            "final_layer_norm": "post_attention_layernorm",
            "self_attn.out_proj": "self_attn.o_proj",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
        }
    ),
}
"""Names by `HFConfig.family`; families without a row have the modules' names."""

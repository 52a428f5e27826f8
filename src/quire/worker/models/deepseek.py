"""Latent attention: DeepSeek V2 and V3 and GLM-4.7-Flash, with many small experts beside a shared one; MiniCPM3 and
Youtu without."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.kernels.specs import LatentSizes, RouterSpec
from quire.worker.layers.moe import MoESpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.experts import has_experts, sigmoid_experts
from quire.worker.models.spec import DecoderSpec, LayerSpec, common_spec


class _LatentForCausalLM(DecoderForCausalLM):
    """Reads no layers after the last: they predict further tokens."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec) -> None:
        super().__init__(hf, spec)
        self._num_layers = hf.num_hidden_layers

    def checkpoint_name(self, name: str) -> str | None:
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return None if found is not None and int(found[1]) >= self._num_layers else super().checkpoint_name(name)


class DeepseekV2ForCausalLM(_LatentForCausalLM):
    """Softmax routers, which may first choose groups by their best expert."""

    def __init__(self, hf: HFConfig) -> None:
        method = hf.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise UnsupportedModelError(f"{hf.path} has topk_method {method!r}, which is not implemented")
        has_groups = method == "group_limited_greedy"
        router = RouterSpec(
            num_experts_per_token=hf.size("num_experts_per_tok"),
            normalize=False,
            factor=float(hf.get("routed_scaling_factor", 1.0)),
            num_groups=hf.size("n_group") if has_groups else 1,
            num_kept_groups=hf.size("topk_group") if has_groups else 1,
        )
        moe = dataclasses.replace(sigmoid_experts(hf), router=router, choice_bias=False)
        # whatever `rope_interleave` says; and angles are never rounded
        super().__init__(hf, dataclasses.replace(latent_spec(hf, moe), rope_pairs=True, rope_in_float32=True))


class DeepseekV3ForCausalLM(_LatentForCausalLM):
    """Sigmoid routers, which first choose groups by the sum of their two best experts."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, latent_spec(hf, sigmoid_experts(hf)))


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash: DeepSeek V3 in small. `mlp_layer_types` names the layers with experts."""


class YoutuForCausalLM(_LatentForCausalLM):
    """Latent attention without experts."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, latent_spec(hf))


class MiniCPM3ForCausalLM(_LatentForCausalLM):
    """Latent attention without experts; factors on embeddings, on what layers add, and on logits."""

    def __init__(self, hf: HFConfig) -> None:
        count, base = hf.num_hidden_layers, hf.get("dim_model_base")
        spec = dataclasses.replace(
            latent_spec(hf),
            rope_pairs=False,
            embedding_multiplier=float(hf.get("scale_emb")),
            residual_multiplier=1.0 if hf.get("scale_depth") is None else float(hf.get("scale_depth")) / count**0.5,
            logits_divisor=1.0 if base is None else hf.hidden_size / float(base),
        )
        super().__init__(hf, spec)


def latent_spec(hf: HFConfig, moe: MoESpec | None = None) -> DecoderSpec:
    """Returns the spec of a model whose layers are latent attention, all with rotation. `moe`: the experts of layers
    that have them."""
    rope, rotary, plain = hf.rope(), hf.size("qk_rope_head_dim"), hf.size("qk_nope_head_dim")
    factor = _yarn_factor(rope.rope_type, rope.params)
    has_moe = [moe is not None and has_experts(hf, i) for i in range(hf.num_hidden_layers)]
    layers = tuple(LayerSpec(mixer="latent", moe=moe if is_sparse else None) for is_sparse in has_moe)
    return common_spec(
        hf,
        layers,
        rope_pairs=bool(hf.get("rope_interleave", True)),
        rope_dims={"rope": rotary},
        latent=LatentSizes(
            query_rank=None if hf.get("q_lora_rank") is None else hf.size("q_lora_rank"),
            rank=hf.size("kv_lora_rank"),
            plain=plain,
            rotary=rotary,
            value=hf.size("v_head_dim", hf.hidden_size // hf.num_attention_heads),
        ),
        attention_scale=None if factor == 1.0 else (plain + rotary) ** -0.5 * factor,
    )


def _yarn_factor(rope_type: str, params: Mapping[str, Any]) -> float:
    """Returns the factor of scores that longer contexts than the trained one need."""
    mscale, factor = float(params.get("mscale_all_dim") or 0.0), float(params.get("factor") or 1.0)
    if rope_type == "default" or not mscale or factor <= 1.0:
        return 1.0
    return float((0.1 * mscale * math.log(factor) + 1.0) ** 2)

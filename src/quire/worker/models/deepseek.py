"""Latent attention: DeepSeek V2 and V3 and GLM-4.7-Flash, with many small experts beside a shared one; MiniCPM3 and
Youtu without."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.worker.kernels.specs import LatentSizes, RouterSpec
from quire.worker.layers.moe import MoESpec, SharedExpertSpec
from quire.worker.models.decoder import DecoderForCausalLM
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
        # whatever `rope_interleave` says; and angles are never rounded
        spec = dataclasses.replace(latent_spec(hf, _dense_first(hf, router)), rope_pairs=True, rope_in_float32=True)
        super().__init__(hf, spec)


class DeepseekV3ForCausalLM(_LatentForCausalLM):
    """Sigmoid routers, which first choose groups by the sum of their two best experts."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, latent_spec(hf, _dense_first(hf, _sigmoid_router(hf), choice_bias=True)))


class Glm4MoeLiteForCausalLM(_LatentForCausalLM):
    """GLM-4.7-Flash: DeepSeek V3 in small. `mlp_layer_types` names the layers with experts."""

    def __init__(self, hf: HFConfig) -> None:
        count = hf.num_hidden_layers
        kinds = hf.get("mlp_layer_types", ["dense"] + ["sparse"] * (count - 1))
        if not isinstance(kinds, list) or len(kinds) < count:
            raise ModelLoadError(f"{hf.path} has mlp_layer_types {kinds!r}, which must be a list of {count}")
        moe = _experts(hf, _sigmoid_router(hf), choice_bias=True)
        layers = (LayerSpec(mixer="latent", moe=moe if kind == "sparse" else None) for kind in kinds[:count])
        super().__init__(hf, latent_spec(hf, tuple(layers)))


class YoutuForCausalLM(_LatentForCausalLM):
    """Latent attention without experts."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, latent_spec(hf, (LayerSpec(mixer="latent"),) * hf.num_hidden_layers))


class MiniCPM3ForCausalLM(_LatentForCausalLM):
    """Latent attention without experts; factors on embeddings, on what layers add, and on logits."""

    def __init__(self, hf: HFConfig) -> None:
        count, base = hf.num_hidden_layers, hf.get("dim_model_base")
        spec = dataclasses.replace(
            latent_spec(hf, (LayerSpec(mixer="latent"),) * count),
            rope_pairs=False,
            embedding_multiplier=float(hf.get("scale_emb")),
            residual_multiplier=1.0 if hf.get("scale_depth") is None else float(hf.get("scale_depth")) / count**0.5,
            logits_divisor=1.0 if base is None else hf.hidden_size / float(base),
        )
        super().__init__(hf, spec)


def latent_spec(hf: HFConfig, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    """Returns the spec of a model whose layers are latent attention, all with rotation."""
    rope, rotary, plain = hf.rope(), hf.size("qk_rope_head_dim"), hf.size("qk_nope_head_dim")
    factor = _yarn_factor(rope.rope_type, rope.params)
    return dataclasses.replace(
        common_spec(hf, layers),
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


def _sigmoid_router(hf: HFConfig) -> RouterSpec:
    return RouterSpec(
        num_experts_per_token=hf.size("num_experts_per_tok"),
        normalize=bool(hf.get("norm_topk_prob", True)),
        score="sigmoid",
        norm_eps=1e-20,
        factor=float(hf.get("routed_scaling_factor", 1.0)),
        num_groups=hf.size("n_group", 1),
        num_kept_groups=hf.size("topk_group", 1),
        group_score="two best",
    )


def _experts(hf: HFConfig, router: RouterSpec, *, choice_bias: bool) -> MoESpec:
    size = hf.size("moe_intermediate_size")
    return MoESpec(
        num_experts=hf.size("n_routed_experts"),
        expert_size=size,
        router=router,
        logits_in_float32=True,
        choice_bias=choice_bias,
        shared=SharedExpertSpec(size=size * hf.size("n_shared_experts")),
    )


def _dense_first(hf: HFConfig, router: RouterSpec, *, choice_bias: bool = False) -> tuple[LayerSpec, ...]:
    """Returns layers of which the first have no experts."""
    num_dense, moe = int(hf.get("first_k_dense_replace", 0)), _experts(hf, router, choice_bias=choice_bias)
    return tuple(LayerSpec(mixer="latent", moe=moe if i >= num_dense else None) for i in range(hf.num_hidden_layers))

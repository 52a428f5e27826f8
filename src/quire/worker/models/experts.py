"""Mixtures of experts as families describe them in config.json: which layers have one, and of what kind."""

from __future__ import annotations

from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec, SharedExpertSpec


def has_experts(hf: HFConfig, layer: int) -> bool:
    """Returns whether a layer has experts: `mlp_layer_types` has the kind of each ("sparse", "dense"); without it all
    have that follow the first `first_k_dense_replace`. Raises ModelLoadError if the list is too short."""
    kinds = hf.get("mlp_layer_types")
    if kinds is None:
        return layer >= int(hf.get("first_k_dense_replace", 0))
    if not isinstance(kinds, list) or len(kinds) < hf.num_hidden_layers:
        raise ModelLoadError(f"{hf.path} has mlp_layer_types {kinds!r}, which must be a list of {hf.num_hidden_layers}")
    if kinds[layer] not in ("sparse", "dense"):
        raise UnsupportedModelError(f"{hf.path} has an MLP of type {kinds[layer]!r}, which is not implemented")
    return bool(kinds[layer] == "sparse")


def softmax_experts(hf: HFConfig, *, size: str = "moe_intermediate_size", **changes: Any) -> MoESpec:
    """Returns experts that are chosen by a softmax over all, of the inner size `size`, as Qwen's are. `changes` are
    fields of MoESpec."""
    return MoESpec(
        num_experts=hf.size("num_experts", hf.get("num_local_experts")),
        expert_size=hf.size(size),
        router=RouterSpec(
            num_experts_per_token=hf.size("num_experts_per_tok"),
            normalize=bool(hf.get("norm_topk_prob", False)),
            weights_in_float32=False,
        ),
        **changes,
    )


def sigmoid_experts(
    hf: HFConfig,
    *,
    count: str = "n_routed_experts",
    shared: str = "n_shared_experts",
    factor: str = "routed_scaling_factor",
) -> MoESpec:
    """Returns experts as DeepSeek V3's: sigmoids, groups, a bias of the choice, plainly added shared experts. The
    arguments are the keys of their numbers and of the factor of their weights."""
    size, num_shared = hf.size("moe_intermediate_size"), int(hf.get(shared, 0))
    return MoESpec(
        num_experts=hf.size(count),
        expert_size=size,
        router=RouterSpec(
            num_experts_per_token=hf.size("num_experts_per_tok"),
            normalize=bool(hf.get("norm_topk_prob", True)),
            score="sigmoid",
            norm_eps=1e-20,
            factor=float(hf.get(factor, 1.0)),
            num_groups=hf.size("n_group", 1),
            num_kept_groups=hf.size("topk_group", 1),
            group_score="two best",
        ),
        logits_in_float32=True,
        choice_bias=True,
        shared=SharedExpertSpec(size=size * num_shared) if num_shared else None,
    )

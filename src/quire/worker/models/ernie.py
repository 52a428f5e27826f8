"""ERNIE 4.5, with and without experts."""

from __future__ import annotations

from quire.config.hf_config import HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec, SharedExpertSpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, LayerSpec, common_spec, make_layers


class Ernie45ForCausalLM(DecoderForCausalLM):
    """Llama with rotation of neighbouring pairs in float32, and one switch for all biases."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, ernie_spec(hf))


class Ernie45MoeForCausalLM(DecoderForCausalLM):
    """Experts in every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`, chosen by
    their softmax plus a bias, and shared ones."""

    def __init__(self, hf: HFConfig) -> None:
        size, num_shared = hf.size("moe_intermediate_size"), int(hf.get("moe_num_shared_experts", 0))
        bias = bool(hf.get("use_bias", False))
        moe = MoESpec(
            num_experts=hf.size("moe_num_experts"),
            expert_size=size,
            router=RouterSpec(
                num_experts_per_token=hf.size("moe_k"),
                normalize=True,
                weights_in_float32=False,
                norm_min=float(hf.get("moe_norm_min", 1e-12)),
            ),
            router_in_float32=True,
            choice_bias=True,
            choice_bias_is_row=True,
            shared=SharedExpertSpec(size=size * num_shared, bias=bias) if num_shared else None,
        )
        first, last = int(hf.get("moe_layer_start_index", 0)), int(hf.get("moe_layer_end_index", -1))
        if last == -1:
            last = hf.num_hidden_layers - 1
        step = hf.size("moe_layer_interval", 1)
        layers = make_layers(hf, moe=lambda i: moe if first <= i <= last and (i + 1) % step == 0 else None)
        if bias and hf.tie_word_embeddings:
            raise UnsupportedModelError(f"{hf.path}: a bias of logits with tied embeddings is not implemented")
        super().__init__(hf, ernie_spec(hf, layers, head_bias=bias))


def ernie_spec(hf: HFConfig, layers: tuple[LayerSpec, ...] | None = None, *, head_bias: bool = False) -> DecoderSpec:
    """Returns the spec of ERNIE 4.5."""
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(hf.get("use_bias", False)))
    return common_spec(hf, layers, rope_pairs=True, rope_in_float32=True, head_bias=head_bias, **biases)

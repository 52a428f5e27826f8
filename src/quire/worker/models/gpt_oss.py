"""gpt-oss: attention sinks, alternate windows, and experts with biases in MXFP4 or plain."""

from __future__ import annotations

from quire.config.hf_config import HFConfig
from quire.errors import UnsupportedModelError
from quire.worker.kernels.specs import CLAMPED_SWIGLU, SWIGLU_ALPHA, SWIGLU_LIMIT, RouterSpec
from quire.worker.layers.moe import MoESpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec, make_layers


class GptOssForCausalLM(DecoderForCausalLM):
    """Experts in every layer; gates and what they gate take turns among the outputs of their first matrix."""

    def __init__(self, hf: HFConfig) -> None:
        for key, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
            if hf.get(key, value) != value:
                raise UnsupportedModelError(f"{hf.path} has {key} = {hf.get(key)!r}; only {value} is implemented")
        moe = MoESpec(
            num_experts=hf.size("num_local_experts"),
            expert_size=hf.size("intermediate_size"),
            router=RouterSpec(
                num_experts_per_token=hf.size("num_experts_per_tok"), normalize=True, weights_in_float32=False
            ),
            activation=CLAMPED_SWIGLU,
            layout="transposed",
            gates_alternate=True,
            expert_bias=True,
            router_bias=True,
        )
        layers = make_layers(hf, moe=lambda layer: moe)
        spec = common_spec(hf, layers, attention_sinks=True, norm_in_float32=True)
        super().__init__(hf, spec)

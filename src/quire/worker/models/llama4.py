"""The text model of Llama 4."""

from __future__ import annotations

from quire.config.attention_layout import attention_chunks, rotates
from quire.config.hf_config import HFConfig
from quire.errors import ModelLoadError
from quire.worker.attention.backend import ScaleGrowth
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import MoESpec, SharedExpertSpec
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import LayerSpec, common_spec


class Llama4ForCausalLM(DecoderForCausalLM):
    """Layers that rotate see their own chunk of the text; the others see all of it, with scores that grow with the
    position. One expert, whose input is scaled, beside a shared one."""

    def __init__(self, hf: HFConfig) -> None:
        moe = MoESpec(
            num_experts=hf.size("num_local_experts"),
            expert_size=hf.size("intermediate_size"),
            router=RouterSpec(num_experts_per_token=hf.size("num_experts_per_tok"), normalize=False, score="sigmoid"),
            layout="transposed",
            scales_inputs=True,
            shared=SharedExpertSpec(size=hf.size("intermediate_size")),
        )
        growth = None
        if hf.get("attn_temperature_tuning", True):
            growth = ScaleGrowth(float(hf.get("attn_scale", 0.1)), hf.size("floor_scale"), offset=1)
        has_norms, with_experts = bool(hf.get("use_qk_norm", True)), _layers_with_experts(hf)
        layers = tuple(
            LayerSpec(
                rope="rope" if rotates(hf, i) else None,
                chunk=chunk,
                unit_qk_norm=has_norms and rotates(hf, i),
                scale_growth=None if rotates(hf, i) else growth,
                intermediate_size=hf.size("intermediate_size_mlp"),
                moe=moe if i in with_experts else None,
            )
            for i, chunk in enumerate(attention_chunks(hf))
        )
        super().__init__(hf, common_spec(hf, layers, rope_pairs=True, rope_in_float32=True))


def _layers_with_experts(hf: HFConfig) -> set[int]:
    """Returns the numbers of the layers that have experts. Raises ModelLoadError if `moe_layers` is no list."""
    listed = hf.get("moe_layers")
    if listed is None:
        step = hf.size("interleave_moe_layer_step")
        return set(range(step - 1, hf.num_hidden_layers, step))
    if not isinstance(listed, list):
        raise ModelLoadError(f"{hf.path} has moe_layers {listed!r}, which must be a list of numbers of layers")
    return set(listed)

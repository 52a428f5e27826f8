"""SmolLM3."""

from __future__ import annotations

from quire.config.hf_config import SLIDING_ATTENTION, HFConfig
from quire.worker.models.decoder import DecoderForCausalLM, LayerSpec, common_spec, layer_types_of, sliding_window_of


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """Some layers do not rotate (NoPE, Yang et al. 2025); only those may have a window."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf, _layers(hf)))


def _layers(hf: HFConfig) -> tuple[LayerSpec, ...]:
    """`no_rope_layers` has a 1 for each layer that does rotate; without it every n-th layer does not."""
    interval = hf.size("no_rope_layer_interval")
    rotates = hf.get("no_rope_layers", [(i + 1) % interval != 0 for i in range(hf.num_hidden_layers)])
    window = sliding_window_of(hf)
    types = layer_types_of(hf, lambda layer: window is not None and not rotates[layer])
    return tuple(
        LayerSpec(
            sliding_window=window if kind == SLIDING_ATTENTION else None,
            rope="rope" if rotates[i] else None,
        )
        for i, kind in enumerate(types)
    )

"""StableLM."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class StableLmForCausalLM(DecoderForCausalLM):
    """LayerNorm, heads of which a quarter rotates, attention and MLP one after the other or side by side."""

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(
            common_spec(hf),
            block="parallel" if hf.get("use_parallel_residual", False) else "pre",
            norm="layer",
            norm_eps=float(hf.get("layer_norm_eps", 1e-5)),
            norm_bias=True,
            qk_norm="listed heads" if hf.get("qk_layernorm", False) else "none",
            qkv_bias=bool(hf.get("use_qkv_bias", False)),
            output_bias=False,
            mlp_bias=False,
        )
        super().__init__(hf, spec)

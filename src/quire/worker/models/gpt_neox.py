"""GPT-NeoX and Pythia."""

from __future__ import annotations

import dataclasses

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """Attention and MLP, each of its own LayerNorm, side by side; a quarter of each head rotates."""

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(
            common_spec(hf),
            block="parallel-two" if hf.get("use_parallel_residual", True) else "pre",
            norm="layer",
            norm_eps=float(hf.get("layer_norm_eps", 1e-5)),
            norm_bias=True,
            fused_qkv="groups",
            mlp_bias=True,
            gated_mlp=False,
        )
        super().__init__(hf, spec)

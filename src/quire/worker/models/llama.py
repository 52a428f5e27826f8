"""Llama 2 and 3.x, and everything published in their format."""

from __future__ import annotations

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM, DecoderSpec, uniform_layers


class LlamaForCausalLM(DecoderForCausalLM):
    """The plain decoder, with biases where the config asks for them."""

    def __init__(self, hf: HFConfig) -> None:
        attention_bias = bool(hf.get("attention_bias", False))
        super().__init__(
            hf,
            DecoderSpec(
                layers=uniform_layers(hf, sliding_window=None),
                ropes={"rope": hf.rope()},
                qkv_bias=attention_bias,
                output_bias=attention_bias,
                mlp_bias=bool(hf.get("mlp_bias", False)),
                activation=hf.get("hidden_act", "silu"),
            ),
        )

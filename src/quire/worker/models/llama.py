"""Llama 2 and 3.x, and everything published in their format."""

from __future__ import annotations

from quire.config.hf_config import HFConfig
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import common_spec


class LlamaForCausalLM(DecoderForCausalLM):
    """The plain decoder, with biases where the config asks for them."""

    def __init__(self, hf: HFConfig) -> None:
        super().__init__(hf, common_spec(hf))

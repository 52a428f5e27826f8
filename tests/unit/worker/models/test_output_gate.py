"""The gate on the answer of attention, held to the attention layers of Qwen3.5.

No family of the table has it yet: Qwen3.5's other layers keep recurrent states, which are not implemented.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quire.config.hf_config import HFConfig
from quire.testing import tiny_models
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.registry import MODELS
from quire.worker.models.spec import OutputGate, common_spec

from .test_oracle import assert_same_logits


class AttentionOfQwen35(DecoderForCausalLM):
    """A model of nothing but attention layers."""

    def __init__(self, hf: HFConfig) -> None:
        spec = dataclasses.replace(common_spec(hf), qk_norm="head", norm_offset=1.0, norm_in_float32=True)
        super().__init__(hf, dataclasses.replace(spec, output_gate=OutputGate(in_queries=True)))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 24), (5, 5, 80)])
def test_attention_layers_of_qwen3_5(
    heads: int, kv_heads: int, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "Qwen3_5ForCausalLM", f"{__name__}:AttentionOfQwen35")
    monkeypatch.setitem(tiny_models.FAMILY_CONFIGS, "qwen3_5_text", {})  # type: ignore[index]
    path = tiny_models.make_tiny_checkpoint(
        tmp_path,
        "qwen3_5_text",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        layer_types=["full_attention"] * 3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )
    assert_same_logits(path, 1, 33, 200)

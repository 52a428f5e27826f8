"""The parts of a layer that mix tokens, by name: attention today, recurrent parts when they come.

A mixer is a module made as `mixer(hf, spec, layer, name)`, where `name` is its path in the model. Its `forward(x,
rotations, residual)` maps [num_tokens, hidden] to the same shape and adds `residual`. What it keeps between steps it
declares by the layers it owns: see `worker/attention/layer.py:Attention.kv_cache_spec`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from quire.config.hf_config import HFConfig
from quire.worker.models.attention import SelfAttention
from quire.worker.models.latent import LatentAttention
from quire.worker.models.spec import DecoderSpec, LayerSpec

MIXERS: Mapping[str, type[nn.Module]] = {"attention": SelfAttention, "latent": LatentAttention}
"""Values of `LayerSpec.mixer`."""


def make_mixer(hf: HFConfig, spec: DecoderSpec, layer: LayerSpec, name: str) -> nn.Module:
    """Returns the mixer of one layer."""
    return MIXERS[layer.mixer](hf, spec, layer, name)

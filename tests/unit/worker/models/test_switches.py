"""Each switch that a family sets changes its logits: without it the comparison with transformers would fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.hf_config import HFConfig
from quire.errors import QuireError
from quire.testing.tiny_models import FAMILIES
from quire.worker.models.decoder import DecoderForCausalLM
from quire.worker.models.spec import DecoderSpec, LayerSpec

from .oracle import load, quire_logits
from .test_oracle import TOLERANCE, Make, random_tokens

SAME_IN_FLOAT32 = frozenset({"norm_in_float32", "rope_in_float32", "rope_rounds_tables", "rounds_multiplier"})
DEFAULTS = DecoderSpec(layers=())
LAYER_DEFAULTS = LayerSpec()


def logits_with(path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[DecoderSpec, Any]:
    """Returns the spec that the family makes, and the logits of its model with `change` made to that spec; None
    instead of logits if the checkpoint does not fit such a model."""
    original, specs = DecoderForCausalLM.__init__, []

    def init(self: DecoderForCausalLM, hf: HFConfig, spec: DecoderSpec) -> None:
        specs.append(spec)
        original(self, hf, dataclasses.replace(spec, **change))

    with monkeypatch.context() as patch:
        patch.setattr(DecoderForCausalLM, "__init__", init)
        try:
            logits = quire_logits(load(path), random_tokens(300))
        except (QuireError, AssertionError, KeyError, TypeError, RuntimeError):
            logits = None
    return specs[0], logits


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])
def test_every_switch_of_a_family_matters(family: str, tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(family)
    spec, expected = logits_with(path, {}, monkeypatch)
    changes: dict[str, dict[str, Any]] = {}
    for field in dataclasses.fields(DecoderSpec):
        default = getattr(DEFAULTS, field.name)
        if field.name not in SAME_IN_FLOAT32 | {"layers", "ropes"} and getattr(spec, field.name) != default:
            changes[field.name] = {field.name: default}
    for field in dataclasses.fields(LayerSpec):
        default = getattr(LAYER_DEFAULTS, field.name)
        if any(getattr(layer, field.name) != default for layer in spec.layers):
            layers = tuple(dataclasses.replace(layer, **{field.name: default}) for layer in spec.layers)
            changes[f"layers.{field.name}"] = {"layers": layers}
    if spec.latent is not None:
        changes.pop("rope_dims", None)  # transformers writes the same size as head_dim
    changes["norm_eps"] = {"norm_eps": 0.01}
    survivors = []
    for name, change in changes.items():
        _, found = logits_with(path, change, monkeypatch)
        if found is not None and torch.allclose(found, expected, rtol=0, atol=TOLERANCE):
            survivors.append(name)
    assert not survivors

"""Norms of transformers are recognized by their answers, and those that do more are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from quire.worker.fallback.adoption import AdoptedNorm, recognize_norm
from quire.worker.fallback.model import FallbackForCausalLM
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import NormSpec


def norm(kind: Any, **options: Any) -> nn.Module:
    """Returns a norm with random weights in bfloat16."""
    module: nn.Module = kind(96, eps=1e-5, **options)
    weight = torch.randn(96, generator=torch.Generator().manual_seed(3))
    module.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("kind", "offset", "wide"), [(LlamaRMSNorm, 0.0, False), (Olmo2RMSNorm, 0.0, True), (GemmaRMSNorm, 1.0, True)]
)
def test_each_way_of_rounding_is_recognized(kind: Any, offset: float, wide: bool) -> None:
    assert recognize_norm(norm(kind)) == NormSpec(eps=1e-5, weight_offset=offset, scale_in_float32=wide)


class Shifted(LlamaRMSNorm):
    """A norm that adds something."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 0.01


class OtherEps(LlamaRMSNorm):
    """A norm that does not use its `variance_epsilon`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.variance_epsilon, kept = 1e-3, self.variance_epsilon
        answer: Tensor = super().forward(hidden_states)
        self.variance_epsilon = kept
        return answer


@pytest.mark.parametrize("kind", [Shifted, OtherEps])
def test_a_norm_that_does_something_else_is_left_alone(kind: Any) -> None:
    assert recognize_norm(norm(kind)) is None


@pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.Linear(8, 1), nn.Identity()])
def test_other_modules_are_no_norms(module: nn.Module) -> None:
    assert recognize_norm(module) is None


def test_all_norms_of_a_model_are_adopted() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    causal: Any = LlamaForCausalLM(config).eval()
    FallbackForCausalLM().take(causal, TORCH_KERNELS)
    assert sum(isinstance(module, AdoptedNorm) for module in causal.modules()) == 2 * 2 + 1

"""Modules of transformers are recognized by their answers, and those that do more are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import NewGELUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from quire.worker.fallback.adoption import AdoptedActivation, AdoptedNorm, recognize_activation, recognize_norm
from quire.worker.fallback.model import FallbackForCausalLM
from quire.worker.fallback.rotation import AdoptedRotary
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
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


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *((nn.SiLU(), "silu"), (nn.GELU(), "gelu"), (NewGELUActivation(), "gelu_fast"), (nn.ReLU(), "relu")),
        *((nn.LeakyReLU(), None), (nn.Identity(), None), (nn.Softmax(dim=-1), None), (nn.PReLU(), None)),
    ],
)
def test_activations_are_recognized(module: nn.Module, name: str | None) -> None:
    assert recognize_activation(module) == name


def tiny_llama() -> Any:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    causal: Any = LlamaForCausalLM(config)
    return causal.eval()


def num_adopted(causal: Any, kind: type[nn.Module]) -> int:
    FallbackForCausalLM().take(causal, TORCH_KERNELS, 64)
    return sum(isinstance(module, kind) for module in causal.modules())


@pytest.mark.parametrize(("kind", "count"), [(AdoptedNorm, 2 * 2 + 1), (AdoptedActivation, 2), (AdoptedRotary, 1)])
def test_all_such_modules_of_a_model_are_adopted(kind: type[nn.Module], count: int) -> None:
    assert num_adopted(tiny_llama(), kind) == count


def turned_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return ROTATE(q, k, cos, -sin)


def keys_as_they_are(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return ROTATE(q, k, cos, sin)[0], k


ROTATE: Any = modeling_llama.apply_rotary_pos_emb


@pytest.mark.parametrize("rotate", [turned_back, keys_as_they_are])
def test_another_rotation_is_left_alone(rotate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    assert num_adopted(tiny_llama(), AdoptedRotary) == 0


class KeysAreValues(modeling_llama.LlamaAttention):
    """Attention that would see values rotated, too, by a kernel that works in place."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, mask = kwargs["hidden_states"], kwargs["attention_mask"]
        q, k = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q_proj, self.k_proj))
        turned, keys = apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
        attend = ATTENTION[self.config._attn_implementation]
        answer = attend(self, turned, keys, k, mask, scaling=self.scaling)[0]
        return self.o_proj(answer.flatten(2)), None


apply_rotary_pos_emb: Any = ROTATE
ATTENTION: Any = vars(modeling_llama)["ALL_ATTENTION_FUNCTIONS"]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_rotation_whose_inputs_are_used_again_is_left_alone(kernels: str, library: NativeLibrary) -> None:
    causal = tiny_llama()
    for layer in causal.model.layers:
        layer.self_attn.__class__ = KeysAreValues
    native = NativeKernels(Context(library, 1, "portable"))
    FallbackForCausalLM().take(causal, native if kernels == "native" else TORCH_KERNELS, 64)
    assert isinstance(causal.model.rotary_emb, AdoptedRotary) == (kernels == "torch")

"""Norms, activations, linear maps and embeddings against torch's own, and against the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import UnsupportedModelError
from quire.worker.kernels.specs import ACTIVATIONS, gated, get_activation, soft_cap
from quire.worker.layers.linear import Embedding, Linear, PackedLinear
from quire.worker.layers.norm import LayerNorm, RMSNorm
from quire.worker.layers.weights import checkpoint_tensors

GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def _seed() -> None:
    GENERATOR.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def randomize(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.copy_(randn(*parameter.shape))


def test_the_rms_norm_equals_that_of_torch() -> None:
    norm, x = RMSNorm(8, 1e-3), randn(5, 8)
    randomize(norm)
    torch.testing.assert_close(norm(x), functional.rms_norm(x, (8,), norm.weight, 1e-3))


def test_rms_norm_offset_and_rounding() -> None:
    """Gemma's form: (1 + w) is applied before the result is rounded to the model's type, Llama's w after."""
    x = randn(64, 8).bfloat16()
    gemma, llama = RMSNorm(8, 1e-6, weight_offset=1.0, scale_in_float32=True), RMSNorm(8, 1e-6)
    gemma.weight.data = randn(8).bfloat16()
    llama.weight.data = gemma.weight.data
    normed = functional.rms_norm(x.float(), (8,), None, 1e-6)
    assert torch.equal(gemma(x), (normed * (1.0 + gemma.weight.float())).bfloat16())
    assert torch.equal(llama(x), normed.bfloat16() * llama.weight)


def test_rms_norm_of_large_values_in_float16() -> None:
    """The sum of squares is float32: 300^2 * 8 would overflow float16."""
    norm = RMSNorm(8, 1e-6)
    norm.weight.data = torch.ones(8, dtype=torch.float16)
    assert torch.equal(norm(torch.full((1, 8), 300.0, dtype=torch.float16)), torch.ones(1, 8, dtype=torch.float16))


def test_the_layer_norm_equals_that_of_torch() -> None:
    norm, x = LayerNorm(8), randn(5, 8)
    randomize(norm)
    torch.testing.assert_close(norm(x), functional.layer_norm(x, (8,), norm.weight, norm.bias))
    torch.testing.assert_close(LayerNorm(8, affine=False)(x), functional.layer_norm(x, (8,)))


def test_norm_rows_do_not_see_each_other() -> None:
    norm, x = RMSNorm(48, 1e-6), randn(9, 48)
    randomize(norm)
    assert torch.equal(norm(x), torch.cat([norm(row) for row in x.split(1)]))


def test_activations_equal_those_of_torch() -> None:
    x = randn(4, 6)
    torch.testing.assert_close(gated("silu", x), functional.silu(x[:, :3]) * x[:, 3:])
    torch.testing.assert_close(get_activation("gelu_pytorch_tanh")(x), functional.gelu(x, approximate="tanh"))
    with pytest.raises(UnsupportedModelError, match="activation 'swish9' is not implemented; known are gelu"):
        get_activation("swish9")
    assert all(callable(f) for f in ACTIVATIONS.values())


def test_a_soft_cap_bounds_every_value() -> None:
    x = torch.tensor([-1e9, -1.0, 0.0, 1e-3, 1e9])
    torch.testing.assert_close(soft_cap(x, 5.0), torch.tensor([-5.0, 5 * torch.tanh(torch.tensor(-0.2)), 0, 1e-3, 5.0]))
    assert soft_cap(x, None) is x


def test_linear_and_embedding() -> None:
    linear, embedding, x = Linear(6, 4, bias=True), Embedding(10, 6), randn(3, 6)
    randomize(linear)
    randomize(embedding)
    torch.testing.assert_close(linear(x), x @ linear.weight.T + linear.bias)
    assert torch.equal(embedding(torch.tensor([7, 7, 0])), embedding.weight[[7, 7, 0]])
    assert not any(p.requires_grad for p in [*linear.parameters(), *embedding.parameters()])


def test_packed_linear_is_its_parts_side_by_side() -> None:
    parent = nn.Module()
    parent.qkv = PackedLinear(6, {"q": 4, "k": 2, "v": 2}, bias=True)
    views = checkpoint_tensors(nn.ModuleDict({"layer": parent}))
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "layer.q.weight": (4, 6),
        "layer.k.weight": (2, 6),
        "layer.v.weight": (2, 6),
        "layer.q.bias": (4,),
        "layer.k.bias": (2,),
        "layer.v.bias": (2,),
    }
    for view in views.values():
        view.copy_(randn(*view.shape))  # fills the one matrix
    x = randn(3, 6)
    expected = [functional.linear(x, views[f"layer.{part}.weight"], views[f"layer.{part}.bias"]) for part in "qkv"]
    torch.testing.assert_close(parent.qkv(x), torch.cat(expected, dim=-1))

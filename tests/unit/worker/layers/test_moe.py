"""Experts against the definition: every token's chosen experts, one at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import Experts, MoE, MoESpec
from quire.worker.layers.weights import checkpoint_tensors

HIDDEN = 8
SPEC = MoESpec(num_experts=5, expert_size=6, router=RouterSpec(num_experts_per_token=2, normalize=True))


def make_moe(spec: MoESpec, seed: int = 0) -> MoE:
    moe = MoE(spec, HIDDEN, "silu")
    generator = torch.Generator().manual_seed(seed)
    for parameter in moe.parameters():
        parameter.data.copy_(torch.randn(*parameter.shape, generator=generator))
    return moe


def one_token(moe: MoE, x: Tensor) -> Tensor:
    """The definition, for one token [hidden]."""
    probabilities = torch.softmax(moe.gate.weight @ x, dim=0)
    weights, ids = probabilities.topk(moe.spec.router.num_experts_per_token)
    if moe.spec.router.normalize:
        weights = weights / weights.sum()
    size, answer = moe.spec.expert_size, torch.zeros(HIDDEN)
    for weight, expert in zip(weights, ids.tolist(), strict=True):
        gate_up = moe.experts.gate_up_proj[expert] @ x
        inner = functional.silu(gate_up[:size]) * gate_up[size:]
        answer += weight * (moe.experts.down_proj[expert] @ inner)
    return answer


@given(
    num_tokens=st.integers(0, 20),
    num_experts=st.integers(1, 9),
    k=st.integers(1, 4),
    normalize=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_definition(num_tokens: int, num_experts: int, k: int, normalize: bool, seed: int) -> None:
    rule = RouterSpec(num_experts_per_token=min(k, num_experts), normalize=normalize)
    spec = MoESpec(num_experts=num_experts, expert_size=6, router=rule)
    moe = make_moe(spec, seed)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    expected = torch.stack([one_token(moe, row) for row in x]) if num_tokens else x
    torch.testing.assert_close(moe(x), expected, rtol=1e-4, atol=1e-4)


def test_idle_experts_are_not_touched() -> None:
    """An expert that was not chosen may hold anything, even NaN."""
    moe = make_moe(SPEC)
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    ids, weights = torch.tensor([[0, 3], [3, 0], [0, 3], [3, 4]]), torch.full((4, 2), 0.5)
    expected = moe.experts(x, ids, weights)
    moe.experts.gate_up_proj.data[[1, 2]] = torch.nan
    assert torch.equal(moe.experts(x, ids, weights), expected)
    assert not expected.isnan().any()


def test_the_order_of_tokens_does_not_matter() -> None:
    moe, x = make_moe(SPEC), torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(2))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(moe(x[order]), moe(x)[order])


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_the_names_of_a_checkpoint_find_their_weights(names: tuple[str, str, str]) -> None:
    gate, up, down = names
    spec = MoESpec(
        num_experts=2,
        expert_size=3,
        router=RouterSpec(num_experts_per_token=1, normalize=False),
        gate_name=gate,
        up_name=up,
        down_name=down,
    )
    views = checkpoint_tensors(torch.nn.ModuleDict({"mlp": MoE(spec, HIDDEN, "silu")}))
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "mlp.gate.weight": (2, HIDDEN),
        **{f"mlp.experts.{e}.{n}.weight": (3, HIDDEN) for e in range(2) for n in (gate, up)},
        **{f"mlp.experts.{e}.{down}.weight": (HIDDEN, 3) for e in range(2)},
    }


def test_experts_keep_the_type_of_their_input() -> None:
    experts = Experts(SPEC, HIDDEN, "silu").to(torch.bfloat16)
    for parameter in experts.parameters():
        parameter.data.fill_(0.1)
    x = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
    assert experts(x, torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)).dtype == torch.bfloat16

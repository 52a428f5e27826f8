"""Mixture of experts: a router sends each token to its k best MLPs and adds their answers (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.worker.kernels.base import PLAIN, Kernels, LinearKernel, LinearSpec
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.layers.activation import get_activation
from quire.worker.layers.linear import Linear
from quire.worker.layers.weights import GIVEN_BACK, forget, weight

ExpertKernels = list[tuple[LinearKernel, LinearKernel]]
"""gate_up_proj and down_proj of each expert."""


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The experts of one layer, and how the checkpoint names their three matrices."""

    num_experts: int
    num_experts_per_token: int
    expert_size: int
    normalize: bool
    """Scale the chosen experts' weights to a sum of 1."""
    weights_in_float32: bool = True
    """False rounds the experts' weights to the model's type."""
    gate_name: str = "gate_proj"
    up_name: str = "up_proj"
    down_name: str = "down_proj"


class Experts(nn.Module):
    """All experts' matrices: gate_up_proj [num_experts, 2 * expert_size, hidden], down_proj [num_experts, hidden,
    expert_size]."""

    packed_parameters = ("gate_up_proj", "down_proj")

    def __init__(self, spec: MoESpec, hidden_size: int, activation: str) -> None:
        super().__init__()
        get_activation(activation)
        self.spec = spec
        self.inner = LinearSpec(activation=activation, gated=True)
        self._kernels: ExpertKernels | None = None
        self.gate_up_proj = weight(spec.num_experts, 2 * spec.expert_size, hidden_size)
        self.down_proj = weight(spec.num_experts, hidden_size, spec.expert_size)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See PackedWeights."""
        spec, size = self.spec, self.spec.expert_size
        for expert in range(spec.num_experts):
            gate_up = self.gate_up_proj.data[expert]
            yield f"experts.{expert}.{spec.gate_name}.weight", gate_up[:size]
            yield f"experts.{expert}.{spec.up_name}.weight", gate_up[size:]
            yield f"experts.{expert}.{spec.down_name}.weight", self.down_proj.data[expert]

    def prepare(self, kernels: Kernels) -> ExpertKernels:
        """See Prepared."""
        self._kernels = made = [
            (kernels.linear(gate_up, None, self.inner), kernels.linear(down, None, PLAIN))
            for gate_up, down in zip(self.gate_up_proj.data, self.down_proj.data, strict=True)
        ]
        if not kernels.keeps_weights:
            forget(self, "gate_up_proj")
            forget(self, "down_proj")
        return made

    def discard(self) -> None:
        """See Prepared."""
        self._kernels = GIVEN_BACK

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Weighted sum of each token's experts.

        x: [num_tokens, hidden]; expert_ids, expert_weights: [num_tokens, k]. Tokens are sorted by expert, so an expert
        runs once on its own tokens and idle experts cost nothing. A token's answers are added in the order of its own
        choices, whatever else is in the batch.
        """
        (num_tokens, k), hidden = expert_ids.shape, x.shape[1]
        order = expert_ids.flatten().argsort(stable=True)  # [num_tokens * k] choices, by expert
        counts = torch.bincount(expert_ids.flatten(), minlength=self.spec.num_experts).tolist()
        answers = x.new_empty(num_tokens * k, hidden)  # [num_tokens * k, hidden], a row per choice
        kernels = self._kernels or self.prepare(TORCH_KERNELS)
        for (gate_up, down), choices in zip(kernels, torch.split(order, counts), strict=True):
            if len(choices):
                answers[choices] = down(gate_up(x[choices // k]))
        weighted = answers.view(num_tokens, k, hidden) * expert_weights.unsqueeze(-1)  # [num_tokens, k, hidden]
        return weighted.sum(dim=1).to(x.dtype)


class MoE(nn.Module):
    """Router and experts. The router's matrix is called `gate` in checkpoints."""

    def __init__(self, spec: MoESpec, hidden_size: int, activation: str) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Linear(hidden_size, spec.num_experts)
        self.experts = Experts(spec, hidden_size, activation)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]; `residual`, of that shape, is added."""
        probabilities = self.gate(x).float().softmax(dim=-1)  # [num_tokens, num_experts]
        weights, expert_ids = probabilities.topk(self.spec.num_experts_per_token, dim=-1)  # [num_tokens, k] each
        if self.spec.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if not self.spec.weights_in_float32:
            weights = weights.to(x.dtype)
        answer: Tensor = self.experts(x, expert_ids, weights)
        return answer if residual is None else residual + answer

"""Mixture of experts: a router sends each token to its k best MLPs and adds their answers (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.config.quantization import QuantizationScheme
from quire.worker.kernels.base import ExpertsKernel, Kernels, RouterKernel
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import LOGITS, RouterSpec, get_activation
from quire.worker.layers.linear import Linear
from quire.worker.layers.weights import GIVEN_BACK, forget, weight
from quire.worker.quantization.weight import Kind, QuantizedWeight, quantize, same_kind


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


@dataclass(frozen=True)
class QuantizedExperts:
    """Quantized matrices of all experts: each list of one kind."""

    gate_up: Sequence[QuantizedWeight]
    """(2 * expert_size, hidden) each."""
    down: Sequence[QuantizedWeight]
    """(hidden, expert_size) each."""

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in (*self.gate_up, *self.down))

    def to(self, device: torch.device) -> QuantizedExperts:
        """The same on `device`."""
        return QuantizedExperts([w.to(device) for w in self.gate_up], [w.to(device) for w in self.down])


class Experts(nn.Module):
    """All experts' matrices: gate_up_proj [num_experts, 2 * expert_size, hidden], down_proj [num_experts, hidden,
    expert_size]. Is a QuantizableWeights; the kinds are those of the two."""

    packed_parameters = ("gate_up_proj", "down_proj")

    def __init__(self, spec: MoESpec, hidden_size: int, activation: str) -> None:
        super().__init__()
        get_activation(activation)
        self.spec = spec
        self.activation = activation
        self.scheme: QuantizationScheme | None = None
        self.quantized_bytes: int | None = None
        self._stored: QuantizedExperts | None = None
        self._kernel: ExpertsKernel | None = None
        self.gate_up_proj = weight(spec.num_experts, 2 * spec.expert_size, hidden_size)
        self.down_proj = weight(spec.num_experts, hidden_size, spec.expert_size)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        spec, size = self.spec, self.spec.expert_size
        for expert in range(spec.num_experts):
            gate_up = self.gate_up_proj.data[expert]
            yield f"experts.{expert}.{spec.gate_name}.weight", gate_up[:size]
            yield f"experts.{expert}.{spec.up_name}.weight", gate_up[size:]
            yield f"experts.{expert}.{spec.down_name}.weight", self.down_proj.data[expert]

    def store(self, parts: Sequence[QuantizedWeight]) -> bool:
        gate_up, down = [part for i, part in enumerate(parts) if i % 3 < 2], list(parts[2::3])
        if not (same_kind(gate_up) and same_kind(down)):
            return False
        pairs = zip(gate_up[::2], gate_up[1::2], strict=True)
        self._stored = QuantizedExperts([QuantizedWeight.stack(pair) for pair in pairs], down)
        return True

    @property
    def stored_kinds(self) -> tuple[Kind, ...]:
        return () if self._stored is None else (self._stored.gate_up[0].kind, self._stored.down[0].kind)

    def store_outlines(self, kinds: Sequence[Kind]) -> None:
        both = zip((self.gate_up_proj, self.down_proj), kinds, strict=False)
        outlines = [[QuantizedWeight.outline(block.shape[1:], kind)] * len(block) for block, kind in both]
        self._stored = QuantizedExperts(*outlines) if outlines else None

    def prepare(self, kernels: Kernels) -> ExpertsKernel:
        quantized = self._quantized_experts(kernels)
        self.quantized_bytes = None if quantized is None else quantized.num_bytes
        if quantized is None:
            self._kernel = kernel = kernels.experts(self.gate_up_proj.data, self.down_proj.data, self.activation)
        else:
            self._kernel = kernel = kernels.quantized_experts(quantized.gate_up, quantized.down, self.activation)
        if quantized is not None or not kernels.keeps_weights:
            forget(self, "gate_up_proj")
            forget(self, "down_proj")
        return kernel

    def _quantized_experts(self, kernels: Kernels) -> QuantizedExperts | None:
        """Returns the experts in integers, if they were stored or are to be quantized so and `kernels` can compute with
        them."""
        experts, self._stored = self._stored, None
        if experts is not None:
            experts = experts.to(self.gate_up_proj.device)
        elif self.scheme is not None:
            scheme = self.scheme
            experts = QuantizedExperts(
                *([quantize(w, scheme) for w in block.data] for block in (self.gate_up_proj, self.down_proj))
            )
        if experts is None or (kernels.can_quantize(experts.gate_up[0]) and kernels.can_quantize(experts.down[0])):
            return experts
        for block, weights in ((self.gate_up_proj, experts.gate_up), (self.down_proj, experts.down)):
            for plain, quantized in zip(block.data, weights, strict=True):
                if not quantized.is_outline:
                    plain.copy_(quantized.dequantize())
        return None

    def discard(self) -> None:
        self._kernel = GIVEN_BACK

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the weighted sum of each token's experts.

        x: [num_tokens, hidden]; expert_ids: [num_tokens, k] int64; expert_weights: [num_tokens, k]. An expert runs
        once, on its own tokens, and experts without tokens cost nothing. A token's outputs are added in the order of
        its own choices, independent of the rest of the batch; `residual`, of x's shape, is added.
        """
        return (self._kernel or self.prepare(TORCH_KERNELS))(x, expert_ids, expert_weights, residual)


class MoE(nn.Module):
    """Router and experts. The router's matrix is called `gate` in checkpoints; its sums stay in float32."""

    def __init__(self, spec: MoESpec, hidden_size: int, activation: str) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Linear(hidden_size, spec.num_experts, spec=LOGITS)
        self.experts = Experts(spec, hidden_size, activation)
        self._router: RouterKernel | None = None

    def prepare(self, kernels: Kernels) -> RouterKernel:
        spec = RouterSpec(
            num_experts_per_token=self.spec.num_experts_per_token,
            normalize=self.spec.normalize,
            weights_in_float32=self.spec.weights_in_float32,
        )
        self._router = router = kernels.router(spec, self.gate.weight.dtype)
        return router

    def discard(self) -> None:
        self._router = GIVEN_BACK

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [num_tokens, hidden] to [num_tokens, hidden]; `residual`, of that shape, is added."""
        ids, weights = (self._router or self.prepare(TORCH_KERNELS))(self.gate(x))  # [num_tokens, k] each
        answer: Tensor = self.experts(x, ids, weights, residual)
        return answer

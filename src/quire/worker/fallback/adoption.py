"""Matrices and norms of transformers' modules on Quire's kernels.

A module keeps its place in the tree and gets another class, so that code which wraps or subclasses it goes on working:
the new class answers in place of nn.Linear, nn.Embedding or the loop over experts, below what a family's subclass adds.
Weights that kernels have packed leave their shape on the meta device.

A matrix whose weight is read by other code than its own forward stays torch's: watching classes find that out while
the model is discovered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from quire.config.quantization import MAX_INT8_INPUTS, QuantizationScheme, is_quantizable_name
from quire.worker.kernels.base import (
    ActivationKernel,
    EmbeddingKernel,
    ExpertsKernel,
    Kernels,
    LinearKernel,
    NormKernel,
)
from quire.worker.kernels.reference import rms_norm
from quire.worker.kernels.specs import ACTIVATIONS, LOGITS, PLAIN, ExpertsSpec, NormSpec
from quire.worker.layers.weights import forget
from quire.worker.quantization.weight import quantize

NAME = "quire"


class AdoptedLinear(nn.Linear):
    """A linear layer whose product is a kernel's."""

    kernel: LinearKernel

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] to [..., out_features]."""
        return self.kernel(input.reshape(-1, input.shape[-1])).view(*input.shape[:-1], -1)


class AdoptedEmbedding(nn.Embedding):
    """A table whose rows a kernel looks up."""

    kernel: EmbeddingKernel

    def forward(self, input: Tensor) -> Tensor:
        """input: [...] to [..., embedding_dim]."""
        return self.kernel.lookup(input.reshape(-1)).view(*input.shape, -1)


class TiedHead(nn.Linear):
    """A logits head that is the table of an `AdoptedEmbedding`."""

    kernel: EmbeddingKernel

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] to float32 [..., out_features]."""
        logits = self.kernel.project(input.reshape(-1, input.shape[-1])).view(*input.shape[:-1], -1)
        return logits if self.bias is None else logits + self.bias.float()


class AdoptedNorm(nn.Module):
    """A root mean square norm that a kernel computes."""

    kernel: NormKernel

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim] to the same shape."""
        return self.kernel(x.reshape(-1, x.shape[-1])).view(x.shape)


class AdoptedActivation(nn.Module):
    """An element-wise function that a kernel computes."""

    kernel: ActivationKernel

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., dim] to the same shape."""
        return self.kernel(input.reshape(-1, input.shape[-1])).view(input.shape)


class _Glimpse(Tensor):
    """A weight that notes in `readers` when its values are read; its type and shape may be."""

    owner: nn.Module

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _OUTLINE:
            for value in (*args, *(kwargs or {}).values()):
                for each in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(each, _Glimpse):
                        each.owner.__dict__["is_read_elsewhere"] = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_NORMS = ((0.0, False), (0.0, True), (1.0, True))
"""Offsets of weights that norms have, and whether they multiply in float32."""
_OUTLINE = frozenset((Tensor.dtype.__get__, Tensor.shape.__get__, Tensor.size, Tensor.dim))  # type: ignore[attr-defined]
"""Questions that a weight on the meta device answers as before."""


class _Watched(nn.Module):
    """A matrix that notes when code other than its forward reads the values of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        self.__dict__["_is_inside"] = True
        try:
            forward: Any = super().forward
            answer: Tensor = forward(input)
            return answer
        finally:
            self.__dict__["_is_inside"] = False

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name != "weight" or self.__dict__.get("_is_inside"):
            return value
        glimpse = value.detach().as_subclass(_Glimpse)
        glimpse.owner = self
        return glimpse


class _WatchedLinear(_Watched, nn.Linear):
    pass


class _WatchedEmbedding(_Watched, nn.Embedding):
    pass


def _answer_by(module: Any, base: type[nn.Module], original: type[nn.Module]) -> None:
    """Gives `module`, of class `original`, `base` in place of nn.Linear or nn.Embedding."""
    is_plain = original in (nn.Linear, nn.Embedding)
    module.__class__ = base if is_plain else type(original.__name__, (original, base), {})


@dataclass
class Matrices:
    """The linear layers and tables of a model by their paths, with their classes."""

    originals: dict[str, type[nn.Module]]
    read_elsewhere: set[str] = field(default_factory=set)


@contextmanager
def watching(model: nn.Module) -> Iterator[Matrices]:
    """Watches the matrices of `model` inside the block."""
    modules: dict[str, Any] = {p: m for p, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    found = Matrices({path: type(module) for path, module in modules.items()})
    for module in modules.values():
        watched: Any = _WatchedLinear if isinstance(module, nn.Linear) else _WatchedEmbedding
        _answer_by(module, watched, type(module))
    try:
        yield found
    finally:
        for path, module in modules.items():
            module.__class__ = found.originals[path]
            module.__dict__.pop("_is_inside", None)
            if module.__dict__.pop("is_read_elsewhere", False):
                found.read_elsewhere.add(path)


class Adopter:
    """Puts the matrices of one model on `kernels`, one after another."""

    def __init__(self, kernels: Kernels, matrices: Matrices, head: nn.Module | None, scheme: QuantizationScheme | None):
        self._kernels = kernels
        self._matrices = matrices
        self._head = head
        self._scheme = scheme
        self._tables: dict[int, EmbeddingKernel] = {}
        """Kernels of tables by the id of their parameter."""
        self._left = set(matrices.read_elsewhere)
        self.num_bytes = 0
        """Memory of the weights that kernels hold."""

    def adopt(self, model: nn.Module) -> list[str]:
        """Returns the paths of the matrices that stay torch's."""
        weights = {path: model.get_submodule(path).weight for path in self._matrices.originals}
        users: dict[int, list[str]] = {}
        for path, weight in weights.items():
            users.setdefault(id(weight), []).append(path)
        for paths in users.values():
            self._adopt_shared(model, paths)
        for path, module in list(model.named_modules()):
            if module._parameters.keys() >= {"gate_up_proj", "down_proj"} and hasattr(module, "has_gate"):
                self._adopt_experts(path, module)
            elif (norm := recognize_norm(module)) is not None:
                module.__dict__["kernel"] = self._kernels.rms_norm(module.get_parameter("weight").data, norm)
                module.__class__ = type(type(module).__name__, (AdoptedNorm, type(module)), {})
            elif (name := recognize_activation(module)) is not None:
                module.__dict__["kernel"] = self._kernels.activation(name)
                module.__class__ = type(type(module).__name__, (AdoptedActivation, type(module)), {})
        return sorted(self._left)

    def _adopt_shared(self, model: nn.Module, paths: list[str]) -> None:
        """Adopts the modules that share one weight."""
        modules: list[Any] = [model.get_submodule(path) for path in paths]
        tables = [m for m in modules if isinstance(m, nn.Embedding)]
        linears = [m for m in modules if isinstance(m, nn.Linear)]
        is_plain = all(m.max_norm is None for m in tables) and len(linears) < 2 and len(tables) < 2
        if (
            not is_plain
            or any(path in self._left for path in paths)
            or (tables and linears and linears[0] is not self._head)
        ):
            self._left.update(paths)
            return
        weight = modules[0].weight.data
        if not weight.is_floating_point():
            self._left.update(paths)
        elif tables:
            kernel = self._kernels.embedding(weight, LOGITS if linears else None)
            for path, module in zip(paths, modules, strict=True):
                base = AdoptedEmbedding if isinstance(module, nn.Embedding) else TiedHead
                self._give(path, module, base, kernel)
            self.num_bytes += weight.nbytes
        else:
            self._adopt_linear(paths[0], linears[0])

    def _adopt_linear(self, path: str, module: nn.Linear) -> None:
        weight, bias = module.weight.data, None if module.bias is None else module.bias.data
        scheme = self._scheme if is_quantizable_name(path) else None
        if scheme is not None and scheme.quantizes_inputs and weight.shape[1] > MAX_INT8_INPUTS:
            scheme = None
        quantized = None if scheme is None else quantize(weight, scheme)
        if quantized is not None and self._kernels.can_quantize(quantized):
            self.num_bytes += quantized.num_bytes
            self._give(path, module, AdoptedLinear, self._kernels.quantized_linear(quantized, bias), packed=True)
            return
        spec = LOGITS if module is self._head else PLAIN
        self.num_bytes += weight.nbytes
        self._give(path, module, AdoptedLinear, self._kernels.linear(weight, bias, spec))

    def _give(self, path: str, module: nn.Module, base: type[nn.Module], kernel: Any, *, packed: bool = False) -> None:
        _answer_by(module, base, self._matrices.originals[path])
        module.__dict__["kernel"] = kernel
        if packed or not self._kernels.keeps_weights:
            forget(module, "weight")

    def _adopt_experts(self, path: str, module: Any) -> None:
        activation = _activation_of(module)
        is_plain = module.has_gate and not module.has_bias and module.is_concatenated and activation is not None
        if not is_plain or getattr(module, "has_post_expert_norm", False) or len(module._parameters) != 2:
            self._left.add(path)
            return
        gate_up, down = module.gate_up_proj.data, module.down_proj.data
        if module.is_transposed:
            gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        kernels, scheme, packed = self._kernels, self._scheme, False
        kernel: ExpertsKernel | None = None
        if scheme is not None and is_quantizable_name(path):
            both = [[quantize(weight, scheme) for weight in block] for block in (gate_up, down)]
            if kernels.can_quantize(both[0][0]) and kernels.can_quantize(both[1][0]):
                kernel, packed = (
                    kernels.quantized_experts(both[0], both[1], ExpertsSpec(activation=cast(str, activation))),
                    True,
                )
                self.num_bytes += sum(weight.num_bytes for block in both for weight in block)
        if kernel is None:
            kernel = kernels.experts(gate_up, down, ExpertsSpec(activation=cast(str, activation)))
            self.num_bytes += gate_up.nbytes + down.nbytes
        module.__dict__["kernel"] = kernel
        if packed or not kernels.keeps_weights or module.is_transposed:
            forget(module, "gate_up_proj")
            forget(module, "down_proj")


@torch.no_grad()
def recognize_norm(module: nn.Module) -> NormSpec | None:
    """Returns the spec of a root mean square norm, found by comparing outputs; None for any other module."""
    weight = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if len(module._parameters) != 1 or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    sizes = torch.tensor([1.0, 30.0, 1e-3, 0.0], device=weight.device)
    x = (torch.linspace(-3, 4, weight.shape[0], device=weight.device) * sizes[:, None]).to(weight.dtype)
    try:
        answer = module(x)
    except (TypeError, RuntimeError):
        return None
    specs = [NormSpec(eps=eps, weight_offset=offset, scale_in_float32=bool(wide)) for offset, wide in _NORMS]
    return next((spec for spec in specs if torch.equal(rms_norm(x, weight=weight, spec=spec), answer)), None)


@torch.no_grad()
def recognize_activation(module: nn.Module) -> str | None:
    """Returns our name of an element-wise function, found by comparing outputs; None for any other module."""
    if any(True for _ in module.children()) or module._parameters or module._buffers:
        return None
    x = torch.linspace(-12, 12, 384).view(2, 192)
    try:
        return _name_of(module(x), x, 1.0)
    except Exception:  # it is no function of one tensor
        return None


def _name_of(found: Tensor, x: Tensor, factor: Tensor | float) -> str | None:
    """Returns the name of the function that gives `found` as function(x) * factor."""
    same = [name for name, fn in ACTIVATIONS.items() if torch.allclose(found, fn(x) * factor, rtol=0, atol=1e-6)]
    return same[0] if same else None


def _activation_of(experts: Any) -> str | None:
    """Returns our name of the experts' gate: activation(gate) * up. None if it is another."""
    x = torch.linspace(-6, 6, 96)[None]
    try:
        found = experts._apply_gate(x)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return _name_of(found, *x.chunk(2, dim=-1))


def experts_forward(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Answers for the experts of any family: by our kernel where there is one, else by the family's own code."""
    kernel: ExpertsKernel | None = module.__dict__.get("kernel")
    if kernel is None or args or kwargs:
        answer: Tensor = type(module).forward.__wrapped__(module, hidden, ids, weights, *args, **kwargs)
        return answer
    rows = hidden.reshape(-1, hidden.shape[-1])
    return kernel(rows, ids.reshape(len(rows), -1).long(), weights.reshape(len(rows), -1).float()).view(hidden.shape)


ExpertsInterface.register(NAME, experts_forward)

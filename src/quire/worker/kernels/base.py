"""The kernels a model is built of. A `Kernels` makes them, each for one set of weights; layers call them.

Every kernel treats each row (token) by itself. Only native kernels promise that a row's bits do not depend on the rows
beside it; torch's matrix products do not.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from quire.worker.kernels.packs import Packs
from quire.worker.quantization.weight import QuantizedWeight
from quire.worker.sample.kernel import SamplingKernel


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """What a linear layer does beside its product."""

    activation: str | None = None
    """A name of layers/activation.py."""
    gated: bool = False
    """The weight is two matrices, one above the other: activation(first(x)) * second(x)."""
    float32_output: bool = False
    """Keep the float32 sums instead of rounding them to the type of x."""
    divisor: float = 1.0
    """Sums are divided by it."""
    soft_cap: float | None = None
    """c: then they become c * tanh(sums / c)."""


PLAIN = LinearSpec()
LOGITS = LinearSpec(float32_output=True)
TANH = LinearSpec(soft_cap=1.0)
"""tanh of the sums."""


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A root mean square norm: layers/norm.py."""

    eps: float
    weight_offset: float = 0.0
    scale_in_float32: bool = False


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How a mixture of experts chooses."""

    num_experts_per_token: int
    normalize: bool
    """Scale the chosen experts' weights to a sum of 1."""
    weights_in_float32: bool = True
    """False rounds the experts' weights to the model's type."""


@dataclass(frozen=True)
class Turns:
    """By how much the heads of each token turn: rows of tables of sine and cosine."""

    cos: Tensor
    """[num_positions, rotary_dim / 2], like `sin`."""
    sin: Tensor
    positions: Tensor
    """[n] int64"""

    @functools.cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens, [n, 1, rotary_dim / 2] each: same for every head."""
        return self.cos[self.positions].unsqueeze(1), self.sin[self.positions].unsqueeze(1)


class LinearKernel(Protocol):
    """y = x W^T + b, and what the spec adds."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [n, in_features] to [n, out_features]; `residual`, of that shape, is added last."""
        ...


class EmbeddingKernel(Protocol):
    """A table of vectors, which may also be a logits head."""

    def lookup(self, ids: Tensor) -> Tensor:
        """ids: [n] int64 to [n, dim]."""
        ...

    def project(self, x: Tensor) -> Tensor:
        """x: [n, dim] to its product with every row, [n, num_embeddings] float32."""
        ...


class NormKernel(Protocol):
    """Normalises rows."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [..., dim]; `residual` is added to the normalised rows."""
        ...


class RotationKernel(Protocol):
    """Norms of heads, if the family has them, and the rotation of queries and keys."""

    def __call__(self, query: Tensor, key: Tensor, turns: Turns | None) -> tuple[Tensor, Tensor]:
        """query: [n, num_heads * head_size]; key: [n, num_kv_heads * head_size]; `turns` of the n tokens; None for no
        rotation. May write into query and key; use what it returns."""
        ...


class ActivationKernel(Protocol):
    """An element-wise function."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, dim] to the same shape, or to [n, dim / 2] if gated."""
        ...


class RouterKernel(Protocol):
    """Chooses the experts of each token."""

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [n, num_experts] float32. Returns the k experts of each token, the best first: ids [n, k] int64, and
        their weights [n, k], from a softmax over all experts, for the experts kernel of the same `Kernels`."""
        ...


class ExpertsKernel(Protocol):
    """The gated MLPs of a mixture of experts."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [n, hidden]; ids: [n, k] int64; weights: [n, k]. Each token's weighted sum of its experts' answers,
        [n, hidden], added in the order of `ids`; `residual`, of that shape, is added. An expert nobody chose
        is not touched."""
        ...


class Kernels(ABC):
    """Makes kernels. They may keep the weights in a form of their own: `keeps_weights` says whether the tensors they
    were made from are still needed."""

    name: ClassVar[str]
    keeps_weights: ClassVar[bool]
    """True: kernels read the tensors they were made from; False: those may be freed."""

    @property
    def pack_format(self) -> str | None:
        """Names the form these kernels pack weights into: the same name means the same bytes. None: they pack none, and
        ask no `Packs` for memory."""
        return None

    @contextmanager
    def packing(self, packs: Packs) -> Iterator[None]:
        """Kernels made meanwhile take the memory of what they pack from `packs`. Where it has that already, the weight
        they are made of may be on the meta device."""
        yield

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None, spec: LinearSpec = PLAIN) -> LinearKernel:
        """weight: [out_features, in_features], bias: [out_features]."""

    @abstractmethod
    def can_quantize(self, weight: QuantizedWeight) -> bool:
        """Whether `quantized_linear` takes `weight`; otherwise it must be dequantized."""

    @abstractmethod
    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None, spec: LinearSpec = PLAIN) -> LinearKernel:
        """As `linear`, of weights in few bits; sums are float32, and what follows them is rounded once. `weight` is
        kept by no kernel that has a form of its own."""

    @abstractmethod
    def embedding(self, table: Tensor, head: LinearSpec | None) -> EmbeddingKernel:
        """table: [num_embeddings, dim]. `head` says how `project` ends; None if it is never called."""

    @abstractmethod
    def rms_norm(self, weight: Tensor, spec: NormSpec) -> NormKernel:
        """weight: [dim]."""

    @abstractmethod
    def rotation(
        self,
        head_size: int,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        spec: NormSpec | None = None,
    ) -> RotationKernel:
        """The norms' weights, [head_size] each, and their spec; None for none."""

    @abstractmethod
    def activation(self, name: str, gated: bool = False) -> ActivationKernel:
        """`name` is one of layers/activation.py."""

    @abstractmethod
    def router(self, spec: RouterSpec, dtype: torch.dtype) -> RouterKernel:
        """`dtype` is the model's type."""

    @abstractmethod
    def experts(self, gate_up: Tensor, down: Tensor, activation: str) -> ExpertsKernel:
        """gate_up: [num_experts, 2 * expert_size, hidden], the gates first; down: [num_experts, hidden,
        expert_size]."""

    @abstractmethod
    def quantized_experts(
        self, gate_up: Sequence[QuantizedWeight], down: Sequence[QuantizedWeight], activation: str
    ) -> ExpertsKernel:
        """As `experts`, of weights in few bits: one matrix for each expert, those of a list of one kind. They are kept
        by no kernel that has a form of its own."""

    @abstractmethod
    def sampling(self) -> SamplingKernel:
        """From logits to tokens."""

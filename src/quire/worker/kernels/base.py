"""The kernels a model is built of. A `Kernels` makes them, each for one set of weights; layers call them.

Every kernel treats each row (token) by itself. Only native kernels promise that a row's bits do not depend on the rows
beside it; torch's matrix products do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

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


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A root mean square norm: layers/norm.py."""

    eps: float
    weight_offset: float = 0.0
    scale_in_float32: bool = False


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

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """query: [n, num_heads * head_size]; key: [n, num_kv_heads * head_size]; cos, sin: [n, 1, rotary_dim / 2], or
        None for no rotation. May write into query and key; use what it returns."""
        ...


class ActivationKernel(Protocol):
    """An element-wise function."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, dim] to the same shape, or to [n, dim / 2] if gated."""
        ...


class Kernels(ABC):
    """Makes kernels. They may keep the weights in a form of their own: `keeps_weights` says whether the tensors they
    were made from are still needed."""

    name: ClassVar[str]
    keeps_weights: ClassVar[bool]
    """True: kernels read the tensors they were made from; False: those may be freed."""

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None, spec: LinearSpec = PLAIN) -> LinearKernel:
        """weight: [out_features, in_features], bias: [out_features]."""

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
    def sampling(self) -> SamplingKernel:
        """From logits to tokens."""

"""The kernels a model is built of. A `Kernels` makes them, each for one set of weights; layers call them.

Every kernel treats each row (token) by itself. Native kernels guarantee that a row's bits do not depend on the rows
beside it; torch's matrix products do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from quire.worker.kernels.barrier import PollingBarrier
from quire.worker.kernels.lora import AdapterBatch, AdapterSite, LowRank, LowRankShape, PackedLowRank, Take
from quire.worker.kernels.packs import Packs
from quire.worker.kernels.specs import (
    PLAIN,
    ExpertsSpec,
    LatentSizes,
    LinearSpec,
    NormSpec,
    RotaryAngles,
    RouterSpec,
    XieluSpec,
)
from quire.worker.quantization.weight import QuantizedWeight
from quire.worker.sample.kernel import SamplingKernel


class LinearKernel(Protocol):
    """y = x W^T + b, and what the spec adds."""

    site: AdapterSite | None
    """Adapters of this map, made by the same `Kernels` for its sizes and the type of x; None, at first: none."""

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x: [n, in_features] to [n, out_features]; `residual`, of that shape, is added last. `out`, of that shape,
        gets the result; its rows need not be adjacent."""
        ...


class EmbeddingKernel(Protocol):
    """A table of vectors, which may also be a logits head."""

    lookup_site: AdapterSite | None
    """Adapters of `lookup`: a site whose inputs are the vectors and whose outputs are their elements. Its inputs are
    all ids, also where the table holds the vectors of some only."""
    project_site: AdapterSite | None
    """Adapters of `project`: a site whose outputs are the vectors. Its batch has a row for each row of logits."""

    def lookup(self, ids: Tensor, residual: Tensor | None = None) -> Tensor:
        """ids: [n] int64 to [n, dim]; `residual`, of that shape, is added."""
        ...

    def lookup_share(self, ids: Tensor, first: int, out: Tensor) -> None:
        """Writes the vectors of those ids that the table holds, whose first row is for id `first`, into their rows of
        `out`, [n, dim]. Other rows stay as they are."""
        ...

    def project(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [n, dim] to its product with every row, [n, num_embeddings] float32. `out` is as in LinearKernel."""
        ...


class NormKernel(Protocol):
    """Normalises rows."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [..., dim]; `residual` is added to the normalised rows."""
        ...


class RotationKernel(Protocol):
    """Norms of heads, if the family has them, and the rotation of queries and keys."""

    def __call__(self, query: Tensor, key: Tensor, angles: RotaryAngles | None) -> tuple[Tensor, Tensor]:
        """query: [n, num_heads * head_size]; key: [n, num_kv_heads * head_size], or no heads; `angles` of the n
        tokens; None for no rotation. May write into query and key; use the returned tensors."""
        ...


class CopyKernel(Protocol):
    """Copies rows."""

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x: [n, dim]; `out`, of that shape, gets the copy; None: a new tensor."""
        ...


class BatchedLinearKernel(Protocol):
    """y[i, h] = x[i, h] W[h]^T: a linear layer for each head."""

    def __call__(self, x: Tensor, tail: Tensor | None = None) -> Tensor:
        """x: [n, heads, a]; tail: [n, heads, c], copied behind each head. Returns [n, heads, b + c]."""
        ...


class LatentKernel(Protocol):
    """Norm and rotation of latent attention."""

    def __call__(self, query: Tensor, key: Tensor, angles: RotaryAngles | None) -> tuple[Tensor, Tensor]:
        """query: [n, heads * (rotary + plain)]; key: [n, rank + rotary]. Norms the latent, and rotates the rotary
        parts; `angles` None for no rotation. May write into query and key; use the returned tensors."""
        ...


class ActivationKernel(Protocol):
    """An element-wise function."""

    def __call__(self, x: Tensor, factors: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x: [n, dim] to the same shape, or to [n, dim / 2] if gated. The result is multiplied by `factors`, [n, dim]
        or [n, dim * c], and then has that shape, each element for c adjacent factors; `residual` is added."""
        ...


class RouterKernel(Protocol):
    """Chooses the experts of each token."""

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [n, num_experts] float32. Returns the k experts of each token, the best first: ids [n, k] int64, and
        their weights [n, k], for the experts kernel of the same `Kernels`."""
        ...


class PooledTokens(Protocol):
    """The tokens of several engines, whose experts are computed together."""

    def share(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Takes x: [n, hidden] and ids: [n, k] of this engine's tokens. Returns those of all engines, and float32
        memory for the answers, a row for each choice of each token. After `wait` the tokens must not be read."""
        ...

    @property
    def own(self) -> range:
        """Numbers of this engine's tokens among all, in this step."""
        ...

    def wait(self, order: Callable[[], Tensor] | None = None) -> None:
        """Returns once all engines have written their answers. `order` returns the number of each answer's choice,
        among all choices of all tokens; None: the answers are in the order of the choices."""
        ...

    @property
    def is_remote(self) -> bool:
        """True if some of the engines are on other machines: no kernel exchanges anything with those by itself."""
        ...

    @property
    def step(self) -> Structure:
        """The numbers of tokens of the present step and the barrier, for a kernel that does all of this by itself:
        qk_pool_step."""
        ...

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor]:
        """Memory that all engines map, for such a kernel: the tokens' x, their ids, and the answers."""
        ...


@dataclass(frozen=True)
class ExpertsShare:
    """One worker's part of a mixture of experts: some outputs of every matrix, or whole experts."""

    num_experts: int
    """Number of experts of the mixture."""
    experts: Sequence[int]
    """Experts whose matrices the kernel has, in their order."""
    first: int
    """Place of the first of them in the order `places`."""
    places: Tensor | None
    """[num_experts] int32: an order in which each worker's experts are adjacent; None: the order of their numbers."""
    inner: range
    """Outputs that the kernel has of the gates, and of what they gate."""
    outputs: range
    """Outputs that it has of the second matrices."""
    meeting: Tensor
    """Memory that all workers write their parts of, a row for each choice of each token: inputs of the second matrices,
    or with whole experts their float32 outputs. The kernel decides on the order of rows."""
    ready: Callable[[int], None]
    """Returns once `meeting` is complete, of which the step has so many rows."""
    gather: Callable[[int, torch.dtype, Callable[[Tensor], object]], Tensor] | None
    """Makes the result whole, as `Gather.compute` does; None with whole experts: each worker computes all sums."""
    pool: PooledTokens | None = None
    """Tokens of several engines, each of which has whole experts; `meeting` is not used then. None: the workers compute
    the same tokens."""


class ExpertsKernel(Protocol):
    """The gated MLPs of a mixture of experts."""

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None, shared: Tensor | None = None
    ) -> Tensor:
        """x: [n, hidden]; ids: [n, k] int64; weights: [n, k]. Returns each token's weighted sum of its experts'
        outputs, [n, hidden], added in the order of `ids`; `shared` and then `residual`, of that shape, are added. The
        weights of an expert without tokens are not read."""
        ...

    def set_sites(self, gate_up: AdapterSite | None, down: AdapterSite | None) -> None:
        """Gives it the places of adapters, which have a group for each expert: of the first matrix, gates and what they
        gate, and of the second."""
        ...

    def set_share(self, share: ExpertsShare) -> None:
        """Sets which part of a mixture its matrices are."""
        ...

    def move_to(self, kernels: Kernels) -> None:
        """Computes with the threads of `kernels`, which pack as those do that made it."""
        ...


class Kernels(ABC):
    """Makes kernels. They may store the weights in a form of their own: `keeps_weights` is False if the tensors they
    were made from are no longer needed."""

    name: ClassVar[str]
    keeps_weights: ClassVar[bool]
    """True: kernels read the tensors they were made from. False: those may be freed."""

    @property
    def pack_format(self) -> str | None:
        """Name of the form these kernels pack weights into: the same name means the same bytes. None: they do not pack,
        and take no memory from `Packs`."""
        return None

    @property
    def identity(self) -> dict[str, str]:
        """Facts that decide the bits of results, as far as kernels do: the same facts mean the same bits."""
        return {"kernels": self.name, "torch": torch.__version__}

    @contextmanager
    def packing(self, packs: Packs) -> Iterator[None]:
        """Inside the block, kernels take the memory of packed weights from `packs`. The weight of a kernel that is
        packed there already may be on the meta device."""
        yield

    def release_memory(self) -> None:  # noqa: B027  # most keep none
        """Gives memory that is kept for results of later calls back to the system."""

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None, spec: LinearSpec = PLAIN) -> LinearKernel:
        """weight: [out_features, in_features], bias: [out_features]."""

    @abstractmethod
    def can_quantize(self, weight: QuantizedWeight) -> bool:
        """Returns True if `quantized_linear` accepts `weight`; otherwise it must be dequantized."""

    @abstractmethod
    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None, spec: LinearSpec = PLAIN) -> LinearKernel:
        """Makes a linear layer of quantized weights. Sums are float32, and what follows them is rounded once. Kernels
        that pack do not keep a reference to `weight`."""

    @abstractmethod
    def embedding(self, table: Tensor, head: LinearSpec | None) -> EmbeddingKernel:
        """table: [num_embeddings, dim]. `head` is what `project` computes after the product; None if it is never
        called."""

    @abstractmethod
    def batched_linear(self, weight: Tensor) -> BatchedLinearKernel:
        """weight: [heads, b, a]."""

    @abstractmethod
    def latent(self, sizes: LatentSizes, norm: Tensor, spec: NormSpec) -> LatentKernel:
        """norm: [rank], the weight of the latent's norm."""

    @abstractmethod
    def rms_norm(self, weight: Tensor, spec: NormSpec) -> NormKernel:
        """weight: [dim]."""

    @abstractmethod
    def layer_norm(
        self, dim: int, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, groups: int = 1
    ) -> NormKernel:
        """Makes the norm of each of `groups` parts of a row, of `dim` elements each. weight and bias: [dim], the same
        for every part, or [groups, dim]; None for none."""

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
        """`name` is a key of specs.ACTIVATIONS."""

    @abstractmethod
    def xielu(self, spec: XieluSpec) -> ActivationKernel:
        """Makes the activation of `specs.xielu`."""

    @abstractmethod
    def router(
        self,
        spec: RouterSpec,
        dtype: torch.dtype,
        choice_bias: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> RouterKernel:
        """`dtype` is the model's type. choice_bias: [num_experts] float32, added to scores while experts are chosen,
        not to weights; expert_scale: [num_experts], factors of the experts' weights."""

    @abstractmethod
    def experts(
        self, gate_up: Tensor, down: Tensor, spec: ExpertsSpec, biases: tuple[Tensor, Tensor] | None = None
    ) -> ExpertsKernel:
        """gate_up: [num_experts, 2 * expert_size, hidden], the gates first unless `spec` says otherwise; down:
        [num_experts, hidden, expert_size]; biases: [num_experts, 2 * expert_size] and [num_experts, hidden]."""

    @abstractmethod
    def quantized_experts(
        self,
        gate_up: Sequence[QuantizedWeight],
        down: Sequence[QuantizedWeight],
        spec: ExpertsSpec,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> ExpertsKernel:
        """Makes the experts of quantized weights: one matrix for each expert, all matrices of a list of one kind.
        Kernels that pack do not keep a reference to them."""

    def copier(self) -> CopyKernel:
        """Makes the kernel that copies rows."""
        return lambda x, out=None: x.clone() if out is None else out.copy_(x)

    def barrier(self, words: Tensor, rank: int, size: int, spin_ns: int) -> Callable[[], None]:
        """Makes the barrier of the ranks that share `words`, which raises BarrierError."""
        return PollingBarrier(words, rank, size)

    @abstractmethod
    def sampling(self) -> SamplingKernel:
        """Makes the sampling kernel."""

    @abstractmethod
    def adapter_batch(self) -> AdapterBatch:
        """Makes a batch without segments."""

    @abstractmethod
    def adapter_site(self, batch: AdapterBatch, shape: LowRankShape) -> AdapterSite:
        """Makes the site of a linear map, or of a mixture's experts, which are groups of one site."""

    @abstractmethod
    def pack_low_rank(
        self, parts: Sequence[LowRank | None], shape: LowRankShape, take: Take | None = None
    ) -> PackedLowRank:
        """Packs an adapter's change of a site; None: it does not change the part. The parts of one group stand after
        those of another. Kernels that pack take memory by `take`; None: from the allocator. Any thread may call it at
        any time. Raises ValueError if shapes do not fit."""

"""Rotary position embedding (Su et al. 2021) and its scalings for longer contexts.

A pair of elements (i, i + d/2) of a query or key is rotated by the angle position * inv_freq[i]. The scalings change
inv_freq, and some also the length of the rotated vector. All of it is computed in float32, in transformers' order of
operations: an ulp of inv_freq is a visible angle at position 100,000.

Two scalings (dynamic, longrope) depend on the sequence's length in their papers. Here the length is the engine's
context length, so that a token's rotation depends on its position only and the same request gives the same tokens,
however it was batched or chunked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.config.hf_config import RopeConfig
from quire.errors import UnsupportedModelError
from quire.worker.kernels.base import EmbeddingKernel, Kernels
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import RotaryAngles
from quire.worker.layers.weights import KernelModule

Scaling = Callable[[RopeConfig, int, int, int], tuple[Tensor, float]]
"""(rope, rotary_dim, trained_len, context_len) to (inv_freq [rotary_dim / 2], factor of sine and cosine)."""


def _default(rope: RopeConfig, dim: int, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope.rope_theta, dim), 1.0


def _linear(rope: RopeConfig, dim: int, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """Positions divided by a factor (position interpolation, Chen et al. 2023)."""
    return 1.0 / _wavelengths(rope.rope_theta, dim) / float(rope.params["factor"]), 1.0


def _dynamic(rope: RopeConfig, dim: int, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """A larger base beyond the trained length ("dynamic NTK"), for sequences of the context length; with `alpha`
    (Hunyuan) one that does not depend on it."""
    if rope.params.get("alpha"):
        return 1.0 / _wavelengths(rope.rope_theta * float(rope.params["alpha"]) ** (dim / (dim - 2)), dim), 1.0
    factor, length = float(rope.params["factor"]), max(context_len, trained_len)
    stretch = factor * length / trained_len - (factor - 1.0)
    return 1.0 / _wavelengths(rope.rope_theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: RopeConfig, dim: int, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """Long waves divided by a factor, short ones kept, a ramp between (Llama 3.1)."""
    params = rope.params
    factor, original_len = float(params["factor"]), float(params["original_max_position_embeddings"])
    low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
    inv_freq = 1.0 / _wavelengths(rope.rope_theta, dim)
    turns = original_len / (2 * math.pi / inv_freq)  # [dim / 2] turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * inv_freq / factor + keep * inv_freq, 1.0


def _yarn(rope: RopeConfig, dim: int, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """Short waves kept, long ones interpolated, a ramp over the dimensions between (Peng et al. 2023)."""
    params = rope.params
    factor, original_len = float(params["factor"]), float(params["original_max_position_embeddings"])

    def dimension_of(turns: float) -> float:
        """Returns the dimension that makes that many turns within the original context."""
        return dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low = dimension_of(float(params.get("beta_fast") or 32))
    high = dimension_of(float(params.get("beta_slow") or 1))
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    keep = 1.0 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)  # [dim / 2]
    wavelengths = _wavelengths(rope.rope_theta, dim)
    inv_freq = (1.0 / (factor * wavelengths)) * (1.0 - keep) + (1.0 / wavelengths) * keep
    return inv_freq, _yarn_magnitude(rope, factor)


def _yarn_magnitude(rope: RopeConfig, factor: float) -> float:
    """Returns the factor of sine and cosine: attention over more keys needs larger scores."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if rope.params.get("attention_factor") is not None:
        return float(rope.params["attention_factor"])
    mscale, mscale_all_dim = rope.params.get("mscale"), rope.params.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(float(mscale)) / magnitude(float(mscale_all_dim))
    return magnitude(1.0)


def _proportional(rope: RopeConfig, dim: int, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """The short waves of whole heads; the other elements, of waves too long, do not rotate (Gemma 4)."""
    turning = int(rope.partial_rotary_factor * dim // 2)
    inv_freq = 1.0 / _wavelengths(rope.rope_theta, dim) / float(rope.params.get("factor") or 1.0)
    return inv_freq.where(torch.arange(dim // 2) < turning, 0.0), 1.0


def _longrope(rope: RopeConfig, dim: int, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """A divisor per dimension, one list up to the original length and one beyond (Ding et al. 2024)."""
    params = rope.params
    factor, original_len = float(params["factor"]), float(params["original_max_position_embeddings"])
    divisors = params["long_factor"] if context_len > original_len else params["short_factor"]
    if not isinstance(divisors, list) or len(divisors) != dim // 2:
        raise UnsupportedModelError(f"rotary embedding of type 'longrope' needs {dim // 2} factors, not {divisors!r}")
    magnitude = params.get("attention_factor")
    if magnitude is None:  # Phi-3.5-MoE has two
        magnitude = params.get("long_mscale" if divisors is params["long_factor"] else "short_mscale")
    if magnitude is None:
        magnitude = math.sqrt(1.0 + math.log(factor) / math.log(original_len)) if factor > 1.0 else 1.0
    wavelengths = _wavelengths(rope.rope_theta, dim)
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * wavelengths), float(magnitude)


PROPORTIONAL = "proportional"
ROPE_TYPES: dict[str, Scaling] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    PROPORTIONAL: _proportional,
}


def _wavelengths(theta: float, dim: int) -> Tensor:
    """Returns theta^(2i / dim) for i in 0 .. dim/2 - 1: positions per radian."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return torch.as_tensor(theta**exponents)


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """Returns inv_freq [rotary_dim / 2] float32, and the factor of sine and cosine.

    `trained_len` is config.json's max_position_embeddings, `context_len` the longest sequence the engine runs. Raises
    UnsupportedModelError for an unknown type, a missing parameter, or parameters that give no finite numbers.
    """
    scaling = ROPE_TYPES.get(rope.rope_type)
    if scaling is None:
        raise UnsupportedModelError(
            f"rotary embedding of type {rope.rope_type!r} is not implemented; known are {', '.join(ROPE_TYPES)}"
        )
    name = f"rotary embedding of type {rope.rope_type!r}"
    try:
        inv_freq, factor = scaling(rope, rotary_dim, trained_len, context_len)
    except KeyError as e:
        raise UnsupportedModelError(f"{name} needs {e.args[0]!r}") from None
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as e:
        raise UnsupportedModelError(f"{name} cannot be computed with the parameters {rope.params!r}: {e}") from None
    if not (inv_freq.isfinite().all() and math.isfinite(factor)):
        raise UnsupportedModelError(f"{name} has angles that are no finite numbers with the parameters {rope.params!r}")
    return inv_freq, factor


class SinusoidalPositions(KernelModule):
    """A vector for each position, of sines and cosines (Vaswani et al. 2017). Position 0 is at `offset` of their table,
    which has zeros at `zero`."""

    table: Tensor

    def __init__(self, num_positions: int, dim: int, offset: int, zero: int | None) -> None:
        super().__init__()
        self.num_positions, self.dim, self.offset, self.zero = num_positions, dim, offset, zero
        self._kernel: EmbeddingKernel | None = None

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Computes the table, [num_positions, dim], sines first."""
        half = self.dim // 2
        rates = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
        angles = torch.arange(self.offset + self.num_positions)[:, None] * rates  # [.., dim / 2]
        table = torch.cat([angles.sin(), angles.cos()], dim=1)
        if self.zero is not None:
            table[self.zero] = 0
        self.table = table[self.offset :].to(device, dtype)

    def prepare(self, kernels: Kernels) -> EmbeddingKernel:
        self._kernel = kernel = kernels.embedding(self.table, None)
        return kernel

    def forward(self, positions: Tensor, residual: Tensor | None = None) -> Tensor:
        """positions: [num_tokens] to [num_tokens, dim]; `residual`, of that shape, is added."""
        return (self._kernel or self.prepare(TORCH_KERNELS)).lookup(positions, residual)


class RotaryEmbedding(nn.Module):
    """Tables of sine and cosine for every position, shared by all layers that rotate the same way.

    They are tables, and not computed in each step, so that a row's bits never depend on the rest of the batch. Memory:
    context_len * rotary_dim elements of the model's type. `allocate` fills them once the device is known.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        trained_len: int,
        context_len: int,
        *,
        in_float32: bool = False,
        rounds_tables: bool = False,
        backwards: bool = False,
    ) -> None:
        super().__init__()
        rotary_dim = head_dim if rope.rope_type == PROPORTIONAL else int(head_dim * rope.partial_rotary_factor)
        self.context_len = context_len
        self.in_float32, self.rounds_tables = in_float32, rounds_tables
        with torch.device("cpu"):  # a model is built on the meta device; these few numbers must be real
            self.inv_freq, self.factor = inverse_frequencies(rope, rotary_dim, trained_len, context_len)
            self.inv_freq = -self.inv_freq if backwards else self.inv_freq

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Computes the tables, each [context_len, rotary_dim / 2], and rounds them to the model's `dtype`, unless the
        family rotates in float32 (`in_float32`). With `rounds_tables`, too, they are float32 with rounded numbers."""
        rounded = torch.float32 if self.in_float32 and not self.rounds_tables else dtype
        dtype = torch.float32 if self.in_float32 else dtype
        positions = torch.arange(self.context_len, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq  # [context_len, rotary_dim / 2]
        self.cos = (angles.cos() * self.factor).to(rounded).to(device, dtype)
        self.sin = (angles.sin() * self.factor).to(rounded).to(device, dtype)

    def forward(self, positions: Tensor) -> RotaryAngles:
        """positions: [num_tokens] int64, each below context_len."""
        return RotaryAngles(self.cos, self.sin, positions)

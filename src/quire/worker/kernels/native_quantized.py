"""Linear layers of the native library on quantized weights, packed in `QuantizedMatrix`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, byref

import torch
from torch import Tensor
from torch.nn import functional

from quire.worker.kernels.library import (
    ACTIVATIONS,
    CONSTANTS,
    DTYPES,
    Context,
    LinearArgs,
    PackQuantizedArgs,
    Quantization,
    QuantizedLinearArgs,
    set_residual,
    with_packed_rows,
)
from quire.worker.kernels.native_lora import AdaptedLinear
from quire.worker.kernels.specs import LinearSpec
from quire.worker.quantization.weight import Coding, QuantizedWeight

W8A8 = CONSTANTS["QK_W8A8"]
WEIGHTS_ONLY = {
    (Coding.INTEGER, 8): CONSTANTS["QK_W8"],
    (Coding.INTEGER, 4): CONSTANTS["QK_W4"],
    (Coding.E4M3, 8): CONSTANTS["QK_E4M3"],
    (Coding.MXFP4, 4): CONSTANTS["QK_MXFP4"],
}
"""Forms of weights that are multiplied with the inputs as they are, by coding and bits."""
STEP_INPUTS = 32
"""A group's size must be a multiple of it, unless the group is the whole row."""
BLOCK, PANEL = 16, 64
"""Outputs that are adjacent in memory (csrc/layout.h)."""
OFFSET = 128
"""Number that kernels may add to int8 inputs, to make them unsigned."""


def can_pack(weight: QuantizedWeight) -> bool:
    """Returns True if there are kernels for `weight`."""
    return weight.group_size % STEP_INPUTS == 0 or weight.group_size >= weight.shape[1]


class QuantizedMatrix:
    """One or several quantized weights of one kind and shape, in the library's layout, the same for every instruction
    set. They may be outlines if `context.packs` has them packed."""

    def __init__(
        self, context: Context, weights: Sequence[QuantizedWeight], *, is_gated: bool, halves_alternate: bool = False
    ) -> None:
        first = weights[0]
        assert can_pack(first)
        assert all(weight.kind == first.kind and weight.shape == first.shape for weight in weights)
        rows, self.k = first.shape
        self.context = context
        self.halves_alternate = halves_alternate
        self.n, self.is_gated = rows // 2 if is_gated else rows, is_gated
        self.form = W8A8 if first.quantizes_inputs else WEIGHTS_ONLY[first.coding, first.bits]
        self.group_size = min(first.group_size, self.k)
        sizes = self.n, self.k, self.form, self.is_gated
        size = context.library.cdll.qk_quantized_bytes(*sizes)
        self.values = context.packs.take(len(weights) * size, lambda memory: self._pack(weights, memory))
        self.scales = self._take(weights, first.scales.dtype, lambda weight: weight.scales)
        self.has_exponents = first.coding is Coding.MXFP4
        self.zeros = self.corrections = None
        if first.zeros is not None:
            self.zeros = self._take(weights, torch.float32, zeros_of)
        if self.form == W8A8:
            self.corrections = self._take(weights, torch.int32, corrections_of)

    @property
    def num_bytes(self) -> int:
        """Size of all that the kernel reads."""
        parts = (self.values, self.scales, self.zeros, self.corrections)
        return sum(part.nbytes for part in parts if part is not None)

    def describe(self) -> Structure:
        """Returns the struct of scales and zero points. It points to tensors of this object, which must outlive it."""
        return Quantization(
            form=self.form,
            group_size=self.group_size,
            scales=None if self.has_exponents else self.scales.data_ptr(),
            exponents=self.scales.data_ptr() if self.has_exponents else None,
            zeros=None if self.zeros is None else self.zeros.data_ptr(),
            corrections=None if self.corrections is None else self.corrections.data_ptr(),
        )

    def _pack(self, weights: Sequence[QuantizedWeight], memory: Tensor) -> None:
        size = memory.numel() // len(weights)
        for i, weight in enumerate(weights):
            values = weight.values.contiguous()
            stride = values.stride(0)
            args = PackQuantizedArgs(
                n=self.n,
                k=self.k,
                form=self.form,
                gated=self.is_gated,
                values=values.data_ptr(),
                stride=2 * stride if self.halves_alternate else stride,
                half_stride=stride if self.halves_alternate else self.n * stride,
                packed=memory.data_ptr() + i * size,
            )
            self.context.library.cdll.qk_pack_quantized(self.context.handle, byref(args))

    def _take(
        self, weights: Sequence[QuantizedWeight], dtype: torch.dtype, per_output: Callable[[QuantizedWeight], Tensor]
    ) -> Tensor:
        """Returns [weights, panels, groups, PANEL]: `per_output` of each weight, in the order of packed values."""
        groups = weights[0].scales.shape[1]
        blocks = -(-self.n // BLOCK) * (2 if self.is_gated else 1)
        shape = (len(weights), -(-blocks * BLOCK // PANEL), groups, PANEL)

        def fill(memory: Tensor) -> None:
            whole = memory.view(dtype).view(shape)
            for i, weight in enumerate(weights):
                whole[i] = self._arrange(per_output(weight))

        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.context.packs.take(num_bytes, fill).view(dtype).view(shape)

    def _arrange(self, per_output: Tensor) -> Tensor:
        """Returns [panels, groups, PANEL] of [outputs, groups]: outputs in the order of packed values, padded with
        zeros."""
        halves = per_output.view(2 if self.is_gated else 1, self.n, -1)  # [halves, n, groups]
        if self.halves_alternate:
            halves = per_output.view(self.n, 2, -1).transpose(0, 1)
        padded = functional.pad(halves, (0, 0, 0, -self.n % BLOCK))
        blocks = padded.view(padded.shape[0], -1, BLOCK, padded.shape[2])  # [halves, blocks, 16, groups]
        outputs = blocks.transpose(0, 1).reshape(-1, padded.shape[2])  # blocks of the halves in turn
        outputs = functional.pad(outputs, (0, 0, 0, -outputs.shape[0] % PANEL))
        return outputs.view(-1, PANEL, padded.shape[2]).transpose(1, 2).contiguous()


def zeros_of(weight: QuantizedWeight) -> Tensor:
    """Returns [outputs, groups] float32."""
    assert weight.zeros is not None
    return weight.zeros.float()


def corrections_of(weight: QuantizedWeight) -> Tensor:
    """Returns [outputs, 1] int32: the amounts by which OFFSET changes the sums of products."""
    return weight.values.sum(dim=1, dtype=torch.int32).unsqueeze(1) * OFFSET


class NativeQuantizedLinear(AdaptedLinear):
    """A linear layer on quantized weights: LinearKernel."""

    def __init__(self, matrix: QuantizedMatrix, bias: Tensor | None, spec: LinearSpec) -> None:
        self._matrix = matrix
        self._spec = spec
        self._bias = None if bias is None else bias.float()
        self._args = QuantizedLinearArgs(
            linear=LinearArgs(
                n=matrix.n,
                k=matrix.k,
                gated=matrix.is_gated,
                activation=ACTIVATIONS[spec.activation],
                divisor=spec.divisor,
                soft_cap=spec.soft_cap or 0.0,
                clip=spec.clip or 0.0,
                packed=matrix.values.data_ptr(),
                bias=None if self._bias is None else self._bias.data_ptr(),
                y_stride=matrix.n,
            ),
            quantization=matrix.describe(),
        )
        self._pointer = byref(self._args)
        self._function = matrix.context.library.cdll.qk_quantized_linear
        self._handle = matrix.context.handle
        linear: Structure = self._args.linear
        super().__init__(matrix.context, linear, matrix.k, matrix.n * (2 if matrix.is_gated else 1))

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        x = with_packed_rows(x)
        args, n = self._args.linear, x.shape[0]
        out_dtype = torch.float32 if self._spec.float32_output else x.dtype
        y = torch.empty((n, self._matrix.n), dtype=out_dtype) if out is None else out
        args.dtype, args.out_dtype = DTYPES[x.dtype], DTYPES[out_dtype]
        args.m, args.x, args.x_stride, args.y, args.y_stride = n, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)
        residual = set_residual(args, residual)
        self._function(self._handle, self._pointer)
        return y

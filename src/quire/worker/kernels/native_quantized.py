"""Linear layers of the native library on quantized weights , packed in one place: `QuantizedMatrix`."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor
from torch.nn import functional

from quire.worker.kernels.abi import ACTIVATIONS, DTYPES, set_residual, with_packed_rows
from quire.worker.kernels.base import LinearSpec
from quire.worker.kernels.library import Context, LinearArgs, PackQuantizedArgs, QuantizedLinearArgs
from quire.worker.kernels.memory import take_memory
from quire.worker.quantization.weight import QuantizedWeight

W8A8, W8, W4 = 0, 1, 2
"""The forms of csrc/quire_kernels.h."""
STEP_INPUTS = 32
"""What a group's size must be a multiple of, unless it is the whole row."""
BLOCK, PANEL = 16, 64
"""Outputs that stand together (csrc/layout.h)."""
OFFSET = 128
"""What the kernels may add to int8 inputs, to make them unsigned."""


def can_pack(weight: QuantizedWeight) -> bool:
    """Whether there are kernels for it."""
    return weight.group_size % STEP_INPUTS == 0 or weight.group_size >= weight.shape[1]


class QuantizedMatrix:
    """A quantized weight in the library's layout, the same for every instruction set."""

    def __init__(self, context: Context, weight: QuantizedWeight, *, is_gated: bool) -> None:
        assert can_pack(weight)
        rows, self.k = weight.shape
        self.context = context
        self.n, self.is_gated = rows // 2 if is_gated else rows, is_gated
        self.form = W8A8 if weight.quantizes_inputs else W8 if weight.bits == 8 else W4
        self.group_size = min(weight.group_size, self.k)
        self.values = self._pack(weight.values.contiguous())
        self.scales = self._arrange(weight.scales)
        self.zeros = None if weight.zeros is None else self._arrange(weight.zeros.float())
        self.corrections: Tensor | None = None
        if self.form == W8A8:
            sums = weight.values.sum(dim=1, dtype=torch.int32) * OFFSET
            self.corrections = self._arrange(sums.unsqueeze(1))

    @property
    def num_bytes(self) -> int:
        """Of everything the kernel reads."""
        parts = (self.values, self.scales, self.zeros, self.corrections)
        return sum(part.nbytes for part in parts if part is not None)

    def _pack(self, values: Tensor) -> Tensor:
        cdll = self.context.library.cdll
        packed = take_memory(cdll.qk_quantized_bytes(self.n, self.k, self.form, self.is_gated))
        args = PackQuantizedArgs(
            n=self.n,
            k=self.k,
            form=self.form,
            gated=self.is_gated,
            values=values.data_ptr(),
            stride=values.stride(0),
            packed=packed.data_ptr(),
        )
        cdll.qk_pack_quantized(self.context.handle, byref(args))
        return packed

    def _arrange(self, per_output: Tensor) -> Tensor:
        """[outputs, groups] to [panels, groups, PANEL]: outputs as packed values have them, zeros elsewhere."""
        halves = per_output.view(2 if self.is_gated else 1, self.n, -1)  # [halves, n, groups]
        padded = functional.pad(halves, (0, 0, 0, -self.n % BLOCK))
        blocks = padded.view(padded.shape[0], -1, BLOCK, padded.shape[2])  # [halves, blocks, 16, groups]
        outputs = blocks.transpose(0, 1).reshape(-1, padded.shape[2])  # blocks of the halves in turn
        outputs = functional.pad(outputs, (0, 0, 0, -outputs.shape[0] % PANEL))
        return outputs.view(-1, PANEL, padded.shape[2]).transpose(1, 2).contiguous()


class NativeQuantizedLinear:
    """See LinearKernel. `dtype` is that of the inputs."""

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
                packed=matrix.values.data_ptr(),
                bias=None if self._bias is None else self._bias.data_ptr(),
                y_stride=matrix.n,
            ),
            form=matrix.form,
            group_size=matrix.group_size,
            scales=matrix.scales.data_ptr(),
            zeros=None if matrix.zeros is None else matrix.zeros.data_ptr(),
            corrections=None if matrix.corrections is None else matrix.corrections.data_ptr(),
        )
        self._pointer = byref(self._args)
        self._function = matrix.context.library.cdll.qk_quantized_linear
        self._handle = matrix.context.handle

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See LinearKernel."""
        x = with_packed_rows(x)
        args, n = self._args.linear, x.shape[0]
        out_dtype = torch.float32 if self._spec.float32_output else x.dtype
        y = torch.empty((n, self._matrix.n), dtype=out_dtype)
        args.dtype, args.out_dtype = DTYPES[x.dtype], DTYPES[out_dtype]
        args.m, args.x, args.x_stride, args.y = n, x.data_ptr(), x.stride(0), y.data_ptr()
        residual = set_residual(args, residual)
        self._function(self._handle, self._pointer)
        return y

"""Linear layers on quantized weights in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels.base import PLAIN, LinearSpec
from quire.worker.layers.activation import gated, get_activation, soft_cap
from quire.worker.quantization.weight import QuantizedWeight

MAX_INT8 = 127.0
SMALLEST_MAXIMUM = 1e-30
"""A row of nothing larger is a row of zeros: dividing by its maximum would overflow."""


def quantized_linear(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    weight: QuantizedWeight,
    bias: Tensor | None,
    spec: LinearSpec = PLAIN,
) -> Tensor:
    """See Kernels.quantized_linear."""
    if weight.quantizes_inputs:
        values, scales = quantize_rows(x)
        y = multiply_int8(values, weight.values).float() * weight.scales.squeeze(1) * scales
    else:
        y = x.float() @ weight.dequantize().T
    return finish(y, residual, bias, spec, x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [n, dim] to int8 [n, dim] and float32 [n, 1]: a row's largest magnitude becomes 127. A row that holds an
    infinity or no number at all gets the scale NaN."""
    wide = x.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    factor = torch.where(largest > SMALLEST_MAXIMUM, torch.full_like(largest, MAX_INT8) / largest, 0.0)
    values = (wide * factor).round().clamp(-MAX_INT8, MAX_INT8)
    scales = torch.where(largest.isfinite(), largest / MAX_INT8, torch.nan)
    return values.nan_to_num(0.0).to(torch.int8), scales


def multiply_int8(x: Tensor, weight: Tensor) -> Tensor:
    """x: [n, k] int8, weight: [m, k] int8, to [n, m]: exact sums. Where torch has no integer product, float64 is as
    good: sums stay below 2^53."""
    if x.device.type == "cpu":
        return torch._int_mm(x, weight.T)
    return x.double() @ weight.T.double()


def finish(y: Tensor, residual: Tensor | None, bias: Tensor | None, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
    """What follows the product, in float32: y is rounded once, at the end."""
    if bias is not None:
        y = y + bias
    if spec.divisor != 1.0:
        y = y / spec.divisor
    y = soft_cap(y, spec.soft_cap)
    if spec.activation is not None:
        function = get_activation(spec.activation)
        y = gated(function, y) if spec.gated else function(y)
    if residual is not None:
        y = residual + y
    return y if spec.float32_output else y.to(dtype)

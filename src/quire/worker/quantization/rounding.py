"""Plain weights to quantized ones, by rounding to the nearest: no data, no training, one pass over the matrix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quire.config.quantization import QuantizationScheme, group_size_for
from quire.worker.quantization.weight import Kind, QuantizedWeight

_MAX_INT8 = 127
_TINY = torch.finfo(torch.float32).tiny
"""Below it a scale would be lost: a group of zeros gets 1 instead."""


def quantize(weight: Tensor, scheme: QuantizationScheme) -> QuantizedWeight:
    """weight: [out_features, in_features], finite. Of the meta device: what it would become."""
    if weight.is_meta:
        return QuantizedWeight.outline(weight.shape, kind_of(weight.shape[1], scheme))
    return quantize_int8(weight) if scheme.bits == 8 else quantize_int4(weight, group_size_for(weight.shape[1]))


def kind_of(in_features: int, scheme: QuantizationScheme) -> Kind:
    """What `quantize` makes of a matrix with so many inputs."""
    if scheme.bits == 8:
        return Kind(bits=8, group_size=in_features, has_zeros=False, quantizes_inputs=True)
    return Kind(bits=4, group_size=group_size_for(in_features), has_zeros=False, quantizes_inputs=False)


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """One scale per output, values from -127 to 127; activations are quantized, too."""
    wide = weight.float()
    scales = _usable(wide.abs().amax(dim=1, keepdim=True) / _MAX_INT8)  # [out_features, 1]
    values = (wide / scales).round_().clamp_(-_MAX_INT8, _MAX_INT8).to(torch.int8)
    return QuantizedWeight(bits=8, values=values, scales=scales, group_size=weight.shape[1], quantizes_inputs=True)


def quantize_int4(weight: Tensor, group_size: int) -> QuantizedWeight:
    """One scale per group: its element that is farthest from 0 becomes -8, so that all sixteen values are used."""
    (out_features, in_features), groups = weight.shape, -(-weight.shape[1] // group_size)
    padded = functional.pad(weight.float(), (0, groups * group_size - in_features))
    grouped = padded.view(out_features, groups, group_size)
    farthest = grouped.gather(2, grouped.abs().argmax(dim=2, keepdim=True))  # [out_features, groups, 1]
    scales = _usable(farthest / -8)
    values = (grouped / scales).round_().clamp_(-8, 7).to(torch.int8).view(out_features, -1)[:, :in_features]
    return QuantizedWeight(bits=4, values=values.contiguous(), scales=scales.squeeze(2), group_size=group_size)


def _usable(scales: Tensor) -> Tensor:
    return torch.where(scales.abs() < _TINY, 1.0, scales)

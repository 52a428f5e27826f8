"""The formats of quantized checkpoints: the tensors of a matrix, and how they are read.

Field and tensor names, packings and formulas are those of the formats themselves:

* compressed-tensors (https://github.com/vllm-project/compressed-tensors): `int-quantized` has int8 `weight` and
  `weight_scale`; `pack-quantized` has `weight_packed`, int32 of several unsigned values each along the inputs, the
  first in the lowest bits.
* GPTQ (https://github.com/ModelCloud/GPTQModel): `qweight` is packed along the inputs and transposed, `qzeros` along
  the outputs; the first version of the format stores zero points less 1. `g_idx` is each input's group.
* AWQ (https://github.com/casper-hansen/AutoAWQ), "gemm": both are packed along the outputs, eight 4-bit values in the
  order 0, 2, 4, 6, 1, 3, 5, 7.
* fp8 (DeepSeek, Qwen, MiniMax): e4m3 `weight`, and `weight_scale_inv` for each block of outputs and inputs, or for the
  whole matrix. compressed-tensors' `float-quantized` has `weight_scale` for each output or for the matrix.
* MXFP4 (gpt-oss): `*_blocks` [..., in / 32, 16] uint8, two codes a byte, the first in the low bits, and `*_scales`
  [..., in / 32] uint8.

Unsigned values are shifted to signed ones, and zero points with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from quire.config.checkpoint import TensorInfo
from quire.config.quantization import StoredScheme
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.worker.quantization.weight import MXFP4_GROUP, MXFP4_SCALES, Coding, QuantizedWeight

WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight neighbouring ones, in each 4-bit field, from the lowest."""


class StoredFormat(Protocol):
    """One format of stored matrices."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Names of the tensors of one matrix, after its own name and `joint`."""

    @property
    def mark(self) -> str:
        """The suffix of the tensor that every quantized matrix has."""

    @property
    def joint(self) -> str:
        """The text between the matrix' own name and a suffix: a dot, if the plain matrix is called `weight`."""

    def shape(self, infos: Mapping[str, TensorInfo]) -> tuple[int, ...]:
        """Returns the shape of the plain tensor: (out_features, in_features), or (experts, in_features, out_features).
        Raises ModelLoadError if these tensors form none."""

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """Returns the matrix. Raises ModelLoadError or UnsupportedModelError without the name of a tensor."""


class CompressedInt8:
    """compressed-tensors `int-quantized`: 8 bits, a scale per output or per group."""

    mark: ClassVar[str] = "weight_scale"
    joint: ClassVar[str] = "."
    suffixes: ClassVar[tuple[str, ...]] = ("weight", mark, "weight_zero_point")

    def __init__(self, quantizes_inputs: bool) -> None:
        self.quantizes_inputs = quantizes_inputs

    def shape(self, infos: Mapping[str, TensorInfo]) -> tuple[int, int]:
        weight = _need(infos, "weight")
        if weight.dtype != "I8":
            raise UnsupportedModelError(
                f"{weight.file}: tensor {weight.name} is {weight.dtype} and has a scale; only int8 (and packed int4 or "
                "int8) can be read"
            )
        return _two(weight)

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        scales = tensors[self.mark].float().reshape(shape[0], -1)
        zeros = tensors.get("weight_zero_point")
        zeros = None if zeros is None or not zeros.any() else zeros.to(torch.int16).reshape(scales.shape)
        return QuantizedWeight(
            bits=8,
            values=tensors["weight"],
            scales=scales,
            zeros=zeros,
            group_size=_group_size(scales, shape),
            quantizes_inputs=self.quantizes_inputs and zeros is None and scales.shape[1] == 1,
        )


class CompressedPacked:
    """compressed-tensors `pack-quantized`: 4 or 8 bits, weights only."""

    mark: ClassVar[str] = "weight_packed"
    joint: ClassVar[str] = "."
    suffixes: ClassVar[tuple[str, ...]] = (mark, "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, bits: int, quantizes_inputs: bool = False) -> None:
        self.bits = bits
        self.quantizes_inputs = quantizes_inputs

    def shape(self, infos: Mapping[str, TensorInfo]) -> tuple[int, int]:
        """Inputs must fill whole words."""
        packed = _need(infos, self.mark)
        _need(infos, "weight_scale")
        rows, words = _two(packed)
        return rows, words * (WORD_BITS // self.bits)

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        half = 1 << (self.bits - 1)
        values = unpack(tensors[self.mark], self.bits) - half
        scales = tensors["weight_scale"].float().reshape(shape[0], -1)
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            if zeros.dtype == torch.int32 and zeros.shape[0] != shape[0]:
                zeros = unpack(zeros.T.contiguous(), self.bits).T[: shape[0]] - half
            zeros = zeros.to(torch.int16).reshape(scales.shape).contiguous()
        weight = QuantizedWeight(
            bits=self.bits,
            values=values.to(torch.int8),
            scales=scales,
            zeros=zeros,
            group_size=_group_size(scales, shape),
            quantizes_inputs=self.quantizes_inputs and zeros is None and scales.shape[1] == 1,
        )
        return _with_groups(weight, tensors.get("weight_g_idx"))


class Gptq:
    """GPTQ, versions 1 and 2."""

    mark: ClassVar[str] = "qweight"
    joint: ClassVar[str] = "."
    suffixes: ClassVar[tuple[str, ...]] = (mark, "qzeros", "scales", "g_idx")

    def __init__(self, bits: int, zero_offset: int) -> None:
        self.bits = bits
        self.zero_offset = zero_offset

    def shape(self, infos: Mapping[str, TensorInfo]) -> tuple[int, int]:
        words, columns = _two(_need(infos, self.mark))
        _need(infos, "qzeros")
        _need(infos, "scales")
        return columns, words * (WORD_BITS // self.bits)

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        half = 1 << (self.bits - 1)
        values = unpack(tensors[self.mark].T.contiguous(), self.bits) - half  # [out, in]
        zeros = unpack(tensors["qzeros"], self.bits) + (self.zero_offset - half)  # [groups, out]
        scales = tensors["scales"].float().T.contiguous()  # [out, groups]
        weight = QuantizedWeight(
            bits=self.bits,
            values=values.to(torch.int8),
            scales=scales,
            zeros=_or_none(zeros.T.to(torch.int16).contiguous()),
            group_size=_group_size(scales, shape),
        )
        return _with_groups(weight, tensors.get("g_idx"))


class AwqGemm:
    """AWQ, "gemm" version."""

    mark: ClassVar[str] = "qweight"
    joint: ClassVar[str] = "."
    suffixes: ClassVar[tuple[str, ...]] = (mark, "qzeros", "scales")
    bits: ClassVar[int] = 4

    def shape(self, infos: Mapping[str, TensorInfo]) -> tuple[int, int]:
        rows, words = _two(_need(infos, self.mark))
        _need(infos, "qzeros")
        _need(infos, "scales")
        return words * (WORD_BITS // self.bits), rows

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        values = _in_order(unpack(tensors[self.mark], self.bits)) - 8  # [in, out]
        zeros = _in_order(unpack(tensors["qzeros"], self.bits)) - 8  # [groups, out]
        scales = tensors["scales"].float().T.contiguous()
        return QuantizedWeight(
            bits=self.bits,
            values=values.T.to(torch.int8).contiguous(),
            scales=scales,
            zeros=_or_none(zeros.T.to(torch.int16).contiguous()),
            group_size=_group_size(scales, shape),
        )


class Float8:
    """e4m3 floats with a scale for each block of `block` (outputs, inputs); None: the shape of the scales says it."""

    joint: ClassVar[str] = "."

    def __init__(self, scale_name: str, block: tuple[int, int] | None) -> None:
        self.block = block
        self.mark = scale_name
        self.suffixes = ("weight", scale_name, "input_scale", "activation_scale")

    def shape(self, infos: Mapping[str, TensorInfo]) -> tuple[int, int]:
        weight = _need(infos, "weight")
        if weight.dtype != "F8_E4M3":
            raise UnsupportedModelError(
                f"{weight.file}: tensor {weight.name} is {weight.dtype} and has a {self.mark}; F8_E4M3 can be read"
            )
        return _two(weight)

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """The scales of an activation are not needed: activations are not quantized."""
        values = tensors["weight"].view(torch.int8)
        if values.amax() == _E4M3_NAN or values.view(torch.uint8).amax() == _E4M3_NAN | 0x80:  # without a copy
            raise ModelLoadError("holds NaN: download the file again")
        scales, group_size = self._per_output(tensors[self.mark].float(), shape)
        return QuantizedWeight(bits=8, values=values, scales=scales, group_size=group_size, coding=Coding.E4M3)

    def _per_output(self, scales: Tensor, shape: tuple[int, int]) -> tuple[Tensor, int]:
        """Returns [out_features, groups] of the stored scales, and the number of inputs of a group."""
        outputs, inputs = shape
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(outputs, 1).contiguous(), inputs
        if self.block is None:
            if scales.numel() != outputs:
                raise ModelLoadError(f"{scales.numel()} scales do not fit a matrix of {outputs} x {inputs}")
            return scales.reshape(outputs, 1).contiguous(), inputs
        rows, columns = self.block
        expected = (-(-outputs // rows), -(-inputs // columns))
        if scales.shape != expected:
            raise ModelLoadError(
                f"{' x '.join(map(str, scales.shape))} scales do not fit a matrix of {outputs} x {inputs} in blocks of "
                f"{rows} x {columns}, which has {expected[0]} x {expected[1]}"
            )
        return scales.repeat_interleave(rows, dim=0)[:outputs].contiguous(), columns


_E4M3_NAN = 0x7F
"""The largest code of each sign."""


class Mxfp4:
    """MXFP4 as gpt-oss stores it: one matrix, or those of all experts."""

    mark: ClassVar[str] = "blocks"
    suffixes: ClassVar[tuple[str, ...]] = (mark, "scales")
    joint: ClassVar[str] = "_"

    def shape(self, infos: Mapping[str, TensorInfo]) -> tuple[int, ...]:
        blocks, scales = _need(infos, self.mark), _need(infos, "scales")
        for info in (blocks, scales):
            if info.dtype != "U8":
                raise ModelLoadError(f"{info.file}: tensor {info.name} is {info.dtype}; MXFP4 is stored as U8")
        *outer, groups, size = blocks.shape
        if len(outer) not in (1, 2) or size * 2 != MXFP4_GROUP:
            raise ModelLoadError(
                f"{blocks.file}: tensor {blocks.name} has shape {list(blocks.shape)}; MXFP4 has blocks of "
                f"{MXFP4_GROUP // 2} bytes in the last dimension, for {MXFP4_GROUP} inputs"
            )
        if list(scales.shape) != [*outer, groups]:
            raise ModelLoadError(
                f"{scales.file}: tensor {scales.name} has shape {list(scales.shape)}, but the blocks make it "
                f"{[*outer, groups]}"
            )
        inputs = groups * MXFP4_GROUP
        return (*outer, inputs) if len(outer) == 1 else (outer[0], inputs, outer[1])

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """Returns the matrices of all experts one above the other. Blocks of smaller numbers than bfloat16 has become
        zeros."""
        blocks, scales = tensors[self.mark], tensors["scales"]
        smallest, largest = (int(bound) for bound in torch.aminmax(scales))
        if largest > MXFP4_SCALES[-1]:
            raise ModelLoadError(f"has a scale of 2^{largest - 127}, or NaN: download the file again")
        if smallest < MXFP4_SCALES[0]:
            is_tiny = scales < MXFP4_SCALES[0]
            blocks, scales = blocks.masked_fill(is_tiny.unsqueeze(-1), 0), scales.masked_fill(is_tiny, 127)
        return QuantizedWeight(
            bits=4,
            values=blocks.view(torch.int8).flatten(-2).flatten(0, -2),
            scales=scales.flatten(0, -2),
            group_size=MXFP4_GROUP,
            coding=Coding.MXFP4,
        )


def unpack(words: Tensor, bits: int) -> Tensor:
    """Returns [rows, n * 32 / bits] int32: the unsigned values of words [rows, n] int32, the lowest bits first."""
    if words.dtype != torch.int32:
        raise ModelLoadError(f"packed values are {words.dtype}, not int32")
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _in_order(values: Tensor) -> Tensor:
    """Returns the values in the order of the outputs. values: [rows, n] in AWQ's order, n a multiple of 8."""
    places = torch.tensor([AWQ_ORDER.index(i) for i in range(8)])
    return values.view(values.shape[0], -1, 8)[:, :, places].flatten(1)


def _or_none(zeros: Tensor) -> Tensor | None:
    """Returns None for zero points that are all 0: symmetric checkpoints store the middle, which is 0 once shifted."""
    return zeros if zeros.any() else None


def _group_size(scales: Tensor, shape: tuple[int, int]) -> int:
    outputs, groups = scales.shape
    if outputs != shape[0] or groups == 0 or shape[1] % groups:
        raise ModelLoadError(f"{outputs} x {groups} scales do not fit a matrix of {shape[0]} x {shape[1]}")
    return shape[1] // groups


def _with_groups(weight: QuantizedWeight, groups: Tensor | None) -> QuantizedWeight:
    """Returns `weight`, or raises ScatteredGroupsError if the checkpoint groups inputs that are not adjacent ("act
    order")."""
    if groups is None or (groups < 0).any():
        return weight
    if groups.shape != (weight.shape[1],) or groups.amax() >= weight.scales.shape[1]:
        raise ModelLoadError(f"g_idx names {tuple(groups.shape)} groups for {weight.shape[1]} inputs")
    neighbours = torch.arange(weight.shape[1]) // weight.group_size
    if torch.equal(groups.long(), neighbours):
        return weight
    raise ScatteredGroupsError(weight, groups.long())


class ScatteredGroupsError(Exception):
    """Inputs of one group are not adjacent: kernels cannot compute with that, but `dequantize` can."""

    def __init__(self, weight: QuantizedWeight, groups: Tensor) -> None:
        super().__init__("groups are not of neighbouring inputs")
        self.weight = weight
        self.groups = groups

    def dequantize(self) -> Tensor:
        """[out_features, in_features] float32."""
        weight, groups = self.weight, self.groups
        wide = weight.values.float()
        if weight.zeros is not None:
            wide = wide - weight.zeros.float()[:, groups]
        return wide * weight.scales[:, groups]


def _need(infos: Mapping[str, TensorInfo], suffix: str) -> TensorInfo:
    if suffix not in infos:
        other = next(iter(infos.values()))
        raise ModelLoadError(f"{other.file}: tensor {other.name} belongs to a quantized matrix that has no {suffix}")
    return infos[suffix]


def _two(info: TensorInfo) -> tuple[int, int]:
    if len(info.shape) != 2:
        raise ModelLoadError(f"{info.file}: tensor {info.name} has shape {list(info.shape)}; a matrix was expected")
    return info.shape[0], info.shape[1]


def make_format(scheme: StoredScheme) -> StoredFormat:
    """Returns the format of matrices stored as `scheme` describes."""
    match scheme.layout:
        case "int8":
            return CompressedInt8(scheme.quantizes_inputs)
        case "packed":
            return CompressedPacked(scheme.bits, scheme.quantizes_inputs)
        case "gptq":
            return Gptq(scheme.bits, scheme.zero_offset)
        case "awq":
            return AwqGemm()
        case "float8":
            return Float8("weight_scale_inv", scheme.block)
        case "float8-compressed":
            return Float8("weight_scale", scheme.block)
        case "mxfp4":
            return Mxfp4()

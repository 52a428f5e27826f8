"""Adapters of the native library (csrc/lora.h): structs at fixed addresses, whose content changes between steps."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p, cast, pointer
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.worker.kernels.library import (
    DTYPES,
    AdapterBatchStruct,
    AdapterSiteStruct,
    Context,
    LowRankStruct,
    NativeLibrary,
    PackLowRankArgs,
)
from quire.worker.kernels.lora import AdapterBatch, AdapterSite, LowRank, PackedLowRank, validate_parts

LINE = 64
"""Alignment of packed memory."""


@dataclass(frozen=True)
class LowRankShape:
    """Sizes of a site."""

    in_features: int
    parts: tuple[int, ...]
    """Rows of each part, from top to bottom."""
    is_gated: bool
    dtype: torch.dtype


class NativeLowRank:
    """One adapter's change of a site, in the library's layout: PackedLowRank."""

    def __init__(self, library: NativeLibrary, parts: Sequence[LowRank | None], shape: LowRankShape) -> None:
        """Raises ValueError if the parts do not fit the site."""
        validate_parts(parts, shape.in_features, shape.parts)
        self.shape = shape
        self.rank = max((part.a.shape[0] for part in parts if part is not None), default=0)
        count, dtype = len(parts), shape.dtype
        sizes = (c_int64 * count)(*shape.parts)
        ranks = (c_int64 * count)(*(0 if part is None else part.a.shape[0] for part in parts))
        scales = (c_float * count)(*(0.0 if part is None else part.scale for part in parts))
        a = _Addresses([None if part is None else part.a.to(dtype) for part in parts])
        b = _Addresses([None if part is None else part.b.to(dtype) for part in parts])
        biases = _Addresses([None if part is None or part.bias is None else part.bias.float() for part in parts])
        args = PackLowRankArgs(
            n=sum(shape.parts) // (2 if shape.is_gated else 1),
            k=shape.in_features,
            dtype=DTYPES[dtype],
            gated=shape.is_gated,
            parts=count,
            sizes=addressof(sizes),
            ranks=addressof(ranks),
            scales=addressof(scales),
            a=a.address,
            b=b.address,
            biases=biases.address,
        )
        self.num_bytes = library.cdll.qk_low_rank_bytes(byref(args))
        self._memory = torch.empty(self.num_bytes + LINE, dtype=torch.uint8)
        args.packed = -(-self._memory.data_ptr() // LINE) * LINE
        self.struct = LowRankStruct()
        library.cdll.qk_pack_low_rank(byref(args), byref(self.struct))


class _Addresses:
    """Addresses of tensors as an array of C, and the tensors, with adjacent elements. None: NULL."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        self._array = (c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in self._tensors))
        self.address = addressof(self._array)


class NativeAdapterBatch:
    """The segments of a step: AdapterBatch."""

    def __init__(self) -> None:
        self.struct = AdapterBatchStruct()
        self._arrays: tuple[object, ...] = ()

    def set(self, starts: Sequence[int], slots: Sequence[int]) -> None:
        assert len(starts) == len(slots) + 1
        assert starts[0] == 0
        count, struct = len(slots), self.struct
        first, second = (c_int64 * (count + 1))(*starts), (c_int32 * count)(*slots)
        self._arrays = first, second
        struct.segments, struct.starts, struct.slots = count, addressof(first), addressof(second)

    def clear(self) -> None:
        self.struct.segments = 0


class NativeAdapterSite:
    """The adapters of one linear map: AdapterSite."""

    def __init__(self, batch: AdapterBatch, shape: LowRankShape) -> None:
        assert isinstance(batch, NativeAdapterBatch)
        self.shape = shape
        self._by_slot: list[NativeLowRank | None] = []
        self._batch = batch
        self.struct = AdapterSiteStruct(batch=pointer(batch.struct))
        self._grow(8)

    def install(self, slot: int, packed: PackedLowRank | None) -> None:
        if slot >= len(self._by_slot):
            self._grow(2 * slot)
        if packed is None:
            self._array[slot] = None
            self._by_slot[slot] = None
            return
        assert isinstance(packed, NativeLowRank)
        assert packed.shape == self.shape
        self._array[slot] = addressof(packed.struct)
        self._by_slot[slot] = packed

    def _grow(self, count: int) -> None:
        self._by_slot += [None] * (count - len(self._by_slot))
        addresses = (None if packed is None else addressof(packed.struct) for packed in self._by_slot)
        self._array = (c_void_p * count)(*addresses)
        self.struct.by_slot = cast(self._array, POINTER(POINTER(LowRankStruct)))


def set_site(context: Context, args: Structure, site: AdapterSite | None, in_features: int, rows: int) -> None:
    """Sets the site in `args` of a linear layer or a table; None removes it. Recorded plans become invalid."""
    if site is not None:
        assert isinstance(site, NativeAdapterSite)
        assert (site.shape.in_features, sum(site.shape.parts)) == (in_features, rows)
    args.adapters = None if site is None else pointer(site.struct)
    context.num_kernels += 1

"""Adapters of the native library (csrc/lora.h): structs at fixed addresses, whose content changes between steps."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p, cast, pointer

import numpy as np
import numpy.typing as npt
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
from quire.worker.kernels.lora import (
    AdapterBatch,
    AdapterSite,
    LowRank,
    LowRankShape,
    PackedLowRank,
    Take,
    validate_parts,
)

LINE = 64
"""Alignment of packed memory."""
POINTERS = slice(2, 7)
"""Fields of qk_low_rank that are addresses, as numbers of 8 bytes; those before them are counts."""
Structs = npt.NDArray[np.int64]


class NativeLowRank:
    """One adapter's change of a site, in the library's layout: PackedLowRank."""

    def __init__(self, shape: LowRankShape, rank: int, memory: Tensor, outline: Structs) -> None:
        """`memory`: the packed factors, at a multiple of `LINE`. `outline`: a qk_low_rank for each of the matrices,
        with places in `memory` instead of addresses, -1 for NULL."""
        assert memory.data_ptr() % LINE == 0
        self.shape, self.rank, self.memory, self.outline = shape, rank, memory, outline
        self.num_bytes = len(memory)
        self._structs = outline.copy()
        places = self._structs[:, POINTERS]
        places[...] = np.where(places < 0, 0, places + memory.data_ptr())
        self.addresses = self._structs.ctypes.data + self._structs.strides[0] * np.arange(len(outline))
        """Addresses of the structs, [groups]; 0 where the adapter leaves a matrix alone."""
        self.addresses[outline[:, 0] == 0] = 0

    @staticmethod
    def pack(library: NativeLibrary, parts: Sequence[LowRank | None], shape: LowRankShape, take: Take) -> NativeLowRank:
        """Packs all parts, those of one matrix after those of another, into memory that `take` gives. Raises ValueError
        if the parts do not fit the site."""
        validate_parts(parts, shape)
        count, rank = len(shape.parts), max((part.a.shape[0] for part in parts if part is not None), default=0)
        if shape.dtype == torch.bfloat16 and has_mixed_blocks(shape):
            parts = [None if part is None else pad_to_tiles(part) for part in parts]
        packings = [_Packing(parts[i : i + count], shape) for i in range(0, len(parts), count)]
        sizes = [packing.num_bytes(library) for packing in packings]
        memory = take(sum(sizes))
        outline = np.zeros((shape.groups, ctypes.sizeof(LowRankStruct) // 8), dtype=np.int64)
        place = 0
        for packing, size, row in zip(packings, sizes, outline, strict=True):
            if packing.rank:
                packing.fill(library, memory.data_ptr() + place, row)
            place += size
        places = outline[:, POINTERS]
        places[...] = np.where(places == 0, -1, places - memory.data_ptr())
        return NativeLowRank(shape, rank, memory, outline)

    def head_checksum(self) -> int:
        """Returns a checksum of all but the factors: scales, biases, and which h an output takes, where a wrong number
        would lead out of the memory."""
        checksum, data = 0, memoryview(self.memory.numpy())  # type: ignore[arg-type]  # an array is a buffer
        for num_h, _, a, _, scales, _, _ in self.outline.tolist():
            if num_h:
                checksum = zlib.crc32(data[scales:a], checksum)
        return checksum


class _Packing:
    """The factors of one matrix, as arguments of the library."""

    def __init__(self, parts: Sequence[LowRank | None], shape: LowRankShape) -> None:
        count, dtype = len(parts), shape.dtype
        self.rank = max((part.a.shape[0] for part in parts if part is not None), default=0)
        self._arrays = (
            (c_int64 * count)(*shape.parts),
            (c_int64 * count)(*(0 if part is None else part.a.shape[0] for part in parts)),
            (c_float * count)(*(0.0 if part is None else part.scale for part in parts)),
        )
        self._a = _Addresses([None if part is None else part.a.to(dtype) for part in parts])
        self._b = _Addresses([None if part is None else part.b.to(dtype) for part in parts])
        self._biases = _Addresses([None if p is None or p.bias is None else p.bias.float() for p in parts])
        sizes, ranks, scales = (addressof(array) for array in self._arrays)
        self._args = PackLowRankArgs(
            n=sum(shape.parts) // (2 if shape.gated else 1),
            k=shape.in_features,
            dtype=DTYPES[dtype],
            gated=shape.gated,
            parts=count,
            sizes=sizes,
            ranks=ranks,
            scales=scales,
            a=self._a.address,
            b=self._b.address,
            biases=self._biases.address,
        )

    def num_bytes(self, library: NativeLibrary) -> int:
        """Returns the size of the packed factors, a multiple of `LINE`; 0 if nothing is changed."""
        size: int = library.cdll.qk_low_rank_bytes(byref(self._args)) if self.rank else 0
        return -(-size // LINE) * LINE

    def fill(self, library: NativeLibrary, address: int, struct: Structs) -> None:
        """Packs to `address`, and fills `struct`, the bytes of a qk_low_rank."""
        self._args.packed = address
        low_rank = LowRankStruct.from_buffer(struct)  # type: ignore[arg-type]  # an array is a buffer
        library.cdll.qk_pack_low_rank(byref(self._args), byref(low_rank))


BLOCK, TILE = 16, 32
"""Outputs that are computed together, and the most h whose products with them are one sum."""


def has_mixed_blocks(shape: LowRankShape) -> bool:
    """Returns whether outputs of two parts may be computed together."""
    return not shape.gated and any(size % BLOCK for size in shape.parts[:-1])


def pad_to_tiles(part: LowRank) -> LowRank:
    """Returns factors with zeros between, so that the h of each sum fill a tile of their own: the sum is the same
    whichever parts are computed together, which depends on the number of workers."""
    rank = part.a.shape[0]
    lines, tiles = -(-rank // 2), -(-rank // TILE)  # a line has two h
    size = 2 * -(-lines // tiles)
    h = torch.arange(rank)
    places = h // size * TILE + h % size
    a = part.a.new_zeros((tiles * TILE, part.a.shape[1])).index_copy_(0, places, part.a)
    b = part.b.new_zeros((part.b.shape[0], tiles * TILE)).index_copy_(1, places, part.b)
    return LowRank(a, b, part.scale, part.bias)


def take_lines(num_bytes: int) -> Tensor:
    """Returns [num_bytes] unfilled uint8 at a multiple of `LINE`."""
    memory = torch.empty(num_bytes + LINE, dtype=torch.uint8)
    start = -memory.data_ptr() % LINE
    return memory[start : start + num_bytes]


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
        self._addresses: Structs = np.zeros(0, dtype=np.int64)
        self._batch = batch
        self.struct = AdapterSiteStruct(batch=pointer(batch.struct))
        self._grow(8)

    def install(self, slot: int, packed: PackedLowRank | None) -> None:
        if slot >= len(self._by_slot):
            self._grow(2 * slot)
        groups = self.shape.groups
        place = self._addresses[slot * groups : (slot + 1) * groups]
        if packed is None:
            place[:] = 0
            self._by_slot[slot] = None
            return
        assert isinstance(packed, NativeLowRank)
        assert packed.shape.is_like(self.shape)
        place[:] = packed.addresses
        self._by_slot[slot] = packed

    def _grow(self, count: int) -> None:
        grown = np.zeros(count * self.shape.groups, dtype=np.int64)
        grown[: len(self._addresses)] = self._addresses
        self._by_slot += [None] * (count - len(self._by_slot))
        self._addresses = grown
        self.struct.by_slot = cast(c_void_p(grown.ctypes.data), POINTER(POINTER(LowRankStruct)))


def set_site(context: Context, args: Structure, site: AdapterSite | None, in_features: int | None, rows: int) -> None:
    """Sets the site in `args` of a linear layer or a table; None removes it. `in_features`: None for any number."""
    args.adapters = site_pointer(context, site, in_features, rows)


def site_pointer(context: Context, site: AdapterSite | None, in_features: int | None, rows: int) -> object:
    """Returns the address of the site of a map of `in_features` and `rows`, or None, for the arguments of a call.
    Recorded plans become invalid."""
    context.num_kernels += 1
    if site is None:
        return None
    assert isinstance(site, NativeAdapterSite)
    assert (site.shape.in_features, sum(site.shape.parts)) == (in_features or site.shape.in_features, rows)
    return pointer(site.struct)


class AdaptedLinear:
    """Base of the linear layers: gives the arguments of their calls a site."""

    def __init__(self, context: Context, args: Structure, in_features: int, rows: int) -> None:
        """`args`: a qk_linear_args, which the layer's calls use; `rows`: those of the weight."""
        self._adapted = context, args, in_features, rows
        self._site: AdapterSite | None = None

    @property
    def site(self) -> AdapterSite | None:
        return self._site

    @site.setter
    def site(self, site: AdapterSite | None) -> None:
        context, args, in_features, rows = self._adapted
        set_site(context, args, site, in_features, rows)
        self._site = site

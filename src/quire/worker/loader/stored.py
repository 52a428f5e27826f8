"""The contents of a checkpoint's files: plain tensors, and quantized matrices with the record of their kinds.

A packed weight file stores a record of kinds beside the packed bytes, because a later start reads only the packed bytes
and must know what they mean.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quire.config.checkpoint import TensorInfo
from quire.config.quantization import MAX_INT8_INPUTS, QuantizationScheme, is_quantizable_name
from quire.errors import ModelLoadError
from quire.worker.kernels.packs import Packs
from quire.worker.layers.linear import Linear
from quire.worker.layers.moe import Experts
from quire.worker.quantization.formats import ScatteredGroupsError, StoredFormat
from quire.worker.quantization.weight import Coding, Kind, QuantizedWeight

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
READ_AROUND = 2 << 20
"""Bytes on both sides of a page that Linux may map with it."""


class MappedFile:
    """A read-only map of a safetensors file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = 8 + int.from_bytes(self._memory[:8], "little")
        self._used: list[tuple[int, int]] = []

    def read(self, info: TensorInfo) -> Tensor:
        """Returns the tensor in the map itself: it must not be written to."""
        start, dtype = self._data + info.offset, _TYPES[info.dtype]
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        self._used.append((start, start + info.nbytes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "not writable": nothing writes to it
            count = info.nbytes // dtype.itemsize
            return torch.frombuffer(self._memory, dtype=dtype, offset=start, count=count).view(info.shape)

    def release(self) -> int:
        """Takes the pages read so far out of the process (the system may keep them). Returns their bytes."""
        for start, end in self._used:
            page = max(0, start - READ_AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
            if hasattr(mmap, "MADV_DONTNEED"):
                self._memory.madvise(mmap.MADV_DONTNEED, page, min(end + READ_AROUND, len(self._memory)) - page)
        num_bytes = sum(end - start for start, end in self._used)
        self._used.clear()
        return num_bytes


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix: stands for the TensorInfo of the plain `weight`."""

    name: str
    shape: tuple[int, ...]
    """(out_features, in_features), or (experts, in_features, out_features)."""
    infos: Mapping[str, TensorInfo]
    """The matrix' tensors by suffix."""
    format: StoredFormat

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        """Shape of what `read` returns."""
        if len(self.shape) == 2:
            return self.shape[0], self.shape[1]
        return self.shape[0] * self.shape[2], self.shape[1]

    @property
    def file(self) -> Path:
        """File of the first of its tensors, for messages."""
        return next(iter(self.infos.values())).file

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Returns the matrix, or those of all experts one above the other. Raises ModelLoadError naming file and
        matrix, and ScatteredGroupsError."""
        try:
            weight = self.format.read(tensors, self.rows_and_columns)
        except ScatteredGroupsError:
            raise
        except ModelLoadError as e:
            raise type(e)(f"{self.file}: {self.name}: {e}") from None
        if weight.shape != self.rows_and_columns:
            raise ModelLoadError(f"{self.file}: {self.name} has shape {weight.shape}, not {self.shape}")
        return weight

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns float32 of `shape`. Raises as `read` does."""
        try:
            weights = self.read(tensors).dequantize()
            return weights if len(self.shape) == 2 else weights.view(self.shape[0], -1, self.shape[1]).transpose(1, 2)
        except ScatteredGroupsError as scattered:
            return scattered.dequantize()


Stored = TensorInfo | StoredMatrix


def gather_matrices(tensors: Mapping[str, TensorInfo], format: StoredFormat) -> dict[str, Stored]:
    """Returns `tensors` with the tensors of each quantized matrix joined, under the name of its plain weight.

    Raises as StoredFormat.shape.
    """
    mark = format.joint + format.mark
    bases = [name.removesuffix(mark) for name in tensors if name.endswith(mark)]
    joined: dict[str, Stored] = dict(tensors)
    for base in bases:
        infos = {}
        for suffix in format.suffixes:
            part = f"{base}{format.joint}{suffix}"
            if part in tensors:
                infos[suffix] = tensors[part]
                joined.pop(part, None)
        name = f"{base}.weight" if format.joint == "." else base
        joined[name] = StoredMatrix(name, format.shape(infos), infos, format)
    return joined


MAX_KINDS = 2
_RECORD = torch.Size((1 + MAX_KINDS * len(Kind._fields),))
NUM_BYTES = _RECORD.numel() * 8
"""Size of a record: the number of kinds, then the fields of each, int64."""


def remember_kinds(packs: Packs, kinds: Sequence[Kind]) -> None:
    """Stores a record of the kinds of the present layer's matrices in `packs`."""
    assert len(kinds) <= MAX_KINDS

    def fill(memory: Tensor) -> None:
        numbers = [len(kinds), *(int(field) for kind in kinds for field in kind)]
        memory.view(torch.int64)[: len(numbers)] = torch.tensor(numbers)

    packs.take(NUM_BYTES, fill)


def recall_kinds(packs: Packs) -> list[Kind]:
    """Returns the kinds that were stored for the present layer. Raises as `Packs.take` does."""
    count, *fields = packs.take(NUM_BYTES, lambda _: None).view(torch.int64).tolist()
    size = len(Kind._fields)
    records = [fields[i * size : (i + 1) * size] for i in range(count)]
    return [
        Kind(bits, group_size, bool(zeros), bool(inputs), Coding(coding))
        for bits, group_size, zeros, inputs, coding in records
    ]


def plan_quantization(model: nn.Module, scheme: QuantizationScheme) -> list[str]:
    """Sets the linear layers and experts inside the decoder's layers to quantize their weights when these are loaded.
    Returns their names. Embeddings, logits head and routers stay as they are."""
    chosen = {path: module for path, module in model.named_modules() if is_quantizable(path, module, scheme)}
    for module in chosen.values():
        assert isinstance(module, Linear | Experts)
        module.scheme = scheme
    return list(chosen)


def is_quantizable(path: str, module: nn.Module, scheme: QuantizationScheme) -> bool:
    """Returns True if the module at `path` is to be quantized."""
    if not isinstance(module, Linear | Experts) or not is_quantizable_name(path):
        return False
    matrices = (module.weight,) if isinstance(module, Linear) else (module.gate_up_proj, module.down_proj)
    return not scheme.quantizes_inputs or all(matrix.shape[-1] <= MAX_INT8_INPUTS for matrix in matrices)

"""Quantized matrices of a checkpoint, found among its tensors by name and read into the value object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from quire.config.checkpoint import TensorInfo
from quire.errors import ModelLoadError
from quire.worker.quantization.formats import ScatteredGroupsError, StoredFormat
from quire.worker.quantization.weight import QuantizedWeight


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix: takes the place of the TensorInfo of the plain `weight` it stands for."""

    name: str
    shape: tuple[int, int]
    infos: Mapping[str, TensorInfo]
    """By suffix."""
    format: StoredFormat

    @property
    def file(self) -> Path:
        """Where the first of its tensors lies: for messages."""
        return next(iter(self.infos.values())).file

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Raises ModelLoadError naming file and matrix, and ScatteredGroupsError."""
        try:
            weight = self.format.read(tensors, self.shape)
        except ScatteredGroupsError:
            raise
        except ModelLoadError as e:
            raise type(e)(f"{self.file}: {self.name}: {e}") from None
        if weight.shape != self.shape:
            raise ModelLoadError(f"{self.file}: {self.name} has shape {weight.shape}, not {self.shape}")
        return weight

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[out_features, in_features] float32. Raises as `read` does."""
        try:
            return self.read(tensors).dequantize()
        except ScatteredGroupsError as scattered:
            return scattered.dequantize()


Stored = TensorInfo | StoredMatrix


def gather_matrices(tensors: Mapping[str, TensorInfo], format: StoredFormat) -> dict[str, Stored]:
    """`tensors` with those of each quantized matrix joined, under the name its plain weight would have.

    Raises as StoredFormat.shape.
    """
    mark = "." + format.mark
    bases = [name.removesuffix(mark) for name in tensors if name.endswith(mark)]
    joined: dict[str, Stored] = dict(tensors)
    for base in bases:
        infos = {}
        for suffix in format.suffixes:
            info = tensors.get(f"{base}.{suffix}")
            if info is not None:
                infos[suffix] = info
                joined.pop(info.name, None)
        name = f"{base}.weight"
        joined[name] = StoredMatrix(name, format.shape(infos), infos, format)
    return joined

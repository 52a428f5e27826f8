"""Adapters in plain torch, on any device: the reference for the native ones (lora.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.worker.kernels.lora import AdapterBatch, LowRank, PackedLowRank, validate_parts


class TorchAdapterBatch:
    """The segments of a step: AdapterBatch."""

    def __init__(self) -> None:
        self.starts: Sequence[int] = (0,)
        self.slots: Sequence[int] = ()

    def set(self, starts: Sequence[int], slots: Sequence[int]) -> None:
        assert len(starts) == len(slots) + 1
        assert starts[0] == 0
        self.starts, self.slots = tuple(starts), tuple(slots)

    def clear(self) -> None:
        self.starts, self.slots = (0,), ()


class TorchLowRank:
    """The parts of a site: PackedLowRank."""

    def __init__(
        self, parts: Sequence[LowRank | None], in_features: int, part_sizes: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Raises ValueError if a part's shapes do not fit."""
        validate_parts(parts, in_features, part_sizes)
        self._sizes, self._dtype = part_sizes, dtype
        self._parts = [
            None if part is None else LowRank(part.a.to(dtype), part.b.to(dtype), part.scale, part.bias)
            for part in parts
        ]

    @property
    def num_bytes(self) -> int:
        tensors = [t for part in self._parts if part is not None for t in (part.a, part.b, part.bias) if t is not None]
        return sum(t.nbytes for t in tensors)

    @property
    def rank(self) -> int:
        return max((part.a.shape[0] for part in self._parts if part is not None), default=0)

    def multiply(self, x: Tensor) -> Tensor:
        """Returns what the adapter adds to the float32 sums. x: [n, in_features]; returns [n, rows of all parts]."""
        return self._expand(x, [None if part is None else x.float() @ part.a.float().T for part in self._parts])

    def look_up(self, ids: Tensor) -> Tensor:
        """Returns the same for rows that are 1 at `ids`, [n], and 0 elsewhere."""
        return self._expand(ids, [None if part is None else part.a[:, ids].T.float() for part in self._parts])

    def _expand(self, rows: Tensor, products: Sequence[Tensor | None]) -> Tensor:
        sums = []
        for part, size, product in zip(self._parts, self._sizes, products, strict=True):
            if part is None or product is None:
                sums.append(torch.zeros(len(rows), size, device=rows.device))
                continue
            h = (product * part.scale).to(self._dtype).float()  # [n, rank]
            y = h @ part.b.float().T
            sums.append(y if part.bias is None else y + part.bias.float() * part.scale)
        return torch.cat(sums, dim=1)


class TorchAdapterSite:
    """The adapters of one linear map: AdapterSite."""

    def __init__(self, batch: AdapterBatch) -> None:
        assert isinstance(batch, TorchAdapterBatch)
        self._batch = batch
        self._by_slot: dict[int, TorchLowRank] = {}

    def install(self, slot: int, packed: PackedLowRank | None) -> None:
        if packed is None:
            self._by_slot.pop(slot, None)
        else:
            assert isinstance(packed, TorchLowRank)
            self._by_slot[slot] = packed

    def segments(self, num_rows: int) -> Iterator[tuple[slice, TorchLowRank]]:
        """Yields the rows that have an adapter here, among the first `num_rows`, and the adapter's part."""
        batch = self._batch
        for start, end, slot in zip(batch.starts, batch.starts[1:], batch.slots, strict=False):
            low_rank, end = self._by_slot.get(slot), min(end, num_rows)
            if low_rank is not None and start < end:
                yield slice(start, end), low_rank

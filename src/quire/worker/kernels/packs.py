"""Where the memory of packed weights comes from: packed now, or found as it was packed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from quire.worker.kernels.memory import take_memory

Fill = Callable[[Tensor], object]
"""Packs a layer's weights into memory."""


class Packs(Protocol):
    """Gives memory to layers that pack. `begin` says whose turn it is; a layer may then take several pieces, always the
    same ones in the same order."""

    def begin(self, layer: str) -> None:
        """From here on `layer`, a module's path in the model, takes."""
        ...

    def take(self, num_bytes: int, fill: Fill) -> Tensor:
        """[num_bytes] uint8 that holds what `fill` would write into zeros: now, or once. Not to be written to."""
        ...


class FreshPacks:
    """Packs everything now, into memory of its own."""

    def begin(self, layer: str) -> None:
        """See Packs."""

    def take(self, num_bytes: int, fill: Fill) -> Tensor:
        """See Packs."""
        memory = take_memory(num_bytes)
        fill(memory)
        return memory


FRESH_PACKS = FreshPacks()

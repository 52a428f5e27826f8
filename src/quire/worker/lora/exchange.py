"""Adapters of experts that engines share: each engine reads those of its requests, whole, into memory that all map.

Nothing about adapters has to be agreed between engines. In each step an engine names the adapters of its tokens by
their places in the file of all (`Segments`). Another maps an adapter when it is named first, gives it a slot among its
own, and computes its experts for those tokens with it. At the end of a step all have read what they need of it, so that
an engine frees its adapters between steps, as it does alone. Memory is used again as late as possible: an engine that
still computes a step which was given up finds zeroes in what was freed, and no factors of another shape.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.wire.shared_memory import FACTORS_BYTES, clear_factors, factors_start, give_back
from quire.worker.input_batch import NO_ADAPTER
from quire.worker.kernels.library import LowRankStruct
from quire.worker.kernels.lora import PackedLowRank
from quire.worker.kernels.native_lora import LINE, NativeLowRank
from quire.worker.lora.sites import AdapterSites
from quire.worker.parallel.pool import Segments
from quire.worker.parallel.shm import PAGE_BYTES

Numbers = npt.NDArray[np.int64]
PIECE_BYTES = 1 << 20
_SITE_WORDS = 3
"""Words of a site in an index: where its factors are in the block, their bytes (0: it is not changed), their rank."""
_OUTLINE_WORDS = ctypes.sizeof(LowRankStruct) // 8


class Block(NamedTuple):
    """Memory of one adapter: its index, and behind it factors."""

    place: int
    """Where it is in the file of all engines."""
    memory: Tensor


class FactorsMemory:
    """One engine's part of the file of all. Belongs to the loader's thread."""

    def __init__(self, fd: int, engine: int) -> None:
        """Clears the part: an engine that has been there before has ended."""
        clear_factors(fd, engine)
        self._fd, self._start = fd, factors_start(engine)
        self._next = 0
        """Where the next block may begin."""
        self._used: dict[int, int] = {}
        """Beginnings and ends of the blocks, from `_start` on."""
        self._freed = deque[int]()
        """Beginnings of blocks that no tensor uses any more: they end on any thread."""

    def take(self, num_bytes: int) -> Block:
        """Returns memory, which is given back when no tensor uses it any more."""
        while self._freed:
            self._used.pop(self._freed.popleft())
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        start = self._find(size)
        self._used[start], self._next = start + size, start + size
        mapped = mmap.mmap(self._fd, size, offset=self._start + start)
        weakref.finalize(mapped, self._free, start, size).atexit = False  # at the end another engine may be there
        return Block(self._start + start, torch.frombuffer(mapped, dtype=torch.uint8))

    def _find(self, size: int) -> int:
        """Returns the first gap behind the last block, or from the beginning on."""
        start = self._next if self._next + size <= FACTORS_BYTES else 0
        for used, end in sorted(self._used.items()):
            if used < start + size and start < end:
                start = end
        assert start + size <= FACTORS_BYTES, "memory has less than address space"
        return start

    def _free(self, start: int, size: int) -> None:
        give_back(self._fd, self._start + start, size)
        self._freed.append(start)

    def map(self, place: int, num_bytes: int) -> Tensor:
        """Returns memory of another engine, uint8."""
        return torch.frombuffer(mmap.mmap(self._fd, num_bytes, offset=place), dtype=torch.uint8)


class FactorsExchange:
    """The adapters of all engines, as one of them sees them. `take` and `publish` belong to the loader's thread,
    everything else to the worker's."""

    def __init__(
        self,
        memory: FactorsMemory,
        sites: AdapterSites,
        take_slot: Callable[[], int],
        free_slot: Callable[[int], None],
    ) -> None:
        """`take_slot` and `free_slot` are those of the table of this engine's own adapters."""
        self._memory, self._sites = memory, {name: sites.sites[name] for name in sites.shared}
        self._batch = sites.pooled
        self._take_slot, self._free_slot = take_slot, free_slot
        words = 1 + _SITE_WORDS * len(self._sites)
        words += _OUTLINE_WORDS * sum(site.shape.groups for site in self._sites.values())
        self.index_bytes = -(-8 * words // LINE) * LINE
        """Bytes of an adapter's block before its factors."""
        self._places: dict[int, int] = {}
        """Places of this engine's adapters, by slot."""
        self._version = 0
        self._own: tuple[Numbers, Numbers] | None = None
        """Slots of the step's tokens, and numbers of tokens."""
        self._foreign: dict[int, dict[int, int]] = {}
        """Slots of the adapters of the other engines, by engine and place."""
        self._versions: dict[int, int] = {}

    # -- loading ------------------------------------------------------------------------------------------------------

    def take(self, num_bytes: int) -> Block:
        """Returns a block with room for so many bytes of factors."""
        return self._memory.take(self.index_bytes + num_bytes)

    def publish(
        self,
        packed: Mapping[str, PackedLowRank],
        block: Block | None,
        work: Callable[[], AbstractContextManager[None]],
    ) -> tuple[Mapping[str, PackedLowRank], Block | None]:
        """Makes an adapter readable for the others. Returns its factors, and their block; None if it leaves the experts
        alone. Factors that are not in `block` are copied. `work` bounds pieces of that."""
        own = {name: low_rank for name, low_rank in packed.items() if name in self._sites}
        if not own:
            return packed, None
        if block is None or not all(_find_in(block, low_rank) for low_rank in own.values()):
            block, own = self._copy(own, work)
        words = block.memory[: self.index_bytes].numpy().view(np.int64)
        words[0] = len(block.memory)
        end = 1 + _SITE_WORDS * len(self._sites)
        for i, (name, site) in enumerate(self._sites.items()):
            entry, count = words[1 + _SITE_WORDS * i :][:_SITE_WORDS], site.shape.groups * _OUTLINE_WORDS
            low_rank = own.get(name)
            if low_rank is None:
                entry[:] = 0
            else:
                assert isinstance(low_rank, NativeLowRank)
                entry[:] = _find_in(block, low_rank), low_rank.num_bytes, low_rank.rank
                words[end : end + count] = low_rank.outline.ravel()
            end += count
        return {**packed, **own}, block

    def _copy(
        self, packed: Mapping[str, PackedLowRank], work: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Block, dict[str, PackedLowRank]]:
        block = self.take(sum(-(-low_rank.num_bytes // LINE) * LINE for low_rank in packed.values()))
        copies, end = dict[str, PackedLowRank](), self.index_bytes
        for name, low_rank in packed.items():
            assert isinstance(low_rank, NativeLowRank)
            memory = block.memory[end : end + low_rank.num_bytes]
            for first in range(0, len(memory), PIECE_BYTES):
                with work():
                    memory.numpy()[first : first + PIECE_BYTES] = low_rank.memory.numpy()[first : first + PIECE_BYTES]
            copies[name] = NativeLowRank(low_rank.shape, low_rank.rank, memory, low_rank.outline)
            end += -(-len(memory) // LINE) * LINE
        return block, copies

    # -- steps --------------------------------------------------------------------------------------------------------

    def install(self, slot: int, block: Block | None) -> None:
        """Notes that an adapter of this engine is in a slot."""
        if block is not None:
            self._places[slot] = block.place

    def remove(self, slot: int) -> None:
        """Notes that it will be freed."""
        if self._places.pop(slot, None) is not None:
            self._version += 1

    def set_own(self, slots: Numbers, lens: Numbers) -> None:
        """Sets the adapters of the next run's tokens."""
        self._own = slots, lens

    def clear_own(self) -> None:
        """Removes them: no token has an adapter."""
        self._own = None

    def take_own(self) -> Segments | None:
        if self._own is None:
            return None
        slots, lens = self._own
        places = np.array([self._places.get(slot, 0) for slot in slots.tolist()], dtype=np.int64)
        return Segments(lens, places, self._version) if places.any() else None

    def apply(self, segments: Sequence[Segments | None], lens: Sequence[int], own: int) -> None:
        starts, slots, start = list[int](), list[int](), 0
        for engine, (segment, num_rows) in enumerate(zip(segments, lens, strict=True)):
            if segment is None:
                starts, slots = [*starts, start], [*slots, NO_ADAPTER]
            else:
                starts += (start + np.cumsum(segment.lens) - segment.lens).tolist()
                if engine == own and self._own is not None:
                    slots += self._own[0].tolist()
                else:
                    slots += self._slots_of(engine, segment)
            start += num_rows
        if any(segment is not None for segment in segments):
            self._batch.set([*starts, start], slots)
        else:
            self._batch.clear()

    def _slots_of(self, engine: int, segment: Segments) -> list[int]:
        """Returns the slots of the adapters of another engine. Maps those that are new."""
        if self._versions.get(engine) != segment.version:
            self._forget(engine)
            self._versions[engine] = segment.version
        known = self._foreign.setdefault(engine, {0: NO_ADAPTER})
        for place in segment.places.tolist():
            if place not in known:
                known[place] = slot = self._take_slot()
                for name, low_rank in self._read(place):
                    self._sites[name].kernel.install(slot, low_rank)
        return [known[place] for place in segment.places.tolist()]

    def _read(self, place: int) -> list[tuple[str, NativeLowRank | None]]:
        """Returns the factors of another engine's adapter, for all sites."""
        index = self._memory.map(place, self.index_bytes).numpy().view(np.int64)
        block, end = self._memory.map(place, int(index[0])), 1 + _SITE_WORDS * len(self._sites)
        found = list[tuple[str, NativeLowRank | None]]()
        for i, (name, site) in enumerate(self._sites.items()):
            shape, count = site.shape, site.shape.groups * _OUTLINE_WORDS
            start, num_bytes, rank = index[1 + _SITE_WORDS * i :][:_SITE_WORDS].tolist()
            outline, memory = index[end : end + count].reshape(-1, _OUTLINE_WORDS), block[start : start + num_bytes]
            found.append((name, NativeLowRank(shape, rank, memory, outline.copy()) if num_bytes else None))
            end += count
        return found

    def _forget(self, engine: int) -> None:
        for slot in self._foreign.pop(engine, {}).values():
            if slot != NO_ADAPTER:
                for site in self._sites.values():
                    site.kernel.install(slot, None)
                self._free_slot(slot)

    def forget_all(self) -> None:
        """Forgets the adapters of all other engines: some may have been started again."""
        for engine in list(self._foreign):
            self._forget(engine)
        self._versions.clear()
        self._batch.clear()


def _find_in(block: Block, low_rank: PackedLowRank) -> int:
    """Returns where factors are in a block; 0 if they are elsewhere."""
    assert isinstance(low_rank, NativeLowRank)
    start = low_rank.memory.data_ptr() - block.memory.data_ptr()
    return start if 0 < start < len(block.memory) else 0

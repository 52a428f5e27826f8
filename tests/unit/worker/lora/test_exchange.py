"""Adapters of experts that engines share: each reads those of the others from the file of all, and keeps none of them
longer than their engine does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quire.wire.shared_memory import FACTORS_BYTES, clear_factors, factors_start, make_experts_file
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.lora import LowRank, LowRankShape
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.native_lora import NativeAdapterBatch, NativeAdapterSite, NativeLowRank, take_lines
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kernels.specs import RouterSpec
from quire.worker.layers.moe import Experts, MoESpec
from quire.worker.lora.exchange import Block, FactorsExchange, FactorsMemory
from quire.worker.lora.loader import Arena
from quire.worker.lora.sites import AdapterSites, Site, make_sites
from quire.worker.parallel.shm import PAGE_BYTES

SHAPES = {
    "first": LowRankShape(24, (8, 8), gated=True, dtype=torch.float32, groups=3),
    "second": LowRankShape(8, (24,), gated=False, dtype=torch.float32, groups=3),
    "attention": LowRankShape(24, (24,), gated=False, dtype=torch.float32),
}


@pytest.fixture
def file() -> Iterator[int]:
    fd = make_experts_file()
    yield fd
    os.close(fd)


class Engine:
    """One engine's sites and exchange."""

    def __init__(self, fd: int, number: int) -> None:
        self.batch, self.free = NativeAdapterBatch(), list[int]()
        self.kernels = {name: NativeAdapterSite(self.batch, shape) for name, shape in SHAPES.items()}
        sites = {name: Site(self.kernels[name], shape) for name, shape in SHAPES.items()}
        made = AdapterSites(NativeAdapterBatch(), NativeAdapterBatch(), self.batch, sites, ["first", "second"])
        self.memory, slots = FactorsMemory(fd, number), count(9 * number)
        self.exchange = FactorsExchange(self.memory, made, lambda: next(slots), self.free.append)

    def pack(self, library: NativeLibrary, rank: int, take: Any, *names: str) -> dict[str, NativeLowRank]:
        """Returns an adapter of all but the second expert."""
        torch.manual_seed(rank)
        packed = {}
        for name in names:
            shape = SHAPES[name]
            parts = [
                LowRank(torch.randn(rank, shape.in_features), torch.randn(size, rank), 0.5)
                for size in [*shape.parts] * shape.groups
            ]
            changed = [None if i // len(shape.parts) == 1 else part for i, part in enumerate(parts)]
            packed[name] = NativeLowRank.pack(library, changed, shape, take)
        return packed

    def publish(self, packed: dict[str, NativeLowRank], block: Block | None = None) -> Block | None:
        own, found = self.exchange.publish(packed, block, contextlib.nullcontext)
        for name, low_rank in own.items():
            assert isinstance(low_rank, NativeLowRank)
            assert torch.equal(low_rank.memory, packed[name].memory)
            assert name == "attention" or found is not None
        return found

    @property
    def segments(self) -> tuple[list[int], list[int]]:
        starts, slots = (list(array) for array in self.batch._arrays)  # type: ignore[call-overload]
        return (starts, slots) if self.batch.struct.segments else ([], [])

    def installed(self, slot: int) -> dict[str, NativeLowRank | None]:
        return {name: site._by_slot[slot] for name, site in self.kernels.items() if name != "attention"}


def test_memory_is_given_back_and_used_again_late(file: int) -> None:
    memory, start = FactorsMemory(file, 2), factors_start(2)
    first, second = memory.take(100), memory.take(PAGE_BYTES + 1)
    first.memory.fill_(7)
    assert [first.place - start, second.place - start] == [0, PAGE_BYTES]
    assert memory.map(first.place, 100).tolist() == [7] * 100
    place = first.place
    del first
    assert memory.map(place, 100).tolist() == [0] * 100
    assert memory.take(1).place == start + 3 * PAGE_BYTES, "not where the first was"
    memory._next = FACTORS_BYTES - PAGE_BYTES
    third = memory.take(2 * PAGE_BYTES)
    assert third.place == start + 3 * PAGE_BYTES, "behind the second, once the end is reached"
    third.memory.fill_(7)
    clear_factors(file, 2)
    assert not third.memory.any()


@pytest.mark.parametrize("is_copied", [False, True])
def test_engines_compute_with_the_adapters_of_each_other(is_copied: bool, library: NativeLibrary, file: int) -> None:
    own, other = Engine(file, 0), Engine(file, 1)
    block = own.exchange.take(1 << 16)
    take = take_lines if is_copied else Arena(block.memory[own.exchange.index_bytes :]).take
    packed = own.pack(library, 3, take, "first", "attention")
    published = own.publish(packed, None if is_copied else block)
    assert published is not None
    assert (published is block) is not is_copied
    own.exchange.install(4, published)
    own.exchange.set_own(np.array([4, 5, 4]), np.array([2, 1, 3]))
    sent = own.exchange.take_own()
    assert sent is not None
    assert sent.places.tolist() == [published.place, 0, published.place]
    own.exchange.apply([sent, None], [6, 2], 0)
    assert own.segments == ([0, 2, 3, 6, 8], [4, 5, 4, -1])
    for _ in range(2):  # it is mapped once
        other.exchange.apply([sent, None], [6, 2], 1)
        assert other.segments == ([0, 2, 3, 6, 8], [9, -1, 9, -1])
    installed = other.installed(9)
    first, second = installed["first"], installed["second"]
    assert first is not None
    assert second is None
    assert torch.equal(first.memory, packed["first"].memory)
    assert first.rank == 3
    assert (first.outline == packed["first"].outline).all()
    assert [bool(address) for address in first.addresses] == [True, False, True], "one expert is left alone"
    other.exchange.apply([None, None], [6, 2], 1)
    assert other.segments == ([], [])


def test_an_adapter_that_its_engine_frees_is_forgotten(library: NativeLibrary, file: int) -> None:
    own, other = Engine(file, 0), Engine(file, 1)
    for slot, rank in enumerate((2, 3)):
        own.exchange.install(slot, own.publish(own.pack(library, rank, take_lines, "first", "second")))
    own.exchange.set_own(np.array([0, 1]), np.array([1, 1]))
    sent = own.exchange.take_own()
    assert sent is not None
    other.exchange.apply([sent, None], [2, 1], 1)
    own.exchange.remove(0)
    own.exchange.remove(7)  # it has none
    own.exchange.set_own(np.array([1]), np.array([1]))
    sent = own.exchange.take_own()
    assert sent is not None
    assert sent.version == 1
    other.exchange.apply([sent, None], [1, 1], 1)
    assert sorted(other.free) == [9, 10]
    assert other.segments == ([0, 1, 2], [11, -1])
    assert not any(other.installed(9).values())
    other.exchange.forget_all()
    assert sorted(other.free) == [9, 10, 11]
    assert other.segments == ([], [])


def test_an_adapter_that_leaves_the_experts_alone_is_not_sent(library: NativeLibrary, file: int) -> None:
    own = Engine(file, 0)
    block = own.publish(own.pack(library, 2, take_lines, "attention"))
    assert block is None
    own.exchange.install(3, block)
    own.exchange.set_own(np.array([3]), np.array([2]))
    assert own.exchange.take_own() is None
    own.exchange.clear_own()
    assert own.exchange.take_own() is None


@pytest.mark.parametrize("is_native", [True, False])
def test_only_native_kernels_apply_them(is_native: bool, library: NativeLibrary) -> None:
    kernels = NativeKernels(Context(library, 1, "portable")) if is_native else TORCH_KERNELS
    router = RouterSpec(num_experts_per_token=1, normalize=True)
    model = nn.ModuleDict({"experts": Experts(MoESpec(num_experts=2, expert_size=8, router=router), 8, "silu")})
    model["experts"].is_pooled, model["experts"].own_experts = True, range(1)  # type: ignore[assignment]
    sites = make_sites(model, kernels, torch.float32, pools=False, shares=is_native)
    found = sites.targets.find("experts.1.gate_proj")
    if is_native:
        assert not isinstance(found, str)
        assert sites.sites[found.site].has_part(found.part), "an engine reads the factors of all experts"
        assert sites.shared == ["experts.gate_up_proj", "experts.down_proj"]
    else:
        assert isinstance(found, str)
        assert "only engines of one machine with native kernels apply adapters to them" in found

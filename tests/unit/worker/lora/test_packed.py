"""Adapters that were packed before are mapped: the same bits, without reading, and only if nothing has changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.config.lora import LoRAConfig
from quire.errors import AdapterError
from quire.testing.failpoints import injected
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.native_lora import NativeLowRank
from quire.worker.lora import packed
from quire.worker.lora.loader import AdapterLoader, LoadedAdapter
from quire.worker.lora.sites import make_sites
from quire.worker.packed_cache import PackedCache
from tests.adapters import tensors, write_adapter

from .test_loader import Toy, ask

NO_LIMITS = LoRAConfig()


class Loading:
    """A loader with a cache, what it has delivered, and the names of those that it has packed."""

    def __init__(self, library: NativeLibrary, directory: Path, limits: LoRAConfig = NO_LIMITS) -> None:
        kernels = NativeKernels(Context(library, 1, "portable"))
        sites = make_sites(Toy(), kernels, torch.float32, pools=False)
        self.cache = PackedCache(directory)
        self.delivered: list[LoadedAdapter] = []
        self.loader = AdapterLoader(
            *(kernels, sites, limits, torch.float32, torch.device("cpu"), self.delivered.append),
            cache=self.cache,
        )

    def load(self, path: Path, digest: str | None = None) -> tuple[dict[str, NativeLowRank], bool]:
        """Returns an adapter's weights, and whether they were packed."""
        names: list[str] = []
        with injected("lora.pack", lambda _, name: names.append(name)):
            self.loader.load(ask(path, digest=digest)).result(timeout=120)
        weights = self.delivered[-1].packed
        assert all(isinstance(site, NativeLowRank) for site in weights.values())
        return dict(weights), bool(names)  # type: ignore[arg-type]

    def end(self) -> None:
        """Ends the loader once everything is written."""
        self.loader.shutdown()


Make = Callable[..., Loading]


@pytest.fixture
def make(library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes loaders of one cache. Files count as settled at once."""
    monkeypatch.setattr(packed, "SETTLED_S", 0.0)
    made: list[Loading] = []

    def make(limits: LoRAConfig = NO_LIMITS) -> Loading:
        for loading in made:
            loading.end()
        made.append(Loading(library, tmp_path / "cache", limits))
        return made[-1]

    yield make
    made[-1].end()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", tensors(num_layers=1))


def assert_equal(first: dict[str, NativeLowRank], second: dict[str, NativeLowRank]) -> None:
    assert first.keys() == second.keys()
    for name, site in first.items():
        assert torch.equal(site.memory, second[name].memory)
        assert np.array_equal(site.outline, second[name].outline)
        assert (site.rank, site.shape) == (second[name].rank, second[name].shape)


def test_a_second_load_maps_what_the_first_packed(make: Make, adapter: Path) -> None:
    weights, was_packed = make().load(adapter)
    assert was_packed
    second = make()
    assert second.loader.measure(ask(adapter).lora_request).result(timeout=120) == sum(
        site.num_bytes for site in weights.values()
    )
    mapped, was_packed = second.load(adapter)
    assert not was_packed
    assert_equal(weights, mapped)


def test_other_files_are_read(make: Make, adapter: Path) -> None:
    weights, _ = make().load(adapter)
    write_adapter(adapter, tensors(num_layers=1, seed=1))
    loading = make()
    others, was_packed = loading.load(adapter)
    assert was_packed
    assert any(not torch.equal(site.memory, others[name].memory) for name, site in weights.items())
    write_adapter(adapter, tensors(num_layers=1, seed=1), lora_alpha=3)
    assert make().load(adapter)[1]


def test_requests_go_on_although_the_files_are_gone(make: Make, adapter: Path) -> None:
    first = make()
    weights, _ = first.load(adapter)
    digest = first.delivered[0].info.digest
    shutil.rmtree(adapter)
    mapped, was_packed = make().load(adapter, digest)
    assert not was_packed
    assert_equal(weights, mapped)


def test_what_the_limits_refuse_is_refused_from_the_cache_too(make: Make, adapter: Path) -> None:
    make().load(adapter)
    loading = make(LoRAConfig(max_lora_rank=2))
    with pytest.raises(AdapterError, match="--max-lora-rank is 2"):
        loading.load(adapter)


def test_a_file_that_changes_while_it_is_read_gets_no_link(make: Make, adapter: Path) -> None:
    loading = make()
    with injected("lora.pack", lambda *_: os.utime(adapter / "adapter_model.safetensors")):
        future = loading.loader.load(ask(adapter))
        with pytest.raises(AdapterError, match="was changed while it was read"):
            future.result(timeout=120)
    assert make().load(adapter)[1]


@pytest.mark.parametrize("part", ["head", "index", "short"])
def test_a_damaged_file_is_not_used(make: Make, adapter: Path, part: str) -> None:
    loading = make()
    weights, _ = loading.load(adapter)
    loading.end()
    (file,) = loading.cache.files()
    content = bytearray(file.read_bytes())
    if part == "short":
        del content[-100:]
    else:
        place = 4096 if part == "head" else content.index(b'{"rank"')
        content[place + 2] ^= 0x20
    file.write_bytes(content)
    again, was_packed = make().load(adapter)
    assert was_packed
    assert_equal(weights, again)


def test_clearing_deletes_links_too(make: Make, adapter: Path) -> None:
    loading = make()
    loading.load(adapter)
    loading.end()
    assert {file.suffix for file in loading.cache.directory.iterdir()} == {".packed", ".link"}
    loading.cache.clear()
    assert list(loading.cache.directory.iterdir()) == []
    assert make().load(adapter)[1]


def test_the_least_recently_used_go_when_the_directory_is_full(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "max_cache_bytes", lambda: packed.SHARE * 200_000)
    loading = make()
    for i in range(12):
        loading.load(write_adapter(tmp_path / str(i), tensors(num_layers=1, seed=i)))
        loading.end()
        loading = make()
    assert sum(file.stat().st_size for file in loading.cache.files()) <= 200_000
    assert 1 <= len(loading.cache.files()) < 12

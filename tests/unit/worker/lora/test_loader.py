"""The loader's pace, the digests it computes, and the order of its work."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from quire.config.lora import LoRAConfig
from quire.errors import AdapterError
from quire.lora_request import LoRARequest
from quire.testing.failpoints import injected
from quire.wire.lora import AdapterLoad
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.layers.linear import Linear, PackedLinear
from quire.worker.lora.loader import SHARE, SLICE_S, AdapterLoader, LoadedAdapter, Pace
from quire.worker.lora.sites import make_sites
from tests.adapters import tensors, write_adapter


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def burn(seconds: float) -> None:
    """Uses the processor."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_without_steps_it_never_rests() -> None:
    fake = FakeTime()
    pace = Pace(fake.clock, fake.sleep)
    for _ in range(5):
        with pace.work():
            burn(SLICE_S)
    assert fake.slept == []


def test_while_steps_run_it_rests_four_fifths_of_the_time() -> None:
    fake = FakeTime()
    pace = Pace(fake.clock, fake.sleep)
    worked = 0.0
    for _ in range(20):
        pace.note_step()
        start = time.thread_time()
        with pace.work():
            burn(SLICE_S / 3)
        worked += time.thread_time() - start
    assert 5 <= len(fake.slept) <= 10  # small slices are rested for together
    assert sum(fake.slept) >= 0.8 * worked * (1 / SHARE - 1)
    fake.now += 1.0  # no step for a second
    fake.slept.clear()
    with pace.work():
        burn(2 * SLICE_S)
    assert fake.slept == []


class Toy(nn.Module):
    """Layers with the names of the tiny llama's."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict({"qkv": PackedLinear(48, {"q_proj": 48, "k_proj": 24, "v_proj": 24})}),
                "mlp": nn.ModuleDict({"down_proj": Linear(80, 48)}),
            }
        )
        self.model = nn.ModuleDict({"layers": nn.ModuleList([layer])})


class Loading:
    """A loader of adapters for `Toy`, and what it has delivered."""

    def __init__(self) -> None:
        self.model = Toy()
        self.sites = make_sites(self.model, TORCH_KERNELS, torch.float32, pools=False)
        self.delivered: list[LoadedAdapter] = []
        limits, cpu = LoRAConfig(), torch.device("cpu")
        self.loader = AdapterLoader(TORCH_KERNELS, self.sites, limits, torch.float32, cpu, self.delivered.append)


@pytest.fixture
def loading() -> Iterator[Loading]:
    made = Loading()
    yield made
    made.loader.shutdown()


def ask(path: Path, name: str = "x", id_: int = 1, digest: str | None = None) -> AdapterLoad:
    return AdapterLoad(LoRARequest(name, id_, str(path)), 0, digest)


def test_the_digest_is_of_config_header_and_factors(loading: Loading, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, tensors(num_layers=1))
    info = loading.loader.load(ask(path)).result(timeout=120)
    whole = (path / "adapter_config.json").read_bytes() + (path / "adapter_model.safetensors").read_bytes()
    assert info.digest == hashlib.sha256(whole).hexdigest()  # peft's files have the factors of a module side by side
    assert info.rank == 4
    (adapter,) = loading.delivered
    assert adapter.info is info
    assert info.num_bytes == sum(packed.num_bytes for packed in adapter.packed.values())
    assert set(adapter.packed) == {"model.layers.0.self_attn.qkv", "model.layers.0.mlp.down_proj"}
    assert loading.loader.load(ask(path, digest=info.digest)).result(timeout=120).digest == info.digest
    write_adapter(tmp_path, tensors(num_layers=1, seed=3))
    with pytest.raises(AdapterError, match="were changed since it was loaded"):
        loading.loader.load(ask(path, digest=info.digest)).result(timeout=120)


def test_the_digest_is_the_same_while_steps_run(loading: Loading, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, tensors(num_layers=1))
    alone = loading.loader.load(ask(path)).result(timeout=120)
    with injected("lora.pack", lambda *_: loading.loader.note_step()):  # from the second site on
        changing = loading.loader.load(ask(path, "y", 2)).result(timeout=120)
    with injected("lora.read", lambda *_: loading.loader.note_step()):
        beside = loading.loader.load(ask(path, "z", 3)).result(timeout=120)
    assert alone.digest == changing.digest == beside.digest


def test_the_estimate_bounds_what_it_takes(loading: Loading, tmp_path: Path) -> None:
    for rank in (1, 8, 100):
        path = write_adapter(tmp_path / str(rank), tensors(rank, num_layers=1), r=rank)
        estimate = loading.loader.measure(ask(path).lora_request).result(timeout=120)
        assert loading.loader.load(ask(path)).result(timeout=120).num_bytes <= estimate


def test_half_precision_is_widened_exactly(loading: Loading, tmp_path: Path) -> None:
    narrow = {name: value.astype(np.float16) for name, value in tensors(num_layers=1).items()}
    wide = {name: value.astype(np.float32) for name, value in narrow.items()}
    for name, content in (("narrow", narrow), ("wide", wide)):
        loading.loader.load(ask(write_adapter(tmp_path / name, content))).result(timeout=120)
    x = torch.randn(3, 80)
    first, second = (adapter.packed["model.layers.0.mlp.down_proj"] for adapter in loading.delivered)
    assert torch.equal(first.multiply(x), second.multiply(x))  # type: ignore[attr-defined]


def test_it_loads_one_after_the_other_and_callers_do_not_wait(loading: Loading, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, tensors(num_layers=1))
    gate, names = threading.Event(), []

    def wait(_: str, name: str) -> None:
        names.append(name)
        assert gate.wait(120)

    with injected("lora.read", wait):
        futures = [loading.loader.load(ask(path, f"a{i}", i + 1)) for i in range(3)]
        assert not any(future.done() for future in futures)
        gate.set()
        for future in futures:
            future.result(timeout=120)
    assert names == ["a0", "a1", "a2"]


def test_loads_end_with_the_loader(loading: Loading, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, tensors(num_layers=1))

    with injected("lora.read", lambda *_: loading.loader.cancel_all()):
        future = loading.loader.load(ask(path))
        with pytest.raises(AdapterError, match="was removed while it was loaded"):
            future.result(timeout=120)
    assert loading.delivered == []

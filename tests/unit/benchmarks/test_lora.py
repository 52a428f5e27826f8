"""`benchmarks.lora` without engines: its adapters, turns and rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from benchmarks import lora, speculation
from benchmarks.lora import RANK, Arm, Loads, decode, make_adapters, percentile_99, prompts, slower
from benchmarks.speculation import whole
from benchmarks.versus.engine import Repetition
from benchmarks.versus.table import BEGIN, END
from safetensors import safe_open

from quire import LoRARequest
from quire.config.adapter import AdapterConfig
from tests.unit.frontend.virtual_loop import run_virtually


def test_an_adapter_changes_every_linear_layer_and_is_written_once(tmp_path: Path) -> None:
    first, second = map(Path, make_adapters("tiny", 2, tmp_path))
    assert AdapterConfig.from_dir(first)
    with safe_open(first / "adapter_model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert len(shapes) == 6 * 7 * 2
    assert shapes["base_model.model.model.layers.5.self_attn.v_proj.lora_B.weight"] == [128, RANK]
    assert shapes["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"] == [RANK, 768]
    content = (first / "adapter_model.safetensors").read_bytes()
    assert content != (second / "adapter_model.safetensors").read_bytes()
    (second / "mark").touch()
    assert make_adapters("tiny", 2, tmp_path) == [str(first), str(second)]
    assert (second / "mark").exists()


def test_requests_take_turns_through_the_adapters() -> None:
    calls: list[dict[str, Any]] = []

    def run(requests: object, prefix: int, limit_s: float, **more: Any) -> None:
        calls.append(more)

    engine = cast(Any, SimpleNamespace(run=run))
    Arm(engine, ["a", "b"]).run(decode("tiny", 5)(0), 0, 1.0)
    Arm(engine).run(decode("tiny", 5)(0), 0, 1.0)
    assert calls == [{"adapters": ["a", "b", "a", "b", "a"]}, {}]


def test_prompts_to_decode_stay_and_prompts_to_read_change() -> None:
    assert decode("tiny", 2)(0) == decode("tiny", 2)(1)
    assert prompts(4)(0) != prompts(4)(1)


def test_slower_is_in_percent_of_the_base() -> None:
    base, other = ([Repetition(s, None, None, 0.0)] for s in (2.0, 2.2))
    row = slower("L2", "what", base, other, whole, 6.0)
    assert row.value == pytest.approx(10)
    assert row.is_met is False
    assert slower("L2", "what", other, base, whole, 6.0).is_met


def test_rows_of_loads() -> None:
    quiet = [0.05] * 100
    loads = Loads(17.6, [0.03, 0.02, 0.05], [0.4], [(quiet, [0.05] * 98 + [0.06, 0.07])])
    idle, busy, p99, gap = loads.rows()
    assert (idle.value, idle.is_met, idle.detail) == (30.0, True, "3 loads, slowest 50 ms")
    assert busy.is_met is False
    assert p99.value == pytest.approx(0.06 / 0.05)
    assert gap.value == pytest.approx(20)
    assert percentile_99(range(1, 101)) == 99


class FakeEngine:
    """Gives each stream a token every 2 ms. A load takes 5 ms."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()

    @classmethod
    def from_engine_args(cls, args: object) -> FakeEngine:
        return cls()

    async def __aenter__(self) -> FakeEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert not self.loaded, "every adapter is unloaded"

    async def add_lora(self, request: LoRARequest) -> None:
        await asyncio.sleep(0.005)
        self.loaded.add(request.lora_int_id)

    async def remove_lora(self, lora_id: int) -> None:
        self.loaded.remove(lora_id)

    async def generate(self, *args: object, **kwargs: object) -> AsyncIterator[None]:
        while True:
            await asyncio.sleep(0.002)
            yield None


def test_loads_are_timed_beside_streams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"BATCH": 3, "WINDOW_S": 0.2, "SETTLE_S": 0.0, "AsyncLLM": FakeEngine}.items():
        monkeypatch.setattr(lora, name, value)
    monkeypatch.setattr(lora, "make_adapters", lambda model, count: make_adapters("tiny", 1, tmp_path) * count)
    options = SimpleNamespace(home=tmp_path, kv_cache_gib=1.0)
    monkeypatch.setattr(lora, "time", SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time()))
    loads = run_virtually(lora._watch_loads(cast(Any, SimpleNamespace(options=options, reps=2))))
    assert len(loads.idle) == 16
    assert len(loads.gaps) == 2
    assert min([*loads.idle, *loads.busy]) >= 0.0049
    for window in (window for pair in loads.gaps for window in pair):
        assert min(window) >= 0.0019
        assert len(window) > 3, "each of the streams is watched in each window"


def test_the_page_of_the_project_has_the_markers() -> None:
    text = speculation.PAGE.read_text(encoding="utf-8")
    assert all(text.count(mark.format("lora")) == 1 for mark in (BEGIN, END))


def test_unknown_goals_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lora.main(["--goals", "G1"])
    assert "known: L1, L2, L3, L4, L5" in capsys.readouterr().err

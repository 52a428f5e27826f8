"""The comparison over families: sizes of the checkpoints, and the table."""

from __future__ import annotations

from typing import Any

from benchmarks.families import BASE, SERVED, format_table, sizes

from quire.testing.tiny_models import FAMILIES


def line(engine: str, family: str = "llama", failure: str = "", **seconds: list[float]) -> dict[str, Any]:
    return {
        "family": family, "engine": engine, "version": engine, "parameters": 50e6, "eager": False, "failure": failure,
        "date": "2026-01-01", "machine": "a CPU",
        "seconds": {name[1:]: values for name, values in seconds.items()},
    }  # fmt: skip


def test_sizes_grow_from_the_tiny_config_of_every_family() -> None:
    assert set(SERVED) <= set(FAMILIES)
    assert all(sizes(family)["vocab_size"] == BASE["vocab_size"] for family in FAMILIES)
    assert sizes("gpt2")["num_key_value_heads"] == 12
    assert sizes("llama")["num_key_value_heads"] == 4
    assert sizes("qwen3_moe")["num_experts"] == 32
    assert sizes("olmoe")["intermediate_size"] == 256


def test_the_table_names_losses_and_refusals() -> None:
    lines = [
        line("quire", _1=[1.0, 2.0, 1.0], _16=[2.0, 2.0, 2.0]),
        line("vllm", _1=[2.0, 2.0, 3.0], _16=[1.0, 1.5, 9.0]),
        *(line("quire", "mpt", _1=[1.0], _16=[1.0]), line("vllm", "mpt", "no\nmodel")),
    ]
    text = format_table(lines)
    assert "| llama | 50 M | 1000 | 2000 | 2.00× | 2000 | 1500 | **0.75×** |" in text
    assert "Quire loses: llama (16: 0.75×)." in text
    assert "| mpt | no model |" in text
    assert "1 of 2 families were run by both; median of the ratios: 2.00× with 1, 0.75× with 16." in text

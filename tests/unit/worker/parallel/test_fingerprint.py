"""Engines that compute the same bits have the same `numerics_id`, and others have another one."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from quire.config.model import ASSETS_DIR
from quire.worker.parallel.fingerprint import digest_weights, make_numerics_id

DEMO = ASSETS_DIR / "demo"


def test_a_copy_has_the_digest_of_the_original(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(DEMO, copy)
    original = digest_weights(DEMO)
    assert digest_weights(copy) == original
    (weights,) = copy.glob("*.safetensors")
    with weights.open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"xy")
    assert digest_weights(copy) != original
    assert digest_weights(tmp_path) == "unknown"


def test_everything_that_decides_the_bits_is_in_the_text() -> None:
    cpu = torch.device("cpu")
    parts = ("native amx, ABI 13", (torch.bfloat16, "int8"), "native", "abc")
    text = make_numerics_id(cpu, *parts)
    assert text.endswith("; native amx, ABI 13; torch.bfloat16; int8; native attention; weights abc")
    changed = [("native avx2", *parts[1:]), (parts[0], (torch.float32, "int8"), *parts[2:]), (*parts[:3], "abd")]
    assert len({text, *(make_numerics_id(cpu, *other) for other in changed)}) == 4
    assert torch.__version__ in make_numerics_id(cpu, None, *parts[1:])

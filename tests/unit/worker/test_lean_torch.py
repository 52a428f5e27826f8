"""Importing less of torch, in processes of their own: what is left out is there when it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from quire.worker.lean_torch import NOT_NEEDED, TRIED_VERSIONS, installed_version

PROGRAM = """
import sys
import quire.worker.lean_torch as lean
import torch
import quire.worker.loader.load as load
load.Noise(0)  # dummy weights need nothing that waits
waiting = {n for n in lean.NOT_NEEDED if type(sys.modules.get(n)) is lean.LazyModule}
print(len(waiting), len(lean.NOT_NEEDED))
y = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
print(y.sum().item(), torch.empty(2, device="meta").shape)
print(torch.export.Dim("n").__name__, type(sys.modules["torch.export"]).__name__)
from torch.distributions import Normal
print(Normal(0.0, 1.0).mean.item())
"""


def run_lean(lean: str) -> list[str]:
    environment = {**os.environ, "QUIRE_LEAN_TORCH": lean}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True, text=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(not torch.__version__.startswith(TRIED_VERSIONS), reason="another torch is imported whole")
def test_what_is_not_needed_waits_until_it_is() -> None:
    counts, product, name, mean = run_lean("1")
    assert counts.split() == [str(len(NOT_NEEDED))] * 2
    assert (product, name, mean) == ("24.0 torch.Size([2])", "n module", "0.0")


@pytest.mark.scripts
@pytest.mark.parametrize("module", ["torch._inductor", "torch._dynamo"])
def test_what_counts_on_all_of_torch_finds_it(module: str) -> None:
    """The profiler asks for the compiler, whose modules import one another in circles."""
    program = f"import sys, quire.worker.lean_torch as lean, torch, {module}; print(len(lean._waiting))"
    environment = {**os.environ, "QUIRE_LEAN_TORCH": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.scripts
def test_all_of_torch_is_imported_when_it_is_switched_off() -> None:
    counts, product, name, mean = run_lean("0")
    assert counts.split() == ["0", str(len(NOT_NEEDED))]
    assert (product, name, mean) == ("24.0 torch.Size([2])", "n module", "0.0")


def test_the_version_is_read_without_importing() -> None:
    assert installed_version() == torch.__version__

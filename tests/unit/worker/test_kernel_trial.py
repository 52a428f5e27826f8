"""Instruction sets on trial: right ones pass, wrong ones and crashes do not, and no crash is ours."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.worker import kernel_trial as trial
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.kernel_trial import CHECKS, compare
from quire.worker.kernels import registry
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.specs import LinearSpec
from quire.worker.quantization.weight import QuantizedWeight


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    return tmp_path / "trials"


def test_every_instruction_set_agrees_with_every_other(library: NativeLibrary) -> None:
    names = library.instruction_sets()
    for candidate in names:
        assert compare(candidate, "portable") == []


class Wrong:
    """Kernels that are right but for what `spoil` does to their results."""

    def __init__(self, kernels: NativeKernels, spoil: Callable[[Tensor], Tensor]) -> None:
        self._kernels, self._spoil = kernels, spoil

    def linear(self, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Any:
        kernel = self._kernels.linear(weight, bias, spec)
        return lambda x: self._spoil(kernel(x))

    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None, spec: LinearSpec) -> Any:
        kernel = self._kernels.quantized_linear(weight, bias, spec)
        return lambda x: self._spoil(kernel(x))

    def experts(self, *args: Any) -> Any:
        kernel = self._kernels.experts(*args)
        return lambda *inputs: self._spoil(kernel(*inputs))

    def quantized_experts(self, *args: Any) -> Any:
        kernel = self._kernels.quantized_experts(*args)
        return lambda *inputs: self._spoil(kernel(*inputs))


class WrongAttention(NativeAttentionBackend):
    """Attention that is right but for what the kernels do to results."""

    def __init__(self, wrong: Wrong) -> None:
        super().__init__(wrong._kernels)
        self._spoil = wrong._spoil

    def forward(self, *arguments: Any) -> Tensor:
        return self._spoil(super().forward(*arguments))


@pytest.fixture(autouse=True)
def wrong_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    make: Any = trial.make_backend
    monkeypatch.setattr(trial, "make_backend", lambda k: WrongAttention(k) if isinstance(k, Wrong) else make(k))


def lose_an_output(y: Tensor) -> Tensor:
    y[:, -1] = 0
    return y


def swap_outputs(y: Tensor) -> Tensor:
    return y[:, [1, 0, *range(2, y.shape[1])]]


def shift_a_little(y: Tensor) -> Tensor:
    return y * (1 + 2.0**-5)


def not_a_number(y: Tensor) -> Tensor:
    y[0, 0] = float("nan")
    return y


def depend_on_the_batch(y: Tensor) -> Tensor:
    return torch.nextafter(y, y + 1) if y.shape[0] > 16 else y


@pytest.mark.parametrize("check", CHECKS)
def test_right_kernels_pass(library: NativeLibrary, check: trial.Check) -> None:
    right = NativeKernels(Context(library, 1, "portable"))
    assert list(check(right, right, right)) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lose_an_output, "more than rounding"),
        (swap_outputs, "more than rounding"),
        (shift_a_little, "more than rounding"),
        (not_a_number, "more than rounding"),
        (depend_on_the_batch, "rows beside it"),
    ],
)
@pytest.mark.parametrize("check", CHECKS)
def test_wrong_kernels_are_found(
    library: NativeLibrary, check: trial.Check, spoil: Callable[[Tensor], Tensor], words: str
) -> None:
    right = NativeKernels(Context(library, 1, "portable"))
    wrong: Any = Wrong(right, spoil)
    assert any(words in found for found in check(wrong, wrong, right))


def test_a_number_of_threads_that_changes_bits_is_found(library: NativeLibrary) -> None:
    right = NativeKernels(Context(library, 1, "portable"))
    other: Any = Wrong(right, lambda y: torch.nextafter(y, y + 1))
    kernels: tuple[Kernels, Kernels, Kernels] = (right, other, right)
    assert all(any("threads" in found for found in check(*kernels)) for check in CHECKS)


# -- the process ------------------------------------------------------------------------------------------------------


def candidate_of(library: NativeLibrary) -> str:
    """The best there is: simulated AMX takes a second, and is compared above."""
    return library.instruction_sets()[0]


def test_a_trial_is_run_once(library: NativeLibrary, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = candidate_of(library)
    assert registry.has_passed(candidate, "portable")
    (verdict,) = cache.iterdir()
    assert json.loads(verdict.read_text()) == {"agrees": True, "why": ""}
    monkeypatch.setattr(registry, "run_trial", lambda *_: pytest.fail("it was run again"))
    assert registry.has_passed(candidate, "portable")


@pytest.mark.parametrize(
    ("fault", "why", "is_kept"),
    [
        ("segv", "the trial was ended by SIGSEGV", True),
        pytest.param("kill", "the trial was ended by SIGKILL", False, marks=pytest.mark.slow),
        pytest.param("exit(1)", "the trial ended with exit code 1", False, marks=pytest.mark.slow),
        (-9, "the trial was ended by SIGKILL", False),
        (1, "the trial ended with exit code 1: the reason", False),
    ],
)
def test_a_crash_is_an_answer(
    library: NativeLibrary, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str | int, why: str, is_kept: bool
) -> None:
    """Numbers are exit codes of a process that is not run."""
    if isinstance(fault, int):
        done = subprocess.CompletedProcess([], fault, b"", b"a story\nthe reason\n")
        monkeypatch.setattr(registry.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setenv("QUIRE_FAILPOINTS", f"kernels.trial={fault}")
    names = [candidate_of(library), "portable"]
    monkeypatch.setattr(registry, "ON_TRIAL", frozenset(names[:1]))
    warnings: list[str] = []
    monkeypatch.setattr(registry.logger, "warning", lambda text, *args: warnings.append(text % args))
    assert registry.choose_instruction_set(names) == "portable"
    assert why in warnings[0]
    assert bool(list(cache.glob("*.json"))) == is_kept


def test_disagreement_is_kept_and_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = {"agrees": False, "why": "linear of 2 x 3 by 4"}
    monkeypatch.setattr(registry, "run_trial", lambda *_: (verdict, True))
    assert not registry.has_passed("portable", "portable")
    (path,) = cache.iterdir()
    assert json.loads(path.read_text()) == verdict
    path.write_text('{"agrees": "perhaps"}')
    monkeypatch.setattr(registry, "run_trial", lambda *_: ({"agrees": True, "why": ""}, True))
    assert registry.has_passed("portable", "portable"), "a verdict that cannot be read is none"


def test_the_exit_codes_are_the_trials() -> None:
    assert (registry.AGREES, registry.DISAGREES) == (trial.AGREES, trial.DISAGREES)


def test_what_takes_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FAILPOINTS", "kernels.trial=sleep(60)")
    verdict, is_final = registry.run_trial("portable", "portable", timeout_s=0.01)
    assert not verdict["agrees"]
    assert not is_final


def test_where_the_cache_cannot_be_written_the_trial_still_counts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file")
    monkeypatch.setattr(registry, "run_trial", lambda *_: ({"agrees": True, "why": ""}, True))
    assert registry.has_passed("portable", "portable")

"""Which kernels a worker gets: the best of the library, what the environment asks for, torch's where there is none."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from quire.worker.attention.registry import make_attention_backend
from quire.worker.kernels import library as library_module
from quire.worker.kernels import registry
from quire.worker.kernels.library import Context, NativeLibrary, native_library
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.registry import choose_kernels

CPU = torch.device("cpu")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after an install without a compiler."""
    monkeypatch.setattr(library_module, "LIBRARY", tmp_path / "libquire_kernels.so")
    native_library.cache_clear()
    monkeypatch.setattr(registry, "native_library", library_module.native_library)


@pytest.fixture(autouse=True)
def _fresh_cache() -> None:
    native_library.cache_clear()


def test_the_best_instruction_set_is_chosen(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CPU_KERNELS", raising=False)
    kernels = choose_kernels(CPU, torch.bfloat16, 2)
    assert isinstance(kernels, NativeKernels)
    assert kernels.context.instruction_set == library.instruction_sets()[0]
    assert kernels.context.num_threads == 2
    assert make_attention_backend(CPU, torch.bfloat16, torch.bfloat16, kernels).name == "native"
    assert make_attention_backend(CPU, torch.bfloat16, torch.float32, kernels).name == "torch"


def test_what_fails_its_trial_is_used_on_request_only(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CPU_KERNELS", raising=False)
    everything = library.instruction_sets()
    monkeypatch.setattr(registry, "ON_TRIAL", frozenset({everything[0]}))
    monkeypatch.setattr(registry, "has_passed", lambda candidate, reference: False)
    kernels = choose_kernels(CPU, torch.bfloat16, 1)
    assert isinstance(kernels, NativeKernels)
    assert kernels.context.instruction_set == everything[1]
    monkeypatch.setenv("QUIRE_CPU_KERNELS", everything[0])
    kernels = choose_kernels(CPU, torch.bfloat16, 1)
    assert isinstance(kernels, NativeKernels)
    assert kernels.context.instruction_set == everything[0]


def test_the_environment_chooses(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "portable")
    kernels = choose_kernels(CPU, torch.float32, 1)
    assert isinstance(kernels, NativeKernels)
    assert kernels.context.instruction_set == "portable"
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "torch")
    assert choose_kernels(CPU, torch.float32, 1).name == "torch"
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "avx99")
    with pytest.raises(
        ConfigError, match="QUIRE_CPU_KERNELS='avx99': there are no such kernels here; known are auto, torch"
    ):
        choose_kernels(CPU, torch.float32, 1)


def test_types_it_does_not_know_run_on_torch(library: NativeLibrary) -> None:
    assert choose_kernels(CPU, torch.float16, 1).name == "torch"
    assert choose_kernels(torch.device("cuda"), torch.bfloat16, 1).name == "torch"


@pytest.mark.usefixtures("no_library")
def test_without_a_library_everything_runs_on_torch() -> None:
    kernels = choose_kernels(CPU, torch.float32, 1)
    assert kernels.name == "torch"
    assert make_attention_backend(CPU, torch.float32, torch.float32, kernels).name == "torch"


def test_a_file_that_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "libquire_kernels.so"
    path.write_bytes(b"not a library")
    monkeypatch.setattr(library_module, "LIBRARY", path)
    with pytest.raises(OSError, match="libquire_kernels"):
        NativeLibrary(path)
    assert choose_kernels(CPU, torch.float32, 1).name == "torch"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int x;", "is no library of Quire's kernels"),
        ("STUBS", r"has another ABI \(version 999, not \d+\): build it again"),
    ],
)
def test_a_library_that_does_not_fit(source: str, message: str, tmp_path: Path) -> None:
    names = [
        *library_module._KERNELS,
        "qk_create",
        "qk_destroy",
        "qk_packed_bytes",
        "qk_quantized_bytes",
        "qk_read_memory",
        "qk_multiply_bf16",
        "qk_begin_plan",
        "qk_end_plan",
        "qk_run_plan",
        "qk_destroy_plan",
    ]
    stubs = "".join(f"void {name}(void) {{}}\n" for name in [*names, "qk_instruction_set"])
    stubs += "int qk_abi_version(void) { return 999; }\nlong long qk_struct_size(int n) { return n ? 8 : 0; }\n"
    (tmp_path / "stub.c").write_text(stubs if source == "STUBS" else source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "stub.so", tmp_path / "stub.c"], check=True, timeout=60)
    with pytest.raises(OSError, match=message):
        NativeLibrary(tmp_path / "stub.so")


def test_an_instruction_set_this_cpu_lacks(library: NativeLibrary) -> None:
    with pytest.raises(ValueError, match=r"no instruction set 'neon9' with kernels; it has .*portable"):
        Context(library, 1, "neon9")


def test_structs_have_the_sizes_of_the_header(library: NativeLibrary) -> None:
    sizes = [library.cdll.qk_struct_size(n) for n in range(len(library_module._STRUCTS) + 1)]
    assert sizes == [*map(ctypes.sizeof, library_module._STRUCTS), 0]

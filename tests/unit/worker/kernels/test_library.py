"""Which kernels a worker gets: the best of the library, what the environment asks for, torch's where there is none."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from quire.worker.attention.registry import make_attention_backend
from quire.worker.kernels import library as library_module
from quire.worker.kernels import registry
from quire.worker.kernels.library import Context, Header, NativeLibrary, native_library
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.registry import choose_kernels

CPU = torch.device("cpu")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes the package look like an install without a compiler."""
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
def test_without_a_library_everything_runs_on_torch(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        kernels = choose_kernels(CPU, torch.float32, 1)
        assert kernels.name == "torch"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "install a compiler (Debian: g++) and install Quire again" in record.getMessage()
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
    names = library_module._header.functions.keys() - {"qk_abi_version", "qk_struct_size"}
    stubs = "".join(f"void {name}(void) {{}}\n" for name in names)
    stubs += "int qk_abi_version(void) { return 999; }\nlong long qk_struct_size(int n) { return n ? 8 : 0; }\n"
    (tmp_path / "stub.c").write_text(stubs if source == "STUBS" else source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "stub.so", tmp_path / "stub.c"], check=True, timeout=60)
    with pytest.raises(OSError, match=message):
        NativeLibrary(tmp_path / "stub.so")


def test_an_instruction_set_this_cpu_lacks(library: NativeLibrary) -> None:
    with pytest.raises(ValueError, match=r"no instruction set 'neon9' with kernels; it has .*portable"):
        Context(library, 1, "neon9")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_structs_are_laid_out_as_a_compiler_lays_them_out(tmp_path: Path) -> None:
    structs = library_module._STRUCTS
    fields = [(name, field[0]) for name, struct in structs.items() for field in struct._fields_]
    rows = [f'printf("%zu\\n", offsetof({struct}, {field}));' for struct, field in fields]
    rows += [f'printf("%zu\\n", sizeof({struct}));' for struct in structs]
    rows += [f'printf("%d\\n", (int) {name});' for name in library_module.CONSTANTS]
    source = "\n".join(["#include <stddef.h>", "#include <stdio.h>", f'#include "{library_module.HEADER}"'])
    (tmp_path / "layout.c").write_text(f"{source}\nint main(void) {{ {' '.join(rows)} return 0; }}\n")
    program = tmp_path / "layout"
    subprocess.run(["cc", "-o", program, tmp_path / "layout.c"], check=True, timeout=60)
    printed = subprocess.run([program], check=True, timeout=60, capture_output=True, text=True).stdout.split()
    offsets = [getattr(structs[struct], field).offset for struct, field in fields]
    sizes = [ctypes.sizeof(struct) for struct in structs.values()]
    assert [int(text) for text in printed] == [*offsets, *sizes, *library_module.CONSTANTS.values()]
    assert len(structs) == 24


def test_functions_have_the_types_of_the_header() -> None:
    functions = library_module._header.functions
    pointer_to = ctypes.POINTER(library_module.LinearArgs)
    assert functions["qk_linear"] == (None, [ctypes.c_void_p, pointer_to])
    assert functions["qk_create"] == (ctypes.c_void_p, [ctypes.c_int32, ctypes.c_char_p])
    assert functions["qk_instruction_set"] == (ctypes.c_char_p, [ctypes.c_int32])
    assert functions["qk_abi_version"] == (ctypes.c_int32, [])


@pytest.mark.parametrize("field", ["int32_t sizes[4]", "unsigned int n"])
def test_a_declaration_that_is_not_understood_is_an_error(field: str) -> None:
    with pytest.raises(AssertionError, match="not understood: " + re.escape(field)):
        Header(f"typedef struct {{ int64_t n; {field}; }} qk_some_args;")

"""Finds and loads the native library (csrc/), and declares its C ABI to ctypes.

Structs and functions are read from `quire_kernels.h`, which the library is compiled with; version and sizes of structs
are compared when the library is loaded. The library lies beside this file: the package's build puts it there. Where
there is none, or none that fits, Quire runs on the torch reference.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.logger import init_logger
from quire.worker.kernels.packs import FRESH_PACKS, Packs, ResultMemory
from quire.worker.kernels.specs import CLAMPED_SWIGLU

logger = init_logger(__name__)

LIBRARY = Path(__file__).with_name("libquire_kernels.so")
HEADER = Path(__file__).with_name("quire_kernels.h")


class Header:
    """Structs, functions and constants of a C header, as ctypes needs them.

    Understands the C of `quire_kernels.h`: comments, enums and #defines of integers, structs without arrays, and
    functions marked QK_EXPORT. A pointer to a struct keeps its type; all others become c_void_p, which takes addresses.
    """

    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
        numbers = re.findall(r"#define (\w+) (\d+)\b|(\w+) = (\d+)", text)
        self.constants = {define or enum: int(a or b) for define, a, enum, b in numbers}
        self.structs: dict[str, type[Structure]] = {}
        for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", text, re.DOTALL):
            fields = [field for line in body.split(";") if line.strip() for field in self._declared(line)]
            self.structs[name] = type(name, (Structure,), {"_fields_": fields})
        self.functions: dict[str, tuple[Any, list[Any]]] = {}
        """Result and parameter types by name."""
        for result, name, parameters in re.findall(r"QK_EXPORT (.+?)(\w+)\(([^)]*)\);", text):
            types = [self._declared(p)[0][1] for p in parameters.split(",") if p != "void"]
            self.functions[name] = self._declared(result + "result")[0][1], types

    def _declared(self, declaration: str) -> list[tuple[str, Any]]:
        """Returns (name, type) of each variable of "const float* x" or "int64_t n, k"."""
        found = re.fullmatch(r"\s*(?:const )?(\w+)((?:\*| const)*)\s*(\w+(?:, \w+)*)\s*", declaration)
        assert found is not None, f"{HEADER.name}: not understood: {declaration.strip()}"
        base, stars, names = found.groups()
        kind: Any = self.structs.get(base) or _SCALARS.get(base)
        depth = stars.count("*")
        if depth and base == "char":
            kind = c_char_p
        elif depth and base not in self.structs:
            kind = c_void_p
        else:
            for _ in range(depth):
                kind = POINTER(kind)
        return [(name, kind) for name in names.split(", ")]


_SCALARS: dict[str, Any] = {
    "int32_t": c_int32, "int64_t": c_int64, "uint64_t": c_uint64, "float": c_float, "double": c_double, "void": None,
}  # fmt: skip
_header = Header(HEADER.read_text(encoding="utf-8"))
CONSTANTS, _STRUCTS = _header.constants, _header.structs
ABI_VERSION = CONSTANTS["QK_ABI_VERSION"]
AdapterBatchStruct = _STRUCTS["qk_adapter_batch"]
AdapterSiteStruct = _STRUCTS["qk_adapter_site"]
ActivationArgs = _STRUCTS["qk_activation_args"]
AttentionArgs = _STRUCTS["qk_attention_args"]
BarrierArgs = _STRUCTS["qk_barrier_args"]
BatchedLinearArgs = _STRUCTS["qk_batched_linear_args"]
ExpertsArgs = _STRUCTS["qk_experts_args"]
ExpertsPoolStruct = _STRUCTS["qk_experts_pool"]
GatherArgs = _STRUCTS["qk_gather_args"]
LayerNormArgs = _STRUCTS["qk_layer_norm_args"]
LinearArgs = _STRUCTS["qk_linear_args"]
LogprobsArgs = _STRUCTS["qk_logprobs_args"]
LowRankStruct = _STRUCTS["qk_low_rank"]
PackArgs = _STRUCTS["qk_pack_args"]
PackLowRankArgs = _STRUCTS["qk_pack_low_rank_args"]
PoolStepStruct = _STRUCTS["qk_pool_step"]
PackQuantizedArgs = _STRUCTS["qk_pack_quantized_args"]
Quantization = _STRUCTS["qk_quantization"]
QuantizedLinearArgs = _STRUCTS["qk_quantized_linear_args"]
RmsNormArgs = _STRUCTS["qk_rms_norm_args"]
RotateArgs = _STRUCTS["qk_rotate_args"]
RouteArgs = _STRUCTS["qk_route_args"]
SampleArgs = _STRUCTS["qk_sample_args"]
StepArgs = _STRUCTS["qk_step_args"]


class NativeLibrary:
    """The loaded library. Raises OSError if `path` is no library that fits this version of Quire."""

    def __init__(self, path: Path) -> None:
        self.cdll = ctypes.CDLL(str(path))
        try:
            for name, (result, parameters) in _header.functions.items():
                function = getattr(self.cdll, name)
                function.argtypes, function.restype = parameters, result
        except AttributeError as e:
            raise OSError(f"{path} is no library of Quire's kernels: {e}") from None
        version = self.cdll.qk_abi_version()
        arguments = [struct for name, struct in _STRUCTS.items() if name.endswith("_args")]
        sizes = [self.cdll.qk_struct_size(n) for n in range(len(arguments) + 1)]
        if version != ABI_VERSION or sizes != [*map(ctypes.sizeof, arguments), 0]:
            raise OSError(f"{path} has another ABI (version {version}, not {ABI_VERSION}): build it again")

    def instruction_sets(self) -> list[str]:
        """Returns the instruction sets that the library has kernels for and this CPU supports, the best first."""
        found = map(self.cdll.qk_instruction_set, itertools.count())
        return [name.decode() for name in itertools.takewhile(lambda name: name is not None, found)]


class Context:
    """Threads and scratch memory of the kernels of one instruction set. One thread at a time may use it.

    `num_threads` includes the calling thread. Raises ValueError if this CPU lacks the instruction set.
    """

    def __init__(self, library: NativeLibrary, num_threads: int, instruction_set: str) -> None:
        cdll = library.cdll
        handle = cdll.qk_create(num_threads, instruction_set.encode())
        if handle is None:
            known = ", ".join(library.instruction_sets())
            raise ValueError(f"this CPU has no instruction set {instruction_set!r} with kernels; it has {known}")
        self.library = library
        self.handle = c_void_p(handle)
        self.num_threads = num_threads
        self.instruction_set = instruction_set
        self.packs: Packs = FRESH_PACKS
        """Source of memory for weights that are packed now: `Kernels.packing`."""
        self.num_kernels = 0
        """Kernels made for this context so far. A plan is valid as long as this number does not change."""
        self.result_memory = ResultMemory()
        self.is_recording = False
        """True while kernels are recorded for a plan, whose arena holds their results."""
        weakref.finalize(self, cdll.qk_destroy, self.handle)

    def empty_result(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an unfilled tensor for a result that may be large: logits."""
        return torch.empty(*shape, dtype=dtype) if self.is_recording else self.result_memory.take(shape, dtype)


@cache
def native_library() -> NativeLibrary | None:
    """Returns the library beside this file; None, with a warning in the log, if there is none that fits."""
    if not LIBRARY.exists():
        logger.warning(
            "no native kernels: Quire was installed without a C++ compiler, and torch computes instead, several times "
            "slower; install a compiler (Debian: g++) and install Quire again (pip install --force-reinstall --no-deps)"
        )
        return None
    try:
        return NativeLibrary(LIBRARY)
    except OSError as e:
        logger.warning("no native kernels: %s", e)
        return None


DTYPES = {torch.float32: CONSTANTS["QK_FLOAT32"], torch.bfloat16: CONSTANTS["QK_BFLOAT16"]}
ACTIVATIONS = {
    None: CONSTANTS["QK_IDENTITY"],
    "relu": CONSTANTS["QK_RELU"],
    "silu": CONSTANTS["QK_SILU"],
    "gelu": CONSTANTS["QK_GELU"],
    "gelu_fast": CONSTANTS["QK_GELU_TANH"],
    "gelu_new": CONSTANTS["QK_GELU_TANH"],
    "gelu_pytorch_tanh": CONSTANTS["QK_GELU_TANH"],
    "quick_gelu": CONSTANTS["QK_QUICK_GELU"],
    "relu2": CONSTANTS["QK_RELU2"],
    CLAMPED_SWIGLU: CONSTANTS["QK_CLAMPED_SWIGLU"],
    "sigmoid": CONSTANTS["QK_SIGMOID"],
    "softplus": CONSTANTS["QK_SOFTPLUS"],
    "swish": CONSTANTS["QK_SILU"],
}


def with_packed_rows(x: Tensor) -> Tensor:
    """Returns x: [n, dim], copied if the elements of a row are not adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


def set_residual(args: Any, residual: Tensor | None) -> Tensor | None:
    """Sets the residual in `args` of a linear layer or a norm. The returned tensor is the one set, and must outlive the
    call."""
    if residual is None:
        args.residual = None
        return None
    residual = with_packed_rows(residual)
    args.residual, args.residual_stride = residual.data_ptr(), residual.stride(0)
    return residual

"""Finds and loads the native library (csrc/), and mirrors its C ABI for ctypes.

The library lies beside this file: the package's build puts it there. Where there is none, or none that fits, Quire runs
on the torch reference. `quire_kernels.h` is the truth about the structs below; sizes and version are compared at load.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.logger import init_logger
from quire.worker.kernels.packs import FRESH_PACKS, Packs, ResultMemory

logger = init_logger(__name__)

ABI_VERSION = 6
LIBRARY = Path(__file__).with_name("libquire_kernels.so")


class PackArgs(Structure):
    """qk_pack_args"""

    _fields_ = (
        ("n", c_int64), ("k", c_int64), ("dtype", c_int32), ("gated", c_int32),
        ("weights", c_void_p), ("stride", c_int64), ("packed", c_void_p),
    )  # fmt: skip


class LinearArgs(Structure):
    """qk_linear_args"""

    _fields_ = (
        ("m", c_int64), ("n", c_int64), ("k", c_int64),
        ("dtype", c_int32), ("out_dtype", c_int32), ("gated", c_int32), ("activation", c_int32),
        ("divisor", c_float), ("soft_cap", c_float),
        ("packed", c_void_p), ("bias", c_void_p),
        ("residual", c_void_p), ("residual_stride", c_int64),
        ("x", c_void_p), ("x_stride", c_int64), ("y", c_void_p), ("y_stride", c_int64),
    )  # fmt: skip


class PackQuantizedArgs(Structure):
    """qk_pack_quantized_args"""

    _fields_ = (
        ("n", c_int64), ("k", c_int64), ("form", c_int32), ("gated", c_int32),
        ("values", c_void_p), ("stride", c_int64), ("packed", c_void_p),
    )  # fmt: skip


class Quantization(Structure):
    """qk_quantization"""

    _fields_ = (
        ("form", c_int32), ("reserved", c_int32), ("group_size", c_int64),
        ("scales", c_void_p), ("zeros", c_void_p), ("corrections", c_void_p),
    )  # fmt: skip


class QuantizedLinearArgs(Structure):
    """qk_quantized_linear_args"""

    _fields_ = (("linear", LinearArgs), ("quantization", Quantization))


class RmsNormArgs(Structure):
    """qk_rms_norm_args"""

    _fields_ = (
        ("rows", c_int64), ("dim", c_int64), ("dtype", c_int32), ("scale_in_float32", c_int32),
        ("eps", c_float), ("offset", c_float), ("weight", c_void_p),
        ("residual", c_void_p), ("residual_stride", c_int64),
        ("x", c_void_p), ("x_stride", c_int64), ("y", c_void_p), ("y_stride", c_int64),
    )  # fmt: skip


class RotateArgs(Structure):
    """qk_rotate_args"""

    _fields_ = (
        ("tokens", c_int64), ("dtype", c_int32), ("table_dtype", c_int32),
        ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_size", c_int32), ("rotary_half", c_int32),
        ("scale_in_float32", c_int32), ("eps", c_float), ("offset", c_float),
        ("query_norm", c_void_p), ("key_norm", c_void_p),
        ("positions", c_void_p), ("cos", c_void_p), ("sin", c_void_p),
        ("query", c_void_p), ("query_stride", c_int64), ("key", c_void_p), ("key_stride", c_int64),
    )  # fmt: skip


class ActivationArgs(Structure):
    """qk_activation_args"""

    _fields_ = (
        ("rows", c_int64), ("dim", c_int64), ("dtype", c_int32), ("gated", c_int32),
        ("activation", c_int32), ("reserved", c_int32),
        ("x", c_void_p), ("x_stride", c_int64), ("y", c_void_p), ("y_stride", c_int64),
    )  # fmt: skip


class GatherArgs(Structure):
    """qk_gather_args"""

    _fields_ = (
        ("rows", c_int64), ("dim", c_int64), ("dtype", c_int32), ("packed", c_int32),
        ("table", c_void_p), ("ids", c_void_p), ("y", c_void_p),
    )  # fmt: skip


class RouteArgs(Structure):
    """qk_route_args"""

    _fields_ = (
        ("tokens", c_int64), ("num_experts", c_int32), ("chosen", c_int32),
        ("normalize", c_int32), ("round_to_bf16", c_int32),
        ("logits", c_void_p), ("ids", c_void_p), ("weights", c_void_p),
    )  # fmt: skip


class ExpertsArgs(Structure):
    """qk_experts_args"""

    _fields_ = (
        ("tokens", c_int64), ("hidden", c_int64), ("expert_size", c_int64),
        ("dtype", c_int32), ("num_experts", c_int32), ("chosen", c_int32), ("activation", c_int32),
        ("gate_up", c_void_p), ("down", c_void_p),
        ("gate_up_quantization", POINTER(Quantization)), ("down_quantization", POINTER(Quantization)),
        ("ids", c_void_p), ("weights", c_void_p),
        ("residual", c_void_p), ("residual_stride", c_int64),
        ("x", c_void_p), ("x_stride", c_int64), ("y", c_void_p), ("y_stride", c_int64),
    )  # fmt: skip


class AttentionArgs(Structure):
    """qk_attention_args"""

    _fields_ = (
        ("num_tokens", c_int64), ("num_reqs", c_int64), ("dtype", c_int32),
        ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_size", c_int32), ("block_size", c_int32),
        ("window", c_int32), ("ahead", c_int32), ("scale", c_float), ("soft_cap", c_float), ("sinks", c_void_p),
        ("query_lens", c_void_p), ("seq_lens", c_void_p),
        ("block_table", c_void_p), ("block_table_stride", c_int64), ("slots", c_void_p),
        ("query", c_void_p), ("query_stride", c_int64), ("key", c_void_p), ("key_stride", c_int64),
        ("value", c_void_p), ("value_stride", c_int64), ("key_cache", c_void_p), ("value_cache", c_void_p),
        ("y", c_void_p), ("y_stride", c_int64),
    )  # fmt: skip


class StepArgs(Structure):
    """qk_step_args"""

    _fields_ = (
        ("num_tokens", c_int64), ("ids", c_void_p), ("positions", c_void_p),
        ("num_batches", c_int64), ("batches", POINTER(POINTER(AttentionArgs))),
    )  # fmt: skip


class SampleArgs(Structure):
    """qk_sample_args"""

    _fields_ = (
        ("rows", c_int64), ("vocab", c_int64), ("logits", c_void_p), ("stride", c_int64),
        ("temperature", c_void_p), ("min_p", c_void_p), ("top_k", c_void_p), ("top_p", c_void_p),
        ("seeds", c_void_p), ("indices", c_void_p), ("token_ids", c_void_p),
    )  # fmt: skip


class LogprobsArgs(Structure):
    """qk_logprobs_args"""

    _fields_ = (
        ("rows", c_int64), ("vocab", c_int64), ("num_top", c_int64), ("logits", c_void_p), ("stride", c_int64),
        ("which", c_void_p), ("selected", c_void_p),
        ("token_ids", c_void_p), ("logprobs", c_void_p), ("ranks", c_void_p), ("log_totals", c_void_p),
    )  # fmt: skip


_STRUCTS: tuple[type[Structure], ...] = (
    PackArgs, LinearArgs, PackQuantizedArgs, QuantizedLinearArgs, RmsNormArgs, RotateArgs,
    ActivationArgs, GatherArgs, RouteArgs, ExpertsArgs,
    AttentionArgs, StepArgs, SampleArgs, LogprobsArgs,
)  # fmt: skip
_KERNELS = {
    "qk_pack": PackArgs,
    "qk_unpack": PackArgs,
    "qk_linear": LinearArgs,
    "qk_rms_norm": RmsNormArgs,
    "qk_rotate": RotateArgs,
    "qk_activation": ActivationArgs,
    "qk_gather": GatherArgs,
    "qk_route": RouteArgs,
    "qk_experts": ExpertsArgs,
    "qk_attention": AttentionArgs,
    "qk_pack_quantized": PackQuantizedArgs,
    "qk_quantized_linear": QuantizedLinearArgs,
    "qk_sample": SampleArgs,
    "qk_logprobs": LogprobsArgs,
}


class NativeLibrary:
    """The loaded library. Raises OSError if `path` is no library that fits this version of Quire."""

    def __init__(self, path: Path) -> None:
        self.cdll = ctypes.CDLL(str(path))
        try:
            self._declare()
        except AttributeError as e:
            raise OSError(f"{path} is no library of Quire's kernels: {e}") from None
        version = self.cdll.qk_abi_version()
        sizes = [self.cdll.qk_struct_size(n) for n in range(len(_STRUCTS) + 1)]
        if version != ABI_VERSION or sizes != [*map(ctypes.sizeof, _STRUCTS), 0]:
            raise OSError(f"{path} has another ABI (version {version}, not {ABI_VERSION}): build it again")

    def _declare(self) -> None:
        cdll = self.cdll
        cdll.qk_struct_size.restype = c_int64
        cdll.qk_instruction_set.restype = c_char_p
        cdll.qk_create.argtypes, cdll.qk_create.restype = (c_int32, c_char_p), c_void_p
        cdll.qk_destroy.argtypes, cdll.qk_destroy.restype = (c_void_p,), None
        cdll.qk_packed_bytes.argtypes, cdll.qk_packed_bytes.restype = (c_int64, c_int64, c_int32, c_int32), c_int64
        sizes = (c_int64, c_int64, c_int32, c_int32)
        cdll.qk_quantized_bytes.argtypes, cdll.qk_quantized_bytes.restype = sizes, c_int64
        cdll.qk_read_memory.argtypes, cdll.qk_read_memory.restype = (c_void_p, c_void_p, c_int64), None
        cdll.qk_multiply_bf16.argtypes, cdll.qk_multiply_bf16.restype = (c_void_p, c_int64), c_int64
        cdll.qk_begin_plan.argtypes, cdll.qk_begin_plan.restype = (c_void_p, POINTER(StepArgs)), c_void_p
        cdll.qk_end_plan.argtypes = (c_void_p,)
        cdll.qk_run_plan.argtypes, cdll.qk_run_plan.restype = (c_void_p, c_void_p, POINTER(StepArgs)), None
        cdll.qk_destroy_plan.argtypes, cdll.qk_destroy_plan.restype = (c_void_p,), None
        for name, struct in _KERNELS.items():
            function = getattr(cdll, name)
            function.argtypes, function.restype = (c_void_p, POINTER(struct)), None

    def instruction_sets(self) -> list[str]:
        """Those that it has kernels for and this CPU says it can run, the best first."""
        found = map(self.cdll.qk_instruction_set, itertools.count())
        return [name.decode() for name in itertools.takewhile(lambda name: name is not None, found)]


class Context:
    """Threads and scratch memory of the kernels of one instruction set. One thread at a time may use it.

    `num_threads` counts the caller's. Raises ValueError if this CPU lacks the instruction set.
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
        """Where kernels that are made now get the memory of what they pack: `Kernels.packing`."""
        self.num_kernels = 0
        """Made for this context so far. Whoever has recorded kernels knows by it that there are others now."""
        self.result_memory = ResultMemory()
        self.is_recording = False
        """Kernels are recorded for a plan, whose arena holds their results."""
        weakref.finalize(self, cdll.qk_destroy, self.handle)

    def empty_result(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an unfilled tensor for a result that may be large: logits."""
        return torch.empty(*shape, dtype=dtype) if self.is_recording else self.result_memory.take(shape, dtype)


@cache
def native_library() -> NativeLibrary | None:
    """The library beside this file; None, with a line in the log, if there is none that fits."""
    if not LIBRARY.exists():
        logger.info("no native kernels: the package was built without a C++ compiler")
        return None
    try:
        return NativeLibrary(LIBRARY)
    except OSError as e:
        logger.warning("no native kernels: %s", e)
        return None


DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {None: 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_new": 4, "gelu_pytorch_tanh": 4}


def with_packed_rows(x: Tensor) -> Tensor:
    """x: [n, dim] itself if the elements of a row are neighbours, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def set_residual(args: Any, residual: Tensor | None) -> Tensor | None:
    """Have `args`, of a linear layer or a norm, name what is added. The tensor returned is the one named, and must
    outlive the call."""
    if residual is None:
        args.residual = None
        return None
    residual = with_packed_rows(residual)
    args.residual, args.residual_stride = residual.data_ptr(), residual.stride(0)
    return residual

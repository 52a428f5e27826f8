"""The kernel calls of a step as one call: recorded once from a function made of native kernels, then run by the
library.

The function is called once for a step of the largest size, while the library records its kernels instead of running
them. Memory for their results comes from an arena, where it stays. Of torch's operations only views, copies, sums and
products of two results, and results side by side, can be recorded: `NotPlannableError`.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.worker.kernels.barrier import check_barrier
from quire.worker.kernels.library import DTYPES, AttentionArgs, Context, StepArgs
from quire.worker.kernels.native import NativeActivation

ARENA_BYTES = 1 << 28
"""Size of an arena's address space; the system commits memory where a result is first written."""
LINE = 64
STAGGER = 7 * LINE
"""Bytes between one result and the next: sizes are multiples of large powers of two, and first rows should not all
share the same few cache lines."""


class NotPlannableError(Exception):
    """The function needs an operation that is no native kernel."""


class ArenaFullError(NotPlannableError):
    """The results of a step of the largest size do not fit into the arena."""


class Arena:
    """Memory for the results of one plan. Once no tensor refers to a result, the next one of its size takes its place.

    Raises NotPlannableError if the system refuses the address space.
    """

    def __init__(self, num_bytes: int = ARENA_BYTES) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._memory = memoryview(mmap.mmap(-1, num_bytes, flags=flags))
        except OSError as e:  # a limit of the address space
            raise NotPlannableError(f"no {num_bytes} bytes of address space for results: {e}") from None
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An unfilled tensor, which keeps the arena's memory alive. Raises ArenaFullError."""
        num_bytes = -(-max(1, torch.Size(shape).numel() * dtype.itemsize) // LINE) * LINE
        free = self._free.setdefault(num_bytes, [])
        start = free.pop() if free else self._grow(num_bytes)
        piece = self._memory[start : start + num_bytes]
        weakref.finalize(piece, free.append, start).atexit = False
        return torch.frombuffer(piece, dtype=dtype)[: torch.Size(shape).numel()].view(*shape)

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is, or views, a result."""
        return 0 <= tensor.data_ptr() - self._address < self._end

    def _grow(self, num_bytes: int) -> int:
        start, self._end = self._end, self._end + num_bytes + STAGGER
        if self._end > len(self._memory):
            raise ArenaFullError(f"results of a step take more than {len(self._memory)} bytes")
        return start


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """Lets torch make views, and new tensors in the arena; a native kernel computes copies, sums, products and rows
    side by side."""

    def __init__(self, arena: Arena, context: Context, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor has its constructor
        self._arena, self._num_tokens = arena, num_tokens
        self._combine = NativeActivation(context)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: nothing here is compiled, and excluding the compiler would import it, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handles one torch operation."""
        ops = torch.ops.aten
        if func is ops.empty.memory_format:
            return self._arena.take(args[0], (kwargs or {}).get("dtype") or torch.get_default_dtype())
        if func in (ops.add.Tensor, ops.mul.Tensor) and not kwargs:
            x, y = map(self._rows_of, args)
            if x is not None and y is not None and args[0].shape == args[1].shape and x.dtype == y.dtype:
                with self:  # again: the result belongs into the arena
                    combined = self._combine(x, None, y) if func is ops.add.Tensor else self._combine(x, y)
                return combined.view(args[0].shape)
        if func is ops.clone.default and (x := self._rows_of(args[0])) is not None:
            with self:
                return self._combine(x).view(args[0].shape)
        if func is ops.cat.default and args[1:] in ((1,), (-1,)):
            parts = [x for x in map(self._rows_of, args[0]) if x is not None]
            if len(parts) == len(args[0]) and len({x.dtype for x in parts}) == 1:
                widths = [x.shape[1] for x in parts]
                whole = self._arena.take((self._num_tokens, sum(widths)), parts[0].dtype)
                with self:
                    for x, place in zip(parts, torch.split(whole, widths, dim=1), strict=True):
                        self._combine(x, out=place)
                return whole
        if func is ops.dropout.default and not args[2]:
            return args[0]
        if not func.is_view:
            raise NotPlannableError(f"{func} is no native kernel")
        result = func(*args, **(kwargs or {}))
        memory = {t.untyped_storage().data_ptr() for t in (result if isinstance(result, (list, tuple)) else [result])}
        if memory != {args[0].untyped_storage().data_ptr()}:
            raise NotPlannableError(f"{func} copies here")  # contiguous and reshape may
        return result

    def _rows_of(self, operand: Any) -> Tensor | None:
        """Returns an operand as [num_tokens, elements of a token]; None unless it is a result with a row per token."""
        if not isinstance(operand, Tensor) or operand.dtype not in DTYPES or not self._arena.holds(operand):
            return None
        shape = operand.shape[operand.dim() > 1 and operand.shape[0] == 1 :]
        if len(shape) < 2 or shape[0] != self._num_tokens:
            return None
        try:
            return operand.view(self._num_tokens, -1)
        except RuntimeError:  # the elements of a token are not in their order
            return None


class Plan:
    """The recorded calls, and the memory of their results. Holds no weights and no cache: those it was made with must
    stay alive while it is used."""

    def __init__(
        self,
        context: Context,
        function: Callable[..., Tensor | tuple[Tensor, ...]],
        max_num_tokens: int,
        batches: Sequence[Structure],
        inputs: Sequence[Tensor] = (),
    ) -> None:
        """`function`: ids and positions, [max_num_tokens] int64 each, and a tensor [max_num_tokens, dim] like each of
        `inputs`, to one or several [max_num_tokens, dim]. It attends with `batches`, one per group of layers with the
        same block tables. Calls are matched with batches by their `slots`, so those must differ. Raises
        NotPlannableError."""
        self._context, cdll = context, context.library.cdll
        self._batches = (POINTER(AttentionArgs) * len(batches))()
        self._step = StepArgs(num_batches=len(batches), batches=self._batches)
        ids, positions = torch.empty((2, max_num_tokens), dtype=torch.int64)
        self._arena = arena = Arena()  # the result may lie elsewhere, where all workers see it
        self._inputs = [arena.take((max_num_tokens, x.shape[1]), x.dtype) for x in inputs]
        self._put(ids, positions, batches)
        self._handle = c_void_p(cdll.qk_begin_plan(context.handle, byref(self._step)))
        weakref.finalize(self, cdll.qk_destroy_plan, self._handle)
        context.is_recording = True
        try:
            with Recorder(arena, context, max_num_tokens):
                self._result = function(ids, positions, *self._inputs)
        finally:
            context.is_recording = False
            is_whole = cdll.qk_end_plan(context.handle)
        if not is_whole:
            raise NotPlannableError("a kernel is called for something else than each token of the step")

    def _put(self, ids: Tensor, positions: Tensor, batches: Sequence[Structure]) -> None:
        step = self._step
        step.num_tokens, step.ids, step.positions = ids.shape[0], ids.data_ptr(), positions.data_ptr()
        for i, batch in enumerate(batches):
            self._batches[i] = ctypes.pointer(batch)

    def run(
        self, ids: Tensor, positions: Tensor, batches: Sequence[Structure], *inputs: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """Runs the plan. ids, positions: [n] int64, at most as many as it was made for; inputs: [n, dim]. Returns
        [n, dim], or several, which the next run overwrites. Raises BarrierError."""
        n, result = ids.shape[0], self._result
        for place, rows in zip(self._inputs, inputs, strict=True):
            place[:n].copy_(rows)
        self._put(ids, positions, batches)
        check_barrier(self._context.library.cdll.qk_run_plan(self._context.handle, self._handle, byref(self._step)))
        return tuple(rows[:n] for rows in result) if isinstance(result, tuple) else result[:n]

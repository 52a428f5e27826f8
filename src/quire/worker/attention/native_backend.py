"""Paged attention by the native library, and short steps as one call into it.

Attention: bf16 and float32 on CPUs, row-invariant to the bit. A token's result is the same whether it is computed in a
prompt, in a chunk of one, or while decoding, and does not depend on the rest of the batch: see csrc/attention.h.

Steps: calling a kernel from Python takes about as long as the kernel of a small model: 50 calls for a token. The calls
of a forward pass are therefore recorded once, from the model as it is written, and repeated by the library
(kernels/plan.py). The bits are those of the model called module by module: the same kernels run in the same order on
the same numbers.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ctypes import Structure, byref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.logger import init_logger
from quire.wire.kv_cache import AnyKVCacheSpec
from quire.worker.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Forward,
    ForwardContext,
    KVCache,
    States,
    get_forward_context,
    set_forward_context,
    view_pages,
)
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import DTYPES, AttentionArgs, with_packed_rows
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.plan import ArenaFullError, NotPlannableError, Plan

logger = init_logger(__name__)


@dataclass(frozen=True)
class NativeAttentionMetadata:
    """The batch's half of the arguments of a step, and the tensors they point to."""

    args: Structure
    """qk_attention_args"""
    query_lens: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    block_table: Tensor
    slot_mapping: Tensor


class NativeAttentionBackend(AttentionBackend[NativeAttentionMetadata]):
    """A layer's cache is 2 tensors [num_blocks, num_kv_heads, block_size * head_size]: pages in the library's order.

    Blocks need not be adjacent.
    """

    name = "native"

    def __init__(self, kernels: Kernels) -> None:
        assert isinstance(kernels, NativeKernels)
        super().__init__(kernels)
        self.context = kernels.context
        self.agree: Callable[[int], int] = lambda value: value
        """Returns the least value of all workers that compute a step together."""
        self.rehearsal: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(False)
        """Lets the model run without the others that take part in its steps. Enters with whether the step has to be
        run again with them."""

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, kernels: Kernels) -> bool:
        """Returns True for native kernels and a cache of the model's type."""
        return isinstance(kernels, NativeKernels) and dtype in DTYPES and cache_dtype == dtype

    def view_kv_cache(self, storage: Tensor, spec: AnyKVCacheSpec, num_blocks: int, offset: int = 0) -> KVCache:
        shape = (num_blocks, spec.num_kv_heads, spec.block_size * spec.head_size)
        return KVCache(*(t.view(shape) for t in view_pages(storage, spec, num_blocks, offset)))

    def plan_steps(self, model: Forward) -> Forward:
        return StepPlanner(model, self)

    def for_one_worker(self) -> NativeAttentionBackend:
        return NativeAttentionBackend(self.kernels)

    def make_metadata(self, batch: AttentionBatch, spec: AnyKVCacheSpec) -> NativeAttentionMetadata:
        """Returns the batch's half of the arguments."""
        query_lens, seq_lens = (np.ascontiguousarray(a, dtype=np.int64) for a in (batch.query_lens, batch.seq_lens))
        table, slots = with_packed_rows(batch.block_table), batch.slot_mapping.contiguous()
        args = AttentionArgs(
            num_tokens=slots.shape[0],
            num_reqs=len(query_lens),
            block_size=spec.block_size,
            query_lens=query_lens.ctypes.data,
            seq_lens=seq_lens.ctypes.data,
            block_table=table.data_ptr(),
            block_table_stride=table.stride(0),
            slots=slots.data_ptr(),
        )
        return NativeAttentionMetadata(args, query_lens, seq_lens, table, slots)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache,
        metadata: NativeAttentionMetadata,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        query = with_packed_heads(query)
        sinks, slopes = (None if t is None else t.float() for t in (sinks, slopes))
        y = torch.empty((*query.shape[:2], spec.value_size), dtype=query.dtype)
        args, growth = metadata.args, spec.scale_growth
        args.dtype = DTYPES[query.dtype]
        args.num_heads, args.num_kv_heads, args.head_size = spec.num_heads, spec.num_kv_heads, spec.head_size
        args.window, args.ahead = spec.sliding_window or 0, -1 if spec.ahead is None else spec.ahead
        args.scale = spec.scale
        args.soft_cap, args.sinks = spec.logits_soft_cap or 0.0, None if sinks is None else sinks.data_ptr()
        args.slopes, args.chunk = None if slopes is None else slopes.data_ptr(), spec.chunk or 0
        args.growth = 0.0 if growth is None else growth.factor
        if growth is not None:
            args.growth_length, args.growth_offset = growth.length, growth.offset
        args.latent_size, args.block_stride = spec.latent_size or 0, kv_cache.key.stride(0)
        args.query, args.query_stride = query.data_ptr(), query.stride(0)
        args.key = args.value = None
        if key is not None:
            key = with_packed_heads(key)
            args.key, args.key_stride = key.data_ptr(), key.stride(0)
        if value is not None:
            value = with_packed_heads(value)
            args.value, args.value_stride = value.data_ptr(), value.stride(0)
        args.key_cache, args.value_cache = kv_cache.key.data_ptr(), kv_cache.value.data_ptr()
        args.y, args.y_stride = y.data_ptr(), y.stride(0)
        self.context.library.cdll.qk_attention(self.context.handle, byref(args))
        return y


def with_packed_heads(x: Tensor) -> Tensor:
    """Returns x: [n, heads, head_size], copied if the heads of a token are not adjacent."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


MAX_PLANNED_TOKENS = 1024
"""Tokens of the longest step that is planned: in a longer one the cost of calls is negligible. Where the results of so
many tokens do not fit into an arena, a quarter of it, and so on."""

MIN_PLANNED_TOKENS = 16
"""Tokens of the smallest plan that is tried."""


class StepPlanner:
    """The forward pass of a model, planned where that is possible. The next step may overwrite the result.

    A plan is valid for the kernels and the KV cache it was made with; it is made again when they change. A plan that
    does not repeat the model's result to the bit is not used: something in the model bypasses the recording.
    """

    def __init__(self, model: Forward, backend: NativeAttentionBackend) -> None:
        self._model = model
        self._backend = backend
        self._max_num_tokens = MAX_PLANNED_TOKENS
        """Tokens of the longest step of the present plan; 0: the model cannot be planned."""
        self._plan: Plan | None = None
        self._generation = -1
        self._cache: Callable[[], Tensor | None] = lambda: None
        """Weak reference to the keys of a layer: all caches are allocated and freed together."""

    @property
    def is_planned(self) -> bool:
        """True if the last short step ran from a plan."""
        return self._plan is not None

    def __call__(self, input_ids: Tensor, positions: Tensor, *inputs: Tensor) -> States:
        if input_ids.shape[0] > min(self._max_num_tokens, MAX_PLANNED_TOKENS):
            return self._model(input_ids, positions, *inputs)
        context = get_forward_context()
        if self._plan is None or not self._fits(context):
            with self._backend.rehearsal() as is_rehearsal:
                states = self._make_plan(context, input_ids, positions, inputs)
            if not is_rehearsal:
                return states
        if self._plan is None:
            return self._model(input_ids, positions, *inputs)
        return self._plan.run(input_ids, positions, [metadata.args for metadata in context.metadata], *inputs)

    def _fits(self, context: ForwardContext) -> bool:
        return self._generation == self._backend.context.num_kernels and self._cache() is _some_keys(context)

    def _make_plan(
        self, context: ForwardContext, input_ids: Tensor, positions: Tensor, inputs: tuple[Tensor, ...]
    ) -> States:
        """Makes a plan and runs the step both ways."""
        self._plan = None
        expected = self._model(input_ids, positions, *inputs)
        plan: Plan | None = None
        try:
            plan = self._record(context, inputs)
        except NotPlannableError as e:
            self._max_num_tokens = 0
            logger.debug("steps are not planned: %s", e)
        self._max_num_tokens = self._backend.agree(self._max_num_tokens)
        if plan is None or input_ids.shape[0] > self._max_num_tokens:
            return expected
        found = plan.run(input_ids, positions, [metadata.args for metadata in context.metadata], *inputs)
        pairs = zip(_all_states(found), _all_states(expected), strict=True)
        is_same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        if not self._backend.agree(is_same):
            self._max_num_tokens = 0
            logger.warning("steps are not planned: the plan of this model does not repeat its results")
            return expected
        self._plan, self._generation = plan, self._backend.context.num_kernels
        self._cache = weakref.ref(_some_keys(context))
        return expected

    def _record(self, context: ForwardContext, inputs: tuple[Tensor, ...]) -> Plan:
        """Returns the plan of a step of the largest size. Numbers take the place of the addresses of its batches."""
        size = self._max_num_tokens
        batches = [AttentionArgs(num_tokens=size, slots=i + 1) for i in range(len(context.metadata))]
        metadata = [
            dataclasses.replace(metadata, args=args) for metadata, args in zip(context.metadata, batches, strict=True)
        ]
        try:
            with set_forward_context(dataclasses.replace(context, metadata=metadata)):
                return Plan(self._backend.context, self._model, size, batches, inputs)
        except ArenaFullError:
            if size <= MIN_PLANNED_TOKENS:
                raise
        self._max_num_tokens = size // 4
        return self._record(context, inputs)


def _all_states(states: States) -> tuple[Tensor, ...]:
    return states if isinstance(states, tuple) else (states,)


def _some_keys(context: ForwardContext) -> Tensor:
    return next(iter(context.kv_caches.values())).key

"""Runs short steps as one call into the native library.

Calling a kernel from Python takes about as long as the kernel of a small model: 50 calls for a token. The calls of a
forward pass are therefore recorded once, from the model as it is written, and repeated by the library
(kernels/plan.py). The bits are those of the model called module by module: the same kernels run in the same order on
the same numbers.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.logger import init_logger
from quire.worker.attention.backend import AttentionBackend, ForwardContext, get_forward_context, set_forward_context
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.kernels.library import AttentionArgs
from quire.worker.kernels.plan import ArenaFullError, NotPlannableError, Plan

logger = init_logger(__name__)

MAX_NUM_TOKENS = 1024
"""Tokens of the longest step that is planned: in a longer one the cost of calls is negligible. Where the results of so
many tokens do not fit into an arena, a quarter of it, and so on."""

MIN_NUM_TOKENS = 16
"""Tokens of the smallest plan that is tried."""

Forward = Callable[[Tensor, Tensor], Tensor]
"""ids and positions, [n] int64 each, to hidden states [n, dim]; needs a forward context."""


class StepPlanner:
    """The forward pass of a model, planned where that is possible. The next step may overwrite the result.

    A plan is valid for the kernels and the KV cache it was made with; it is made again when they change. A plan that
    does not repeat the model's result to the bit is not used: something in the model bypasses the recording.
    """

    def __init__(self, model: Forward, backend: NativeAttentionBackend) -> None:
        self._model = model
        self._backend = backend
        self._max_num_tokens = MAX_NUM_TOKENS
        """Tokens of the longest step of the present plan; 0: the model cannot be planned."""
        self._plan: Plan | None = None
        self._generation = -1
        self._cache: Callable[[], Tensor | None] = lambda: None
        """Weak reference to the keys of a layer: all caches are allocated and freed together."""

    @property
    def is_planned(self) -> bool:
        """True if the last short step ran from a plan."""
        return self._plan is not None

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        if input_ids.shape[0] > min(self._max_num_tokens, MAX_NUM_TOKENS):
            return self._model(input_ids, positions)
        context = get_forward_context()
        if self._plan is None or not self._fits(context):
            return self._make_plan(context, input_ids, positions)
        return self._plan.run(input_ids, positions, [metadata.args for metadata in context.metadata])

    def _fits(self, context: ForwardContext) -> bool:
        return self._generation == self._backend.context.num_kernels and self._cache() is _some_keys(context)

    def _make_plan(self, context: ForwardContext, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Makes a plan and runs the step both ways."""
        self._plan = None
        expected = self._model(input_ids, positions)
        try:
            plan = self._record(context)
        except NotPlannableError as e:
            self._max_num_tokens = 0
            logger.debug("steps are not planned: %s", e)
            return expected
        if input_ids.shape[0] > self._max_num_tokens:
            return expected
        found = plan.run(input_ids, positions, [metadata.args for metadata in context.metadata])
        if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
            self._max_num_tokens = 0
            logger.warning("steps are not planned: the plan of this model does not repeat its results")
            return expected
        self._plan, self._generation = plan, self._backend.context.num_kernels
        self._cache = weakref.ref(_some_keys(context))
        return expected

    def _record(self, context: ForwardContext) -> Plan:
        """Returns the plan of a step of the largest size. Numbers take the place of the addresses of its batches."""
        size = self._max_num_tokens
        batches = [AttentionArgs(num_tokens=size, slots=i + 1) for i in range(len(context.metadata))]
        metadata = [
            dataclasses.replace(metadata, args=args) for metadata, args in zip(context.metadata, batches, strict=True)
        ]
        try:
            with set_forward_context(dataclasses.replace(context, metadata=metadata)):
                return Plan(self._backend.context, self._model, size, batches)
        except ArenaFullError:
            if size <= MIN_NUM_TOKENS:
                raise
        self._max_num_tokens = size // 4
        return self._record(context)


def plan_steps(model: Forward, backend: AttentionBackend[Any]) -> Forward:
    """Returns `model`, with short steps planned if `backend` is the native one."""
    return StepPlanner(model, backend) if isinstance(backend, NativeAttentionBackend) else model


def _some_keys(context: ForwardContext) -> Tensor:
    return next(iter(context.kv_caches.values())).key

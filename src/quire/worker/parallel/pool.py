"""Experts that engines on one host share: each has some of them, whole, and computes those for the tokens of all.

Attention and everything else is computed by each engine for its own tokens. In a layer of experts the engines write
their tokens' hidden states and choices into a file that all map, pass a barrier, compute their own experts for all
tokens, pass another barrier, and each adds the answers for its own tokens up, in the order of a token's choices. So the
bits are those of an engine that has all experts. A step has one more barrier, at its beginning, for the numbers of
tokens and their adapters: all engines run the model once in each step, with one token at least.

The barriers of an epoch of the group (`engine/dp_group.py`) have words of their own. Before an engine has joined one it
is alone: its steps run, for what they set up, and their results mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, pointer
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.failpoints import failpoint
from quire.wire.shared_memory import EPOCHS_BYTES, epoch_start, generation_start
from quire.wire.topology import Group
from quire.worker.attention.backend import Forward, States
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.kernels.barrier import NativeBarrier, words_bytes
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import PoolStepStruct
from quire.worker.model_runner import ModelRunner
from quire.worker.parallel.shm import SharedBuffers, spin_time


class Standby(Protocol):
    """The experts of the next group: worker/loader/standby.py."""

    def discard(self) -> None:
        """Frees them."""


class Segments(NamedTuple):
    """The adapters of an engine's tokens in a step."""

    lens: npt.NDArray[np.int64]
    """Numbers of tokens."""
    places: npt.NDArray[np.int64]
    """Where their adapters are in the file of all engines; 0: they have none that changes experts."""
    version: int
    """Number that grows when the engine frees an adapter: a place may have another one then."""


class PooledAdapters(Protocol):
    """The adapters of experts that engines share: worker/lora/exchange.py."""

    def take_own(self) -> Segments | None:
        """Returns those of this engine's tokens; None: no token has one."""
        ...

    def apply(self, segments: Sequence[Segments | None], lens: Sequence[int], own: int) -> None:
        """Applies the adapters of all engines, which have `lens` tokens, until the next call. `own` is the number of
        this engine."""
        ...


class ExpertsPool:
    """The tokens of all engines in a step, as one of the engines sees them."""

    def __init__(
        self, fd: int, group: Group, kernels: Kernels, max_rows: int, *, num_threads: int = 1, generation: int = 0
    ) -> None:
        """`max_rows`: tokens of an engine's largest step. `num_threads`: those of all engines, which decide whether a
        barrier may spin. `generation`: number of the group."""
        self.group, self.max_rows = group, max_rows * group.size
        self.row_bytes: dict[str, int] = {}
        """Bytes of a row of each buffer, by its name: memory that the first large step will take."""
        self._kernels, self._num_threads = kernels, num_threads
        start = generation_start(generation)
        self._words = SharedBuffers(fd, start).get("words", (EPOCHS_BYTES,), torch.uint8)
        self._buffers = SharedBuffers(fd, start + EPOCHS_BYTES)
        self._counts = self.shared("counts", (group.size, 3), torch.int64)
        """Tokens, segments and version of `Segments`, of each engine."""
        self._segments = self.shared("segments", (group.size, 2, max_rows), torch.int64).numpy()
        self._barrier: Callable[[], None] | None = None
        """None: this engine is alone."""
        self.num_rows, self.own_rows = 0, range(0)
        """Tokens of the step, and those that are this engine's."""
        self.step = PoolStepStruct()
        """The same for native kernels, and the barrier."""
        self.standby: Standby | None = None
        """The experts of the next group, while they are being prepared."""

    def shared(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the buffer of that name, which every engine sees. Its memory is taken when it is written."""
        return self._buffers.get(name, shape, dtype)

    @property
    def num_bytes(self) -> int:
        """Memory that the largest step of all engines takes."""
        return sum(self.row_bytes.values()) * self.max_rows

    @property
    def is_alone(self) -> bool:
        """True until this engine has joined the others."""
        return self._barrier is None

    def join(self, epoch: int) -> None:
        """Computes the steps that follow with the other engines, all of which are in this epoch."""
        words, group = self._words[epoch_start(epoch) :], self.group
        spin_ns = spin_time(self._num_threads)
        self._use(self._kernels.barrier(words[: words_bytes(group.size)], group.index, group.size, spin_ns))

    def _use(self, barrier: Callable[[], None] | None) -> None:
        self._barrier = barrier
        self.step.barrier = pointer(barrier.args) if isinstance(barrier, NativeBarrier) else None

    @contextmanager
    def rehearsal(self) -> Iterator[bool]:
        """Lets this engine run its model alone inside the block, while the others wait for its part of the step.
        Returns whether it belongs to them, so that the step has to be run again."""
        barrier = self._barrier
        self._use(None)
        try:
            yield barrier is not None
        finally:
            self._use(barrier)

    def begin_step(self, num_rows: int, adapters: PooledAdapters | None = None) -> None:
        """Begins a step, in which this engine has `num_rows` tokens. Raises BarrierError."""
        index = self.group.index
        if self.is_alone:
            self.num_rows, self.own_rows = num_rows, range(num_rows)
            return
        own = None if adapters is None else adapters.take_own()
        if own is None:
            self._counts[index] = torch.tensor((num_rows, 0, 0))
        else:
            count = len(own.lens)
            self._segments[index, :, :count] = own.lens, own.places
            self._counts[index] = torch.tensor((num_rows, count, own.version))
        self.ready()
        counts: list[list[int]] = self._counts.tolist()
        lens = [rows for rows, _, _ in counts]
        first = sum(lens[:index])
        self.num_rows, self.own_rows = sum(lens), range(first, first + num_rows)
        self.step.tokens, self.step.first = self.num_rows, first
        if adapters is not None:
            segments = [
                Segments(self._segments[i, 0, :count], self._segments[i, 1, :count], version) if count else None
                for i, (_, count, version) in enumerate(counts)
            ]
            adapters.apply(segments, lens, index)

    def ready(self) -> None:
        """Returns once all engines have called it. Raises BarrierError if one of them has ended."""
        failpoint("worker.experts", str(self.group.index))
        if self._barrier is not None:
            self._barrier()

    def close(self) -> None:
        """Releases the memory. Buffers must not be used any more."""
        self._buffers.close()


class LayerTokens:
    """Inputs of the experts of a layer, and places of their answers, for the tokens of all engines: PooledTokens of
    kernels/base.py.

    Layers of the same sizes have the same buffers. An engine writes inputs when all have passed the second barrier of
    the layer before, and answers when all have passed the first of this layer: what it overwrites has been read.
    """

    def __init__(self, pool: ExpertsPool, num_choices: int, width: int, dtype: torch.dtype) -> None:
        self._pool, self._num_choices, self._width = pool, num_choices, width
        names = f"inputs {width}", f"choices {num_choices}", f"answers {num_choices} {width}"
        rows, answer_rows = pool.max_rows, pool.max_rows * num_choices
        self._inputs = pool.shared(names[0], (rows, width), dtype)
        self._choices = pool.shared(names[1], (rows, num_choices), torch.int64)
        self._answers = pool.shared(names[2], (answer_rows, width), torch.float32)
        row_bytes = width * dtype.itemsize, 8 * num_choices, 4 * num_choices * width
        pool.row_bytes.update(zip(names, row_bytes, strict=True))

    def share(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shares x: [n, width] and ids: [n, k] of this engine's tokens. Returns those of all, and the memory for their
        answers, a row for each choice of each token."""
        pool = self._pool
        if pool.is_alone:
            return x, ids, torch.zeros((ids.numel(), self._width))
        own, count = slice(pool.own_rows.start, pool.own_rows.stop), pool.num_rows
        self._inputs[own], self._choices[own] = x, ids
        pool.ready()
        return self._inputs[:count], self._choices[:count], self._answers[: count * self._num_choices]

    @property
    def step(self) -> Structure:
        return self._pool.step

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._inputs, self._choices, self._answers

    @property
    def own(self) -> range:
        """Numbers of this engine's tokens among all, in this step."""
        return self._pool.own_rows

    def wait(self) -> None:
        """Returns once all engines have written their answers. Others may overwrite the tokens then."""
        self._pool.ready()


class PooledRunner(ModelRunner):
    """Runs a model whose experts are shared."""

    def __init__(self, pool: ExpertsPool, *arguments: Any, **options: Any) -> None:
        """`arguments` and `options` are those of ModelRunner."""
        super().__init__(*arguments, **options)
        self.shared_experts = pool
        """The pool of the present group."""
        if isinstance(self.backend, NativeAttentionBackend):
            self.backend.rehearsal = lambda: self.shared_experts.rehearsal()
        self.pooled_adapters: PooledAdapters | None = None
        """None: adapters do not change the experts."""

    def _call(self, run: Forward, input_ids: Tensor, positions: Tensor) -> States:
        self.shared_experts.begin_step(input_ids.shape[0], self.pooled_adapters)
        return super()._call(run, input_ids, positions)

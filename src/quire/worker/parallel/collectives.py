"""Operations of a group of workers: buffers that all see whole, and barriers.

Every worker computes its own columns of a result, from all of its input, and writes them into a buffer that all see. A
barrier makes the result complete. So each output is the same sum in the same order, however many workers there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.wire.topology import Group
from quire.worker.kernels.base import CopyKernel


class Written(NamedTuple):
    """A part of a shared buffer that a worker has written since the last barrier."""

    view: Tensor
    rows: Callable[[], Tensor] | None = None
    """Makes the numbers of the rows that it has written; None: all."""


class Collectives(ABC):
    """Operations of one group of workers. All of them make the same calls in the same order."""

    can_plan = True
    """True if plans may record `ready`."""
    group: Group
    max_rows: int
    """Rows of the largest result: tokens of a step."""
    copy: CopyKernel
    row_bytes: dict[str, int]
    """Bytes of a row of each buffer of results, by its name: memory that the first large step will take."""

    @abstractmethod
    def shared(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the buffer of that name, which every worker sees. Its memory is taken when it is written."""

    @abstractmethod
    def ready(self, written: Sequence[Written] = ()) -> None:
        """Returns once all workers have called it: what each wrote before is complete. `written` is all that this
        worker has written since the last call. Raises BarrierError if one of them has failed."""

    @abstractmethod
    def agree(self, value: int) -> int:
        """Returns the least of all workers' values."""

    @abstractmethod
    def abort(self) -> None:
        """Makes `ready` raise in every worker, now and later."""

    @abstractmethod
    def close(self) -> None:
        """Releases the memory. Buffers must not be used any more."""


class Gather:
    """A result of which each worker computes columns `start` to `end` of `width`.

    A result may be read until the next one of the same name is begun by the second call after it: names have two
    buffers, which alternate from one layer to the next. With `guards` a result may be read by a worker until that
    worker begins the next; it is for what only one layer makes. With `copies` the result may be written to.
    """

    def __init__(
        self,
        collectives: Collectives,
        name: str,
        width: int,
        start: int,
        end: int,
        *,
        copies: bool = False,
        guards: bool = False,
    ) -> None:
        self.start, self.end, self.width = start, end, width
        self._collectives, self._name = collectives, name
        self._copies, self._guards = copies, guards
        if not guards:  # the logits of all tokens are never wanted
            collectives.row_bytes[name] = 2 * width

    def compute(self, num_rows: int, dtype: torch.dtype, fill: Callable[[Tensor], object]) -> Tensor:
        """Returns the whole result, [num_rows, width]. `fill` gets this worker's columns of it, to be written."""
        group = self._collectives
        whole = group.shared(self._name, (group.max_rows, self.width), dtype)[:num_rows]
        if self._guards:
            group.ready()
        own = whole[:, self.start : self.end]
        fill(own)
        group.ready([Written(own)])
        return group.copy(whole) if self._copies else whole

    def put(self, own: Tensor) -> Tensor:
        """Returns the whole result of which this worker has computed its columns, `own`."""
        return self.compute(own.shape[0], own.dtype, lambda place: self._collectives.copy(own, out=place))

    def by_rows(
        self, num_rows: int, dtype: torch.dtype, fill: Callable[[Tensor], object], rows: Callable[[], Tensor]
    ) -> Tensor:
        """Returns the whole result. `fill` gets all of it, and writes the rows that are this worker's: `rows`."""
        group = self._collectives
        whole = group.shared(self._name, (group.max_rows, self.width), dtype)[:num_rows]
        fill(whole)
        group.ready([Written(whole, rows)])
        return whole


class Meeting:
    """A buffer that all workers write parts of, with a row for each of `num_choices` experts of a token.

    Its parts may be written again once all workers have passed another barrier.
    """

    def __init__(
        self, collectives: Collectives, name: str, num_choices: int, width: int, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype`: None for the model's."""
        self.collectives = collectives
        self._name, self._num_choices, self._width, self._dtype = name, num_choices, width, dtype
        itemsize = 2 if dtype is None else dtype.itemsize
        collectives.row_bytes[name] = num_choices * width * itemsize

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """Returns the buffer, in a model of type `dtype`."""
        shape = (self.collectives.max_rows * self._num_choices, self._width)
        return self.collectives.shared(f"{self._name} {shape}", shape, self._dtype or dtype)

"""Collectives of workers on several machines: a shared file on each, and an exchange of what was written.

A barrier has three parts. Workers of a machine pass a barrier of their own, the first of them exchanges with the other
machines what all of its machine have written since the last time, and writes what it gets into the shared file; then
they pass another barrier. So every machine's buffers hold the whole result, the bits of one worker. What a worker has
written it says at the barrier: `ready`.

Over a network a barrier costs the time of a message instead of a microsecond, and a layer has four. Stages of a
pipeline pass one message for all of their layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.errors import ServerError
from quire.wire.exchange import ExchangeLostError, HostExchange
from quire.wire.shared_memory import is_aborted
from quire.wire.topology import Group, GroupKind
from quire.wire.worker_link import WorkerNetwork
from quire.worker.kernels.barrier import TIMEOUT_MS, BarrierError
from quire.worker.kernels.base import Kernels
from quire.worker.parallel.collectives import Written
from quire.worker.parallel.shm import ShmCollectives

_Note = list[Any]
"""Number of a buffer, offset, shape and strides of a view of it, and its rows; None: all."""
NOTE_BYTES = 1 << 24
"""Address space for what a worker says that it has written."""


class NetCollectives(ShmCollectives):
    """Collectives of a group whose workers are on several machines."""

    can_plan = False

    def __init__(
        self,
        fd: int,
        group: Group,
        kernels: Kernels,
        max_rows: int,
        network: WorkerNetwork,
        *,
        num_threads: int = 1,
    ) -> None:
        """Waits until the workers of all machines have met. Raises BarrierError if one of them fails meanwhile."""
        self._numbers = dict[int, int]()
        """Number of each buffer by the address of its memory."""
        self._all = list[Tensor]()
        """Buffers, in the order in which all workers ask for them."""
        ranks = network.ranks()
        here = Group(GroupKind.TENSOR, tuple(ranks), ranks.index(group.rank))
        super().__init__(fd, here, kernels, max_rows, num_threads=num_threads)
        self.group, self._here, self._network = group, here, network
        self._notes = [self._buffers.get(f"notes {i}", (NOTE_BYTES,), torch.uint8) for i in range(here.size)]
        self._num_votes = 0
        self._exchange: HostExchange | None = None
        if here.index == 0:
            self._exchange = HostExchange(network, self._check, TIMEOUT_MS / 1000)

    def _check(self) -> None:
        if is_aborted(self._fd):
            raise BarrierError("another worker of the step has failed")

    def shared(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffer = super().shared(name, shape, dtype)
        address = buffer.untyped_storage().data_ptr()
        if address not in self._numbers:
            self._numbers[address] = len(self._all)
            self._all.append(buffer)
        return buffer

    def ready(self, written: Sequence[Written] = ()) -> None:
        self._reach()
        self._check()
        notes = [self._describe(each) for each in written]
        if self._here.size > 1:
            self._write_note(notes)
            self._barrier()
        if self._exchange is not None:
            self._pass_on(self._exchange, notes)
        if self._here.size > 1:
            self._barrier()

    def _describe(self, written: Written) -> _Note:
        view, rows = written
        number = self._numbers[view.untyped_storage().data_ptr()]
        chosen = None if rows is None else rows().tolist()
        return [number, view.storage_offset(), list(view.shape), list(view.stride()), chosen]

    def _write_note(self, notes: list[_Note]) -> None:
        data = json.dumps(notes).encode()
        place = self._notes[self._here.index].numpy()
        place[:8] = torch.tensor([len(data)]).view(torch.uint8).numpy()
        place[8 : 8 + len(data)] = memoryview(data)

    def _read_note(self, index: int) -> list[_Note]:
        place = self._notes[index]
        size = int(place[:8].view(torch.int64))
        notes: list[_Note] = json.loads(place[8 : 8 + size].numpy().tobytes())
        return notes

    def _pass_on(self, exchange: HostExchange, own: list[_Note]) -> None:
        """Sends what this machine's workers have written, and writes what the others' have."""
        notes = [*own, *(note for i in range(1, self._here.size) for note in self._read_note(i))]
        try:
            parts = exchange.exchange([json.dumps(notes).encode(), *map(self._read, notes)])
        except ExchangeLostError as e:
            raise BarrierError(str(e)) from e
        for head, *frames in parts:
            for note, frame in zip(json.loads(head), frames, strict=True):
                self._write(note, frame)

    def _view(self, note: _Note) -> Tensor:
        number, offset, shape, strides, _ = note
        if not 0 <= number < len(self._all):
            raise ServerError(f"buffer {number} of another machine is unknown here")
        return self._all[number].as_strided(shape, strides, offset)

    def _read(self, note: _Note) -> memoryview:
        view, rows = self._view(note), note[-1]
        values = view if rows is None else view[rows]
        return values.contiguous().view(-1).view(torch.uint8).numpy().data

    def _write(self, note: _Note, frame: bytes) -> None:
        view, rows = self._view(note), note[-1]
        if not len(frame):
            return
        values = torch.frombuffer(bytearray(frame), dtype=view.dtype)
        if rows is None:
            view.copy_(values.view(view.shape))
        else:
            view[rows] = values.view(len(rows), *view.shape[1:])

    def agree(self, value: int) -> int:
        votes = self.shared(f"votes {self._num_votes % 2}", (self.group.size,), torch.int64)
        self._num_votes += 1
        index = self.group.index
        votes[index] = value
        self.ready([Written(votes[index : index + 1])])
        return int(votes.min())

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        super().close()

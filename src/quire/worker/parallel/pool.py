"""Experts that engines share: each has some of them, whole, and computes those for the tokens of all.

Attention and everything else is computed by each engine for its own tokens. In a layer of experts the engines write
their tokens' hidden states and choices into a file that all map, pass a barrier, compute their own experts for all
tokens, pass another barrier, and each adds the answers for its own tokens up, in the order of a token's choices. So the
bits are those of an engine that has all experts. A step has one more barrier, at its beginning, for the numbers of
tokens and their adapters: all engines run the model once in each step, with one token at least.

The barriers of an epoch of the group (`engine/dp_group.py`) have words of their own. Before an engine has joined one it
is alone: its steps run, for what they set up, and their results mean nothing.

Engines on several machines (`engine/net_group.py`) have a file on each. There a barrier has three parts: the engines of
a machine pass one of their own, the first of them exchanges with the other machines what has been written
(`wire/exchange.py`), and they pass another. Of the answers only those go over the network that are for tokens of other
machines. A lost exchange ends the epoch on its machine, and the engine that joins again ends it for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, pointer
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.failpoints import failpoint
from quire.wire.exchange import ExchangeLostError, HostExchange
from quire.wire.serial import Frame
from quire.wire.shared_memory import EPOCHS_BYTES, end_epoch, epoch_start, generation_start, has_epoch_ended
from quire.wire.topology import Group, GroupKind
from quire.wire.worker_link import WorkerNetwork
from quire.worker.attention.backend import Forward, States
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.kernels.barrier import TIMEOUT_MS, BarrierError, NativeBarrier, words_bytes
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import PoolStepStruct
from quire.worker.model_runner import ModelRunner
from quire.worker.parallel.shm import SharedBuffers, spin_time

MEET_S = 5.0
"""Longest time until the engines of all machines have met: one that is late is waited for outside of a step, where no
hang is suspected."""


class Standby(Protocol):
    """The experts of the next group: worker/loader/standby.py."""

    def discard(self) -> None:
        """Frees them."""


class Rows(NamedTuple):
    """Rows of a buffer, of which the engines of each machine have written some since the last barrier."""

    buffer: Tensor
    of: Callable[[int], Tensor | slice]
    """Returns which of them the engines of a machine have written, by the number of that."""


class Machines:
    """The machines of an epoch, as an engine of one of them sees them; `network` names them. The first engine of each
    exchanges what has been written."""

    def __init__(self, network: WorkerNetwork, leads: bool, epoch: tuple[int, int, int]) -> None:
        """`leads`: True for the first engine of its machine. `epoch`: the file of experts there, the number of the
        epoch, and that of the group, as `end_epoch` has them."""
        self.network = network
        self._leads, self._epoch = leads, epoch
        self._exchange: HostExchange | None = None

    def pass_on(self, written: Sequence[Rows]) -> None:
        """Sends what this machine's engines have written, and writes what the others' have. The first time it waits
        until all have met. Raises BarrierError once the epoch has ended; a lost exchange ends it."""
        if not self._leads:
            return
        try:
            self._pass_on(self._meet(), written)
        except ExchangeLostError as e:
            end_epoch(*self._epoch)
            raise BarrierError(str(e)) from e

    def _check(self) -> None:
        if has_epoch_ended(*self._epoch):
            raise BarrierError("another engine of the step has ended")

    def _meet(self) -> HostExchange:
        if self._exchange is None:
            try:
                self._exchange = HostExchange(self.network, self._check, TIMEOUT_MS / 1000, MEET_S)
            except ConfigError as e:
                raise ConfigError(
                    f"hidden states cannot be exchanged at {self.network.address}: --data-parallel-address is an "
                    "address of the first machine, and --data-parallel-rpc-port the first of seven free ports there"
                ) from e
        return self._exchange

    def _pass_on(self, exchange: HostExchange, written: Sequence[Rows]) -> None:
        own = self.network.share
        frames: list[Frame] = [bytes([own]), *(_read(rows.buffer[rows.of(own)]) for rows in written)]
        for head, *parts in exchange.exchange(frames):
            for rows, part in zip(written, parts, strict=True):
                if part:
                    values = torch.frombuffer(bytearray(part), dtype=rows.buffer.dtype)
                    rows.buffer[rows.of(head[0])] = values.view(-1, *rows.buffer.shape[1:])

    def close(self) -> None:
        """Ends the connections."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None


def _read(values: Tensor) -> memoryview:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


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
        self._file = fd, generation
        start = generation_start(generation)
        self._words = SharedBuffers(fd, start).get("words", (EPOCHS_BYTES,), torch.uint8)
        self._buffers = SharedBuffers(fd, start + EPOCHS_BYTES)
        self._counts = self.shared("counts", (group.size, 3), torch.int64)
        """Tokens, segments and version of `Segments`, of each engine."""
        self._segments = self.shared("segments", (group.size, 2, max_rows), torch.int64).numpy()
        self._barrier: Callable[[], None] | None = None
        """None: this engine is alone."""
        self._machines: Machines | None = None
        """None: there is one machine."""
        self._firsts = [0] * (1 + group.size)
        """First token of each engine in the step, and the number of all."""
        self.step = PoolStepStruct()
        """Numbers of the step's tokens and the barrier, as native kernels read them."""
        self.standby: Standby | None = None
        """The experts of the next group, while they are being prepared."""

    def shared(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the buffer of that name, which every engine of the machine sees. Its memory is taken when it is
        written."""
        return self._buffers.get(name, shape, dtype)

    @property
    def num_bytes(self) -> int:
        """Memory that the largest step of all engines takes."""
        return sum(self.row_bytes.values()) * self.max_rows

    @property
    def is_alone(self) -> bool:
        """True until this engine has joined the others."""
        return self._barrier is None

    def join(self, epoch: int, network: WorkerNetwork | None = None) -> None:
        """Computes the steps that follow with the other engines, all of which are in this epoch. `network`: the
        machines that they are on, if there are several."""
        self._leave_machines()
        here, (fd, generation) = self.group, self._file
        if network is not None:
            ranks = network.ranks()
            here = Group(GroupKind.EXPERT, tuple(ranks), ranks.index(self.group.index))
            self._machines = Machines(network, here.index == 0, (fd, epoch, generation))
        words = self._words[epoch_start(epoch) :]
        spin_ns = spin_time(self._num_threads)
        self._use(self._kernels.barrier(words[: words_bytes(here.size)], here.index, here.size, spin_ns))

    @property
    def network(self) -> WorkerNetwork | None:
        """The machines of the epoch; None: there is one."""
        return None if self._machines is None else self._machines.network

    def _use(self, barrier: Callable[[], None] | None) -> None:
        self._barrier = barrier
        if isinstance(barrier, NativeBarrier) and self._machines is None:
            self.step.barrier = pointer(barrier.args)
        else:
            self.step.barrier = None

    @contextmanager
    def rehearsal(self) -> Iterator[bool]:
        """Lets this engine run its model alone inside the block, while the others wait for its part of the step.
        Enters with whether it belongs to them, so that the step has to be run again."""
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
            self._firsts = [0] * (1 + index) + [num_rows] * (self.group.size - index)
            return
        own = None if adapters is None else adapters.take_own()
        if own is None:
            self._counts[index] = torch.tensor((num_rows, 0, 0))
        else:
            count = len(own.lens)
            self._segments[index, :, :count] = own.lens, own.places
            self._counts[index] = torch.tensor((num_rows, count, own.version))
        network = self.network
        self.ready(() if network is None else [Rows(self._counts, lambda machine: _slice(network.ranks(machine)))])
        counts: list[list[int]] = self._counts.tolist()
        lens = [rows for rows, _, _ in counts]
        self._firsts = [0, *accumulate(lens)]
        self.step.tokens, self.step.first = self.num_rows, self.own_rows.start
        if adapters is not None:
            segments = [
                Segments(self._segments[i, 0, :count], self._segments[i, 1, :count], version) if count else None
                for i, (_, count, version) in enumerate(counts)
            ]
            adapters.apply(segments, lens, index)

    @property
    def num_rows(self) -> int:
        """Tokens of the step."""
        return self._firsts[-1]

    @property
    def own_rows(self) -> range:
        """Tokens of this engine, among all."""
        return range(*self._firsts[self.group.index : self.group.index + 2])

    def tokens_of(self, machine: int) -> slice:
        """Returns the tokens of a machine's engines among all of the step."""
        assert self.network is not None, "there are several"
        ranks = self.network.ranks(machine)
        return slice(self._firsts[ranks.start], self._firsts[ranks.stop])

    def ready(self, written: Sequence[Rows] = ()) -> None:
        """Returns once all engines have called it: what each wrote before is complete. `written`: all that the engines
        of each machine have written since, if there are several machines. Raises BarrierError if one has ended."""
        failpoint("worker.experts", str(self.group.index))
        if self._barrier is None:
            return
        self._barrier()
        if self._machines is not None:
            self._machines.pass_on(written)
            self._barrier()

    def _leave_machines(self) -> None:
        if self._machines is not None:
            self._machines.close()
            self._machines = None

    def close(self) -> None:
        """Releases the memory. Buffers must not be used any more."""
        self._leave_machines()
        self._buffers.close()


def _slice(ranks: range) -> slice:
    return slice(ranks.start, ranks.stop)


class LayerTokens:
    """Inputs of the experts of a layer, and places of their answers, for the tokens of all engines: PooledTokens of
    kernels/base.py.

    Layers of the same sizes have the same buffers. An engine writes inputs when all have passed the second barrier of
    the layer before, and answers when all have passed the first of this layer: what it overwrites has been read.
    """

    def __init__(
        self, pool: ExpertsPool, num_choices: int, width: int, dtype: torch.dtype, owners: Tensor | None = None
    ) -> None:
        """`owners`: [num_experts] the engine that has each expert; needed where there are several machines."""
        self._pool, self._num_choices, self._width, self._owners = pool, num_choices, width, owners
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
        pool.ready([Rows(self._inputs, pool.tokens_of), Rows(self._choices, pool.tokens_of)])
        return self._inputs[:count], self._choices[:count], self._answers[: count * self._num_choices]

    @property
    def is_remote(self) -> bool:
        return self._pool.network is not None

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

    def wait(self, order: Callable[[], Tensor] | None = None) -> None:
        """Returns once all engines have written their answers. Others may overwrite the tokens then. `order` returns
        the number of each answer's choice among those of all tokens; None: answers are in the order of choices."""
        pool = self._pool
        if pool.is_alone or pool.network is None:
            pool.ready()
            return
        answers = _Answers(self._choices[: pool.num_rows], order, self._owners, pool)
        pool.ready([Rows(self._answers, answers.of)])


class _Answers:
    """The answers of a layer that go from one machine to another."""

    def __init__(
        self, choices: Tensor, order: Callable[[], Tensor] | None, owners: Tensor | None, pool: ExpertsPool
    ) -> None:
        self._choices, self._order, self._owners, self._pool = choices, order, owners, pool

    @cached_property
    def _origins(self) -> tuple[Tensor, Tensor]:
        """The token of each answer, and the engine that has computed it."""
        assert self._owners is not None, "engines on several machines know who has an expert"
        flat = self._choices.flatten()
        order = torch.arange(len(flat)) if self._order is None else self._order()
        return order // self._choices.shape[1], self._owners[flat[order]]

    def of(self, machine: int) -> Tensor:
        """Returns the numbers of the answers that a machine has for tokens of others."""
        assert self._pool.network is not None, "there are several machines"
        (tokens, engines), ranks, own = self._origins, self._pool.network.ranks(machine), self._pool.tokens_of(machine)
        is_theirs: Tensor = (engines >= ranks.start) & (engines < ranks.stop)
        is_foreign: Tensor = (tokens < own.start) | (tokens >= own.stop)
        return (is_theirs & is_foreign).nonzero().flatten()


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
        if self.shared_experts.network is not None:
            run = self.model  # a plan has kernels only, and none of them reaches other machines
        return super()._call(run, input_ids, positions)

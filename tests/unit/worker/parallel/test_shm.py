"""Barriers and shared buffers, native and in Python: order, the end of a worker, agreement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from quire.wire.shared_memory import WORKERS_FILE_BYTES, make_shared_file, read_barrier_wait
from quire.wire.topology import Group, GroupKind
from quire.worker.kernels import barrier
from quire.worker.kernels.barrier import BarrierError
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.parallel.collectives import Gather
from quire.worker.parallel.shm import ShmCollectives

from .together import in_threads

Make = Callable[[int], list[ShmCollectives]]


@pytest.fixture(params=["native", "native, asleep", "python"])
def make(request: pytest.FixtureRequest, library: NativeLibrary) -> Make:
    def kernels() -> Kernels:
        if request.param == "python":
            return TORCH_KERNELS
        return NativeKernels(Context(library, 1, library.instruction_sets()[0]))

    def make(size: int) -> list[ShmCollectives]:
        fd, threads = make_shared_file(WORKERS_FILE_BYTES), 10_000 if "asleep" in request.param else 1
        groups = [Group(GroupKind.TENSOR, tuple(range(size)), i) for i in range(size)]
        return [ShmCollectives(fd, group, kernels(), 16, num_threads=threads) for group in groups]

    return make


@pytest.mark.parametrize("size", [2, 3])
def test_what_was_written_before_a_barrier_is_read_after_it(make: Make, size: int) -> None:
    rounds = 300

    def work(own: ShmCollectives) -> bool:
        index, right = own.group.index, True
        for number in range(rounds):
            words = own.shared(f"words {number % 2}", (size,), torch.int64)
            words[index] = number * 10 + index
            own.ready()
            right &= words.tolist() == [number * 10 + i for i in range(size)]
        return right

    members = make(size)
    assert in_threads([lambda own=own: work(own) for own in members]) == [True] * size  # type: ignore[misc]
    if not isinstance(members[0]._barrier, barrier.PollingBarrier):
        assert [own.waited()[0] for own in members] == [rounds] * size
        waited = read_barrier_wait(members[0]._fd, 1, size)
        assert 0 < waited == pytest.approx(sum(own.waited()[1] for own in members))


def test_a_result_is_gathered_by_columns_and_by_rows(make: Make) -> None:
    def work(own: ShmCollectives) -> tuple[list[list[float]], list[list[float]]]:
        index = own.group.index
        start = 2 * index
        gather = Gather(own, "x", 4, start, start + 2, copies=True, guards=True)
        by_columns = gather.put(torch.full((3, 2), float(own.group.index)))
        rows = Gather(own, "y", 4, 0, 4).by_rows(
            2, torch.float32, lambda out: out[index].fill_(start), lambda: torch.tensor([index])
        )
        return by_columns.tolist(), rows.tolist()

    expected = [[0.0, 0.0, 1.0, 1.0]] * 3, [[0.0] * 4, [2.0] * 4]
    assert in_threads([lambda own=own: work(own) for own in make(2)]) == [expected] * 2  # type: ignore[misc]


def test_the_least_value_is_agreed_on(make: Make) -> None:
    def work(own: ShmCollectives) -> list[int]:
        return [own.agree(value) for value in (own.group.index + 5, 3 - own.group.index, 1)]

    assert in_threads([lambda own=own: work(own) for own in make(3)]) == [[5, 1, 1]] * 3  # type: ignore[misc]


def test_the_abort_word_ends_every_barrier(make: Make) -> None:
    first, second = make(2)
    thread = threading.Timer(0.01, second.abort)
    thread.start()
    start = time.monotonic()
    with pytest.raises(BarrierError, match="another worker of the step has failed"):
        first.ready()
    assert time.monotonic() - start < 50, "it does not wait for its time limit"
    thread.join()
    for member in (first, second):
        with pytest.raises(BarrierError, match="another worker of the step has failed"):
            member.ready()


def test_a_worker_that_does_not_come_is_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "TIMEOUT_MS", 50)
    first, _ = make(2)
    with pytest.raises(BarrierError, match="did not finish its part of the step within"):
        first.ready()

"""Collectives of workers on several machines, which reach one another by loopback: results, bits, ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import UnsupportedModelError
from quire.wire.shared_memory import WORKERS_FILE_BYTES, make_shared_file
from quire.wire.topology import Group, GroupKind
from quire.worker.kernels.barrier import BarrierError
from quire.worker.kernels.library import NativeLibrary
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.parallel import net
from quire.worker.parallel.collectives import Gather, Written
from quire.worker.parallel.net import NetCollectives
from tests.checkpoints import MakeCheckpoint

from .test_bits import ODD
from .together import in_threads, make_networks, run_together


def together(parts: Sequence[int], work: Callable[[NetCollectives], Any]) -> list[Any]:
    """Returns the results of `work` by each worker; closes the collectives of all afterwards."""
    size, tasks, members = sum(parts), list[Callable[[], Any]](), list[NetCollectives]()
    for network in make_networks(parts):
        fd = make_shared_file(WORKERS_FILE_BYTES)

        def run(fd: int, rank: int, network: Any) -> Any:
            own = NetCollectives(fd, Group(GroupKind.TENSOR, tuple(range(size)), rank), TORCH_KERNELS, 16, network)
            members.append(own)
            return work(own)

        tasks += [partial(run, fd, rank, network) for rank in network.ranks()]
    try:
        return in_threads(tasks)
    finally:
        for member in members:
            member.close()


@pytest.mark.parametrize("parts", [(1, 1), (2, 1), (1, 2, 1)])
def test_what_was_written_before_a_barrier_is_read_after_it_on_every_machine(parts: Sequence[int]) -> None:
    rounds, size = 50, sum(parts)

    def work(own: NetCollectives) -> tuple[bool, list[int]]:
        index, right = own.group.index, True
        for number in range(rounds):
            words = own.shared(f"words {number % 2}", (size,), torch.int64)
            words[index] = number * 10 + index
            own.ready([Written(words[index : index + 1])])
            right &= words.tolist() == [number * 10 + i for i in range(size)]
        return right, [own.agree(value) for value in (index + 5, 3 - index, 1)]

    assert together(parts, work) == [(True, [5, 4 - size, 1])] * size


def test_a_result_is_gathered_by_columns_and_by_rows() -> None:
    def work(own: NetCollectives) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
        index = own.group.index
        start = 2 * index
        gather = Gather(own, "x", 6, start, start + 2, copies=True, guards=True)
        by_columns = gather.put(torch.full((3, 2), float(index)))
        rows = Gather(own, "y", 4, 0, 4).by_rows(
            3, torch.bfloat16, lambda out: out[index].fill_(start), lambda: torch.tensor([index])
        )
        nobody = Gather(own, "z", 4, 0, 4).by_rows(
            1, torch.bfloat16, lambda out: out.zero_(), lambda: torch.tensor([]).long()
        )
        return by_columns.tolist(), rows.tolist(), nobody.tolist()

    expected = [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 3, [[0.0] * 4, [2.0] * 4, [4.0] * 4], [[0.0] * 4]
    assert together((2, 1), work) == [expected] * 3


def test_an_abort_ends_the_wait_for_another_machine() -> None:
    gone = threading.Event()

    def work(own: NetCollectives) -> str:
        if own.group.index == 0:
            gone.wait(120)
            return "gone"
        own.abort()
        start = time.monotonic()
        with pytest.raises(BarrierError, match="another worker of the step has failed") as first:
            own.ready()
        assert time.monotonic() - start < 30
        gone.set()
        return str(first.value)

    assert together((1, 1), work)[0] == "gone"


def test_the_end_of_the_connection_is_an_error_at_once() -> None:
    def work(own: NetCollectives) -> None:
        if own.group.index == 0:
            own.close()
            return
        with pytest.raises(BarrierError, match="the connection to the first machine's workers has ended"):
            own.ready()

    together((1, 1), work)


def test_a_machine_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "TIMEOUT_MS", 100)
    done = threading.Event()

    def work(own: NetCollectives) -> None:
        if own.group.index == 0:
            assert done.wait(120)
            return
        with pytest.raises(BarrierError, match="another machine did not finish their part of the step in time"):
            own.ready()
        done.set()

    together((1, 1), work)


@pytest.mark.parametrize(
    ("family", "config", "parts", "flags"),
    [
        ("llama", ODD, (1, 1), {}),
        ("qwen2_moe", {}, (2, 1), {"quantization": "int8"}),
        pytest.param("olmo2", {}, (1, 2), {}, marks=pytest.mark.slow),
        pytest.param("gemma4_text", {}, (1, 1), {"dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, (1, 1), {}, marks=pytest.mark.slow),
        pytest.param("gpt_bigcode", {}, (1, 1, 1), {"quantization": "int4"}, marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_of_one_worker(
    family: str,
    config: dict[str, Any],
    parts: tuple[int, ...],
    flags: dict[str, Any],
    tiny_checkpoint: MakeCheckpoint,
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path: Path = tiny_checkpoint(family, **config)
    logits, tokens, _ = run_together(path, 1, library, monkeypatch, **flags)
    found, found_tokens, workers = run_together(path, sum(parts), library, monkeypatch, parts=parts, **flags)
    assert torch.equal(found.view(torch.int32), logits.view(torch.int32))
    assert found_tokens == tokens
    assert not workers[0].get_model().is_plannable, "a plan would pass no results on"


def test_whole_experts_are_refused(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModelError, match="whole experts are not exchanged between machines"):
        run_together(tiny_checkpoint("mixtral"), 2, library, monkeypatch, parts=(1, 1), enable_expert_parallel=True)

"""The group of engines of one host: its members, and their agreements."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.engine import dp_group
from quire.engine.dp_group import LOOK_S, Agreement, DPGroup
from quire.errors import ConfigError
from quire.wire.group import Verdict, Vote
from quire.wire.shared_memory import has_epoch_ended, make_experts_file, make_group_file

WORK, NONE, PAUSING = Vote(True, False), Vote(False, False), Vote(False, True)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += LOOK_S / 10
        return self.now


class Group:
    """Some ranks of one page."""

    def __init__(self, path: Path, size: int, experts_file: int | None = None) -> None:
        self.path, self.experts_file = path / "group", experts_file
        make_group_file(self.path)
        self.clock = Clock()
        self.ranks = [self.start(rank, size) for rank in range(size)]

    def start(self, rank: int, size: int) -> DPGroup:
        group = DPGroup(self.path, rank, size, self.clock, self.experts_file)
        group.join()
        return group

    def agree(self, *votes: Vote | None) -> list[Agreement | None]:
        """The ranks with a vote enter; all are looked at until nothing changes."""
        for rank, vote in zip(self.ranks, votes, strict=True):
            if vote is not None:
                rank.enter(vote)
        seen: list[Agreement | None] = [None] * len(self.ranks)
        for _ in range(50):
            for i, (rank, vote) in enumerate(zip(self.ranks, votes, strict=True)):
                if seen[i] is None and (vote is not None or rank.is_joining):
                    seen[i] = rank.poll()
        return seen

    def kill(self, rank: int) -> None:
        """Ends a rank without a farewell, as the system does with a process that is killed."""
        os.close(self.ranks[rank]._life)
        self.ranks[rank]._life = -1


def test_all_learn_the_same_and_only_when_all_have_voted(tmp_path: Path) -> None:
    group = Group(tmp_path, 3)
    assert group.agree(WORK, None, NONE) == [Agreement(Verdict.GO, 0)] * 3  # an idle one that joins is not waited for
    assert group.agree(WORK, None, NONE) == [None] * 3
    assert group.agree(None, NONE, None) == [None, Agreement(Verdict.GO, 0), None]
    assert [rank.poll() for rank in group.ranks] == [Agreement(Verdict.GO, 0)] * 3
    assert group.agree(NONE, NONE, NONE) == [Agreement(Verdict.STOP, 1)] * 3
    assert group.agree(PAUSING, NONE, PAUSING) == [Agreement(Verdict.GO, 1)] * 3
    assert group.agree(PAUSING, PAUSING, PAUSING) == [Agreement(Verdict.PAUSE, 2)] * 3


def test_nothing_goes_on_without_the_paused(tmp_path: Path) -> None:
    group = Group(tmp_path, 2)
    group.agree(WORK, NONE)
    group.agree(PAUSING, PAUSING)
    assert group.ranks[0].rejoin() == 1
    assert group.agree(WORK, None) == [None, None]
    group.kill(1)
    group.ranks[1] = group.start(1, 2)  # started again, and to pause as the one before it
    assert group.agree(PAUSING, PAUSING) == [Agreement(Verdict.PAUSE, 2)] * 2
    assert [rank.rejoin() for rank in group.ranks] == [2, 2]
    assert group.agree(WORK, None) == [Agreement(Verdict.GO, 2)] * 2


def test_an_engine_started_in_a_pause_is_paused_alone(tmp_path: Path) -> None:
    group = Group(tmp_path, 2)
    assert group.agree(PAUSING, PAUSING) == [Agreement(Verdict.PAUSE, 1)] * 2
    group.kill(0)
    group.ranks[0] = group.start(0, 2)
    assert group.agree(PAUSING, None) == [Agreement(Verdict.PAUSE, 1), None]
    assert [rank.rejoin() for rank in group.ranks] == [1, 1]


def test_the_dead_are_not_waited_for_and_join_again(tmp_path: Path) -> None:
    group = Group(tmp_path, 2)
    group.agree(WORK, NONE)
    group.kill(1)
    assert group.agree(WORK, None)[0] == Agreement(Verdict.GO, 0)
    assert group.agree(NONE, None)[0] == Agreement(Verdict.STOP, 1)
    group.ranks[1] = DPGroup(group.path, 1, 2, group.clock)
    assert group.ranks[1].join() == 1
    assert group.agree(WORK, WORK) == [Agreement(Verdict.GO, 1)] * 2
    group.ranks[0].leave()
    group.ranks[0].leave()
    group.ranks[1].enter(NONE)
    assert [group.ranks[1].poll() for _ in range(3)][-1] == Agreement(Verdict.STOP, 2)


def test_one_that_died_while_it_decided_leaves_the_rest_able_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict is written, and no rank was admitted: those left out join at the next agreement."""
    group = Group(tmp_path, 2)
    place = group.ranks[1]._place(1)
    group.ranks[0].enter(WORK)
    group.ranks[0]._decide()
    group.ranks[1]._words[place] = dp_group._JOINING
    assert group.ranks[0].poll() == Agreement(Verdict.GO, 0)
    assert group.agree(NONE, WORK) == [Agreement(Verdict.GO, 0)] * 2


def test_ranks_that_share_experts_go_on_with_all_only(tmp_path: Path) -> None:
    group = Group(tmp_path, 3, make_experts_file())
    assert group.agree(WORK, None, NONE) == [Agreement(Verdict.GO, 0)] * 3
    assert [rank.epoch for rank in group.ranks] == [1] * 3
    assert group.agree(WORK, WORK, WORK) == [Agreement(Verdict.GO, 0)] * 3
    dead = threading.Semaphore(0)
    for rank in group.ranks[:2]:
        rank.watch(dead.release)
    group.kill(2)
    assert dead.acquire(timeout=60)
    assert dead.acquire(timeout=60)
    assert [rank.is_lost for rank in group.ranks[:2]] == [True, True]
    group.ranks[0].rejoin()
    assert group.agree(WORK, None, None) == [None] * 3
    group.ranks[2] = group.start(2, 3)
    assert group.agree(WORK, None, WORK) == [None] * 3, "rank 1 has not seen yet that it is lost"
    group.ranks[1].rejoin()
    assert group.agree(WORK, None, WORK) == [Agreement(Verdict.GO, 0)] * 3
    assert [rank.epoch for rank in group.ranks] == [2] * 3
    assert not any(rank.is_lost for rank in group.ranks)


def test_an_epoch_ends_when_a_rank_leaves_or_is_started_again_unseen(tmp_path: Path) -> None:
    fd = make_experts_file()
    group = Group(tmp_path, 2, fd)
    group.agree(WORK, NONE)
    group.kill(1)
    group.ranks[1] = group.start(1, 2)
    assert group.ranks[0].is_lost
    group.ranks[0].rejoin()
    group.agree(WORK, NONE)
    assert not has_epoch_ended(fd, 2)
    group.ranks[1].leave()
    assert group.ranks[0].is_lost
    assert not group.ranks[1].is_lost
    group.ranks[0].leave()


def test_ranks_that_share_experts_pause_and_go_on_together(tmp_path: Path) -> None:
    group = Group(tmp_path, 2, make_experts_file())
    group.agree(WORK, NONE)
    assert group.agree(PAUSING, PAUSING) == [Agreement(Verdict.PAUSE, 1)] * 2
    group.kill(1)
    group.ranks[1] = group.start(1, 2)
    assert group.agree(None, PAUSING) == [None, Agreement(Verdict.PAUSE, 1)]
    group.ranks[0].rejoin()
    assert group.agree(WORK, None) == [None, None]
    group.ranks[1].rejoin()
    assert group.agree(WORK, None) == [Agreement(Verdict.GO, 1)] * 2
    assert not group.ranks[0].is_lost


def test_a_rank_with_other_weights_is_refused(tmp_path: Path) -> None:
    group = Group(tmp_path, 2, make_experts_file())
    group.kill(1)
    other = DPGroup(group.path, 1, 2, group.clock, group.experts_file)
    with pytest.raises(ConfigError, match=r"engine 1 cannot share experts with engine 0: .* restart the server"):
        other.join(120)


def test_ranks_go_on_only_with_the_same_weights(tmp_path: Path) -> None:
    group = Group(tmp_path, 2, make_experts_file())
    first, second = group.ranks
    assert group.agree(WORK, WORK) == [Agreement(Verdict.GO, 0)] * 2
    first.rejoin()
    first.weights = 7
    assert second.is_lost
    second.rejoin()
    assert group.agree(WORK, WORK) == [None, None]
    second.weights = 7
    assert group.agree(WORK, WORK) == [Agreement(Verdict.GO, 0)] * 2
    group.kill(1)
    group.ranks[1] = group.start(1, 2)
    first.rejoin()
    assert group.agree(WORK, WORK) == [None, None], "it has been started with other weights"


def test_a_group_that_takes_the_place_of_another_goes_on_from_its_wave(tmp_path: Path) -> None:
    fd, path = make_experts_file(), tmp_path / "group.1"
    make_group_file(path)
    groups = [DPGroup(path, rank, 2, experts_file=fd, generation=5) for rank in (0, 1)]
    assert [groups[1].join(wave=0), groups[0].join(wave=4)] == [0, 4]
    groups[1].enter(WORK)
    agreements = [groups[1].poll() for _ in range(3)]
    assert agreements[-1] == Agreement(Verdict.GO, 4)
    assert not has_epoch_ended(fd, 1, 5)
    groups[0].leave()
    assert groups[1].is_lost
    assert not has_epoch_ended(fd, 1, 0), "other groups are not affected"
    assert groups[0].poll() is None


def test_ranks_that_cannot_be(tmp_path: Path) -> None:
    make_group_file(tmp_path / "group")
    for rank, size in ((0, 1), (2, 2), (-1, 2), (0, 65)):
        with pytest.raises(ConfigError, match="cannot be in a group"):
            DPGroup(tmp_path / "group", rank, size)


NUM_STEPS = 300


def _vote(path: Path, rank: int, pipe: Any) -> None:
    """Steps as an engine does, and sends what it has learnt."""
    group, dice, seen = DPGroup(path, rank, 3), random.Random(rank), []
    group.join()
    pipe.send("joined")
    pipe.recv()
    while group._number < NUM_STEPS:
        group.enter(Vote(group._number < NUM_STEPS - 1, False))
        while (agreement := group.poll()) is None:
            if dice.random() < 0.2:
                os.sched_yield()
        seen.append((group._number, agreement.verdict.value, agreement.wave))
    pipe.send(seen)
    signal.pause()


def test_processes_agree_and_a_kill_stops_none(tmp_path: Path) -> None:
    path = tmp_path / "group"
    make_group_file(path)
    context = multiprocessing.get_context("fork")
    pipes, workers = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        worker = context.Process(target=_vote, args=(path, rank, theirs), daemon=True)
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    assert [pipe.recv() for pipe in pipes] == ["joined"] * 2
    for pipe in pipes:
        pipe.send("go")
    first, second = (pipe.recv() for pipe in pipes)
    assert first == second
    assert [number for number, _, _ in first] == list(range(1, NUM_STEPS + 1))
    group = DPGroup(path, 2, 3)
    group.join()
    for worker in workers:
        worker.kill()  # members that never vote again
        worker.join()
    group.enter(WORK)
    while (agreement := group.poll()) is None:
        os.sched_yield()
    assert agreement.verdict is Verdict.GO
    group.leave()

"""The group of engines on several machines: what its hub decides, and ranks that speak with it."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from quire.coordinator import Coordinator, GroupTable
from quire.engine.dp_group import Agreement
from quire.engine.net_group import NetGroup
from quire.errors import ConfigError
from quire.wire.group import (
    NUM_GROUP_PORTS,
    EpochEnd,
    FromHub,
    GroupNetwork,
    GroupRefusal,
    GroupVerdict,
    GroupWelcome,
    RankState,
    Standing,
    Verdict,
    Vote,
    group_addresses,
)
from quire.wire.handshake import CoordinatorAddresses, CoordinatorLaunch, HubLaunch
from quire.wire.nodes import derive_keys
from quire.wire.shared_memory import has_epoch_ended, make_experts_file, note_epoch
from tests.ports import free_ports

WORK, NONE, PAUSING = Vote(True, False), Vote(False, False), Vote(False, True)
DEADLINE_S = 120.0


class Table:
    """A hub's table, and the states of its ranks: each has a connection of its own."""

    def __init__(self, size: int) -> None:
        self.table = GroupTable(size)
        self.states: dict[int, RankState] = {}
        self.connections = [b"connection %d" % rank for rank in range(size)]

    def send(self, rank: int, **changes: object) -> list[tuple[int, FromHub]]:
        """Sends a rank's state with `changes`. Returns what the hub answers, by rank."""
        start = RankState(rank, 1, Standing.JOINING, 0, None, 7, 8, 0, 0, b"machine %d" % (rank // 2), "")
        self.states[rank] = msgspec.structs.replace(self.states.get(rank, start), **changes)
        self.table.on_state(self.connections[rank], self.states[rank])
        return self.answers()

    def answers(self) -> list[tuple[int, FromHub]]:
        messages, self.table.messages = self.table.messages, []
        return [(self.connections.index(identity), message) for identity, message in messages]

    def join(self, *votes: Vote | None) -> list[GroupVerdict]:
        """All join, and vote. Returns the verdicts of all."""
        return [v for rank, vote in enumerate(votes) for v in verdicts(self.rejoin(rank, vote))]

    def rejoin(self, rank: int, vote: Vote | None = None) -> list[tuple[int, FromHub]]:
        joins = 1 + (self.states[rank].joins if rank in self.states else 0)
        return self.send(rank, joins=joins, standing=Standing.JOINING, number=0, vote=vote)

    def vote(self, number: int, *votes: Vote) -> list[GroupVerdict]:
        """Members vote."""
        found = list[GroupVerdict]()
        for rank, vote in enumerate(votes):
            found += verdicts(self.send(rank, standing=Standing.MEMBER, number=number, vote=vote))
        return found


def verdicts(answers: list[tuple[int, FromHub]]) -> list[GroupVerdict]:
    return [message for _, message in answers if isinstance(message, GroupVerdict)]


def test_all_are_admitted_together_and_agree_when_all_have_voted() -> None:
    group = Table(3)
    assert group.rejoin(0, WORK) == [(0, GroupWelcome(0))]
    assert group.rejoin(1) == [(1, GroupWelcome(0))], "idle"
    found = verdicts(group.rejoin(2, NONE))
    assert [(v.number, v.verdict, v.epoch, v.joins) for v in found] == [(1, Verdict.GO, 1, 1)] * 3
    assert found[0].machines == [[0, 1], [2]]
    assert group.send(1, vote=WORK) == [], "it has not learnt yet that it is a member"
    assert group.vote(2, NONE, NONE) == []
    assert [(v.verdict, v.wave, v.epoch) for v in group.vote(2, NONE, NONE, NONE)] == [(Verdict.STOP, 1, 1)] * 3
    assert len({v.session for v in found}) == 1


def test_an_epoch_ends_for_all_when_one_is_lost_and_begins_with_all() -> None:
    group = Table(3)
    group.join(WORK, NONE, NONE)
    group.table.on_gone(b"another connection")
    assert group.answers() == []
    group.table.on_gone(group.connections[1])
    assert group.answers() == [(rank, EpochEnd(1)) for rank in (0, 1, 2)]
    group.rejoin(0, WORK)
    group.connections[1] = b"started again"
    assert group.rejoin(1, WORK) == [(1, GroupWelcome(0))], "rank 2 has not joined again"
    assert [v.epoch for v in verdicts(group.rejoin(2))] == [2] * 3
    assert (2, EpochEnd(2)) in group.rejoin(0, WORK), "a rank that finds its step lost ends it for all"
    assert group.rejoin(1) == []
    group.connections[2] = b"started unseen"
    assert verdicts(group.rejoin(2, WORK))
    assert (0, EpochEnd(3)) in group.send(2, standing=Standing.ABSENT)
    assert group.send(2, standing=Standing.ABSENT) == []


def test_nothing_goes_on_without_the_paused_nor_while_weights_differ() -> None:
    group = Table(2)
    group.join(WORK, NONE)
    assert [v.verdict for v in group.vote(2, PAUSING, NONE)] == [Verdict.GO] * 2
    assert [(v.verdict, v.wave) for v in group.vote(3, PAUSING, PAUSING)] == [(Verdict.PAUSE, 1)] * 2
    group.send(0, weights=9)
    assert verdicts(group.rejoin(0, WORK)) == []
    assert group.rejoin(1, NONE) == [], "it has other weights"
    assert [v.epoch for v in verdicts(group.send(1, weights=9))] == [2] * 2
    assert [v.verdict for v in group.vote(5, PAUSING, PAUSING)] == [Verdict.PAUSE] * 2
    group.table.on_gone(group.connections[0])
    assert [message for _, message in group.answers()] == [EpochEnd(2)] * 2
    group.connections[0] = b"started in a pause"
    assert [(v.verdict, v.wave) for v in verdicts(group.rejoin(0, PAUSING))] == [(Verdict.PAUSE, 2)]
    assert verdicts(group.rejoin(0, WORK)) == []


def test_ranks_that_outlive_their_hub_join_the_next_one_with_greater_numbers() -> None:
    group = Table(2)
    _, (_, answer) = group.send(0, standing=Standing.MEMBER, number=9, vote=WORK, wave=4, epoch=6)
    assert answer == EpochEnd(6)
    assert group.send(1, standing=Standing.PAUSED, wave=3, epoch=6) == [(1, GroupWelcome(4))]
    assert group.rejoin(0, WORK) == [], "rank 1 is paused"
    assert [(v.wave, v.epoch) for v in verdicts(group.rejoin(1, NONE))] == [(4, 7)] * 2


def test_ranks_that_cannot_be_are_refused() -> None:
    group = Table(2)
    group.rejoin(0)
    ((_, refusal),) = group.send(1, fingerprint=1)
    assert isinstance(refusal, GroupRefusal)
    assert "engine 1 cannot share experts with engine 0" in refusal.message
    group.table.on_state(b"another", msgspec.structs.replace(group.states[0], rank=2))
    ((_, refusal),) = [(identity, message) for identity, message in group.table.messages]
    assert isinstance(refusal, GroupRefusal)
    assert "engine 2 cannot be in a group of 2" in refusal.message


class Hub:
    """A coordinator on a thread, with a hub; `stop` is its death."""

    def __init__(self, directory: Path, size: int) -> None:
        first = free_ports(3)
        back, intake, self.address = (f"tcp://127.0.0.1:{port}" for port in range(first, first + 3))
        self.key = secrets.token_bytes(32)
        keys, _ = derive_keys(self.key, 5.0)
        addresses = CoordinatorAddresses(*(f"ipc://{directory}/{name}" for name in "fbi"))
        launch = HubLaunch(size, back, intake, self.address, keys)
        self._launch = CoordinatorLaunch(addresses, 1, os.getpid(), None, launch)
        self.start()

    def start(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        reader, self._writer = os.pipe()
        coordinator = Coordinator(self._launch, self._context)
        self._thread = threading.Thread(target=self._run, args=(coordinator, reader))
        self._thread.start()

    def _run(self, coordinator: Coordinator, reader: int) -> None:
        coordinator.run(reader)
        os.close(reader)

    def stop(self) -> None:
        os.close(self._writer)
        self._thread.join(DEADLINE_S)
        self._context.term()


class Ranks:
    """Ranks on machines of their own."""

    def __init__(self, hub: Hub, size: int) -> None:
        self.hub, self.news = hub, threading.Condition()
        self.files = [make_experts_file() for _ in range(size)]
        self.groups = [self.start(rank) for rank in range(size)]

    def start(self, rank: int, fingerprint: int = 7) -> NetGroup:
        network = GroupNetwork(self.hub.address, "", self.hub.key, 5.0, b"%d" % rank, f"tcp://own:{rank}")
        group = NetGroup(network, rank, len(self.files), self.files[rank], self._note)
        try:
            group.join(fingerprint)
        except ConfigError:
            group.leave()
            raise
        return group

    def _note(self) -> None:
        with self.news:
            self.news.notify_all()

    def wait(self, is_so: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(is_so, DEADLINE_S)

    def agree(self, *votes: Vote) -> list[Agreement | None]:
        """Has all vote. Ranks that join must have work: the hub may decide before the vote of one has come."""
        for group, vote in zip(self.groups, votes, strict=True):
            group.enter(vote)
            if group.is_joining:
                group.enter(vote)
        self.wait(lambda: all(group.poll() is not None for group in self.groups))
        return [group.poll() for group in self.groups]

    def kill(self, rank: int) -> None:
        """Ends the connection without a farewell."""
        link = self.groups[rank]._link
        assert link is not None
        link._sent = link._state
        link.stop()

    def wait_lost(self, *ranks: int) -> None:
        self.wait(lambda: all(self.groups[rank].is_lost for rank in ranks))
        for rank in ranks:
            self.groups[rank].rejoin()

    def close(self) -> None:
        for group in self.groups:
            group.leave()
            group.leave()
        for file in self.files:
            os.close(file)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    hub = Hub(tmp_path, 2)
    made = Ranks(hub, 2)
    yield made
    made.close()
    hub.stop()


def test_ranks_agree_through_the_hub_and_outlive_a_death_and_that_of_the_hub(ranks: Ranks) -> None:
    assert ranks.groups[0].network is None
    assert ranks.groups[0].poll() is None
    assert ranks.agree(WORK, WORK) == [Agreement(Verdict.GO, 0)] * 2
    networks = [group.network for group in ranks.groups]
    assert [(n.address, n.parts, n.share) for n in networks if n is not None] == [
        ("tcp://own:0", [1, 1], 0),
        ("tcp://own:0", [1, 1], 1),
    ]
    assert ranks.agree(NONE, NONE) == [Agreement(Verdict.STOP, 1)] * 2
    assert ranks.agree(PAUSING, PAUSING) == [Agreement(Verdict.PAUSE, 2)] * 2
    assert [group.rejoin() for group in ranks.groups] == [2, 2]
    ranks.groups[0].weights = ranks.groups[1].weights = 5
    assert ranks.agree(WORK, WORK) == [Agreement(Verdict.GO, 2)] * 2
    ranks.kill(1)
    ranks.wait_lost(0)
    assert has_epoch_ended(ranks.files[0], 2)
    ranks.groups[1] = ranks.start(1)
    ranks.groups[1].weights = 5
    assert ranks.agree(WORK, WORK) == [Agreement(Verdict.GO, 2)] * 2
    ranks.hub.stop()
    ranks.wait_lost(0, 1)
    ranks.hub.start()
    assert ranks.agree(WORK, WORK) == [Agreement(Verdict.GO, 2)] * 2
    assert [group.epoch for group in ranks.groups] == [4, 4]
    assert (ranks.groups[0].wave, ranks.groups[0].fingerprint, ranks.groups[0].weights) == (2, 7, 5)


def test_a_rank_whose_bits_differ_is_refused(ranks: Ranks) -> None:
    ranks.groups[1].leave()
    assert ranks.groups[1].has_left
    assert ranks.groups[1].poll() is None
    with pytest.raises(ConfigError, match="engine 1 cannot share experts with engine 0"):
        ranks.start(1, fingerprint=8)


def test_addresses_and_numbers_of_epochs() -> None:
    assert group_addresses("::1", 9)[NUM_GROUP_PORTS - 1] == "tcp://[::1]:12"
    file = make_experts_file()
    assert [note_epoch(file, epoch) for epoch in (3, 1, 0)] == [3, 3, 3]
    assert not has_epoch_ended(file, 3)
    os.close(file)

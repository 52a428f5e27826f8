"""Several engines under any order of adds, aborts, steps, deaths, moves, drains, changes of size and stale messages.

The driver checks each delivery, and that a request is in the journal of exactly one engine. Here: what was delivered is
a prefix of the one right output, and in the end all of it, with one end.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.frontend.client.engine_set import EngineSet
from quire.frontend.client.link import EngineLink, LinkState
from quire.frontend.supervision.journal import JournalEntry, Standing
from quire.frontend.supervision.quarantine import CoreDeath
from quire.wire.engine_core import EngineCoreRequest, FinishReason
from tests.seeds import examples, seeds

from .model_core import expected_tokens, make_request
from .set_driver import SetDriver

MAX_ENGINES = 5


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Most of what an episode did was to log that engines die."""
    caplog.set_level(logging.CRITICAL)


class SetMachine(RuleBasedStateMachine):
    """A user, a network and engines around an `EngineSet`."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = SetDriver(1)
        self.requests: dict[str, EngineCoreRequest] = {}

    @initialize(size=st.integers(1, 3), max_num_seqs=st.integers(1, 4), reroute=st.sampled_from(["auto", "wait"]))
    def begin(self, size: int, max_num_seqs: int, reroute: str) -> None:
        self.driver = SetDriver(size, max_num_seqs, reroute=reroute)

    # -- the user -----------------------------------------------------------------------------------------------------

    @rule(num_tokens=st.integers(1, 6), rank=st.none() | st.integers(0, 4), stem=st.sampled_from(["", "a" * 20]))
    def add(self, num_tokens: int, rank: int | None, stem: str) -> None:
        name = f"{stem}r{len(self.requests)}"
        self.requests[name] = make_request(name, num_tokens, data_parallel_rank=rank)
        self.driver.add(self.requests[name])

    @precondition(lambda self: self.driver.delivered)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.delivered))))

    # -- the network --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.driver.cores)
    @rule(data=st.data(), count=st.integers(0, 3))
    def step(self, data: st.DataObject, count: int) -> None:
        index = data.draw(st.sampled_from(sorted(self.driver.cores)))
        self.driver.cores[index].step()
        self.driver.deliver(index, count)

    @precondition(lambda self: self.driver.late)
    @rule(count=st.integers(1, 5))
    def deliver_late(self, count: int) -> None:
        self.driver.deliver_late(count)

    @precondition(lambda self: self.driver.cores)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        core = self.driver.cores[data.draw(st.sampled_from(sorted(self.driver.cores)))]
        if core.outbox:
            core.outbox.pop(0)
            self.driver.set.on_corrupt_message()
            self.driver.settle()

    # -- the engines --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.driver.startable)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.driver.start(data.draw(st.sampled_from(self.driver.startable)))

    @precondition(lambda self: self.driver.cores)
    @rule(data=st.data(), cause=st.sampled_from(["killed", "crash", "hang"]))
    def die(self, data: st.DataObject, cause: str) -> None:
        self.driver.die(data.draw(st.sampled_from(sorted(self.driver.cores))), cause)  # type: ignore[arg-type]

    @precondition(lambda self: len([i for i in self.driver.set.links if i in self.driver.cores]) > 1)
    @rule(data=st.data(), moves=st.booleans())
    def drain(self, data: st.DataObject, moves: bool) -> None:
        self.driver.set.drain(data.draw(st.sampled_from(sorted(self.driver.set.links))), moves=moves)
        self.driver.settle()

    @rule(data=st.data())
    def undrain(self, data: st.DataObject) -> None:
        self.driver.set.undrain(data.draw(st.sampled_from(sorted(self.driver.set.links))))
        self.driver.settle()

    @rule(data=st.data())
    def lose_machine(self, data: st.DataObject) -> None:
        self.driver.lose(data.draw(st.sampled_from(sorted(self.driver.set.links))))

    @precondition(lambda self: self.driver.away)
    @rule(data=st.data())
    def regain_machine(self, data: st.DataObject) -> None:
        self.driver.regain(data.draw(st.sampled_from(sorted(self.driver.away))))

    @precondition(lambda self: len(self.driver.num_cores) < MAX_ENGINES)
    @rule()
    def grow(self) -> None:
        self.driver.grow()

    @precondition(lambda self: len(self.removable) > 0)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        self.driver.shrink(data.draw(st.sampled_from(self.removable)))

    @property
    def removable(self) -> list[int]:
        """Engines without which another is left that works, or will."""
        links = self.driver.set.links
        left = [i for i, link in links.items() if link.state is not LinkState.GONE]
        return sorted(i for i in links if left not in ([i], []))

    @precondition(lambda self: len(self.driver.startable) + len(self.driver.cores) > 1)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        left = sorted({*self.driver.startable, *self.driver.cores})
        self.driver.give_up(data.draw(st.sampled_from(left)))

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def what_was_given_is_a_beginning(self) -> None:
        for name, tokens in self.driver.delivered.items():
            expected = expected_tokens(self.requests[name])
            assert tokens == expected[: len(tokens)]
            if name in self.driver.ends and self.driver.ends[name].finish_reason is FinishReason.LENGTH:
                assert tokens == expected
            assert self.driver.num_prefill_stats[name] == bool(tokens)

    @invariant()
    def loads_agree_with_the_journals(self) -> None:
        engines = self.driver.set
        if len(engines.links) > 1:
            for index, link in engines.links.items():
                assert engines.router.num_requests(index) == link.num_live_requests
                at_engine = [entry.request_id for part in link.get_entries() for entry in part]
                assert sorted(engines.router.placed_at(index)) == sorted(at_engine)
                assert all(map(engines.router.has_request, at_engine))

    def teardown(self) -> None:
        """From here on nothing bad happens. (Kills in a trial look like a poison, as with one engine.)"""
        self.driver.run()
        for name, tokens in self.driver.delivered.items():
            end = self.driver.ends[name]
            if end.finish_reason is FinishReason.ERROR:
                assert "was in the last step of an engine core that failed" in (end.error_message or "")
            else:
                assert tokens == expected_tokens(self.requests[name])


TestSetMachine = SetMachine.TestCase
TestSetMachine.settings = settings(max_examples=examples(30), stateful_step_count=60)


def play(seed: int, num_operations: int) -> SetDriver:
    """Makes that many random operations, and ends everything. Raises AssertionError where a token is wrong."""
    rng = random.Random(seed)
    driver = SetDriver(rng.randint(2, 4), max_num_seqs=rng.randint(1, 8))
    requests: dict[str, EngineCoreRequest] = {}

    def add() -> None:
        name = f"r{len(requests)}"
        requests[name] = make_request(name, rng.randint(1, 8))
        driver.add(requests[name])

    def abort() -> None:
        if live := [name for name in driver.delivered if name not in driver.ends]:
            driver.abort(rng.choice(live))

    def step() -> None:
        if driver.cores:
            driver.cores[rng.choice(list(driver.cores))].step()

    def deliver() -> None:
        if driver.cores:
            driver.deliver(rng.choice(list(driver.cores)), rng.randint(1, 3))

    def die() -> None:
        if driver.cores:
            driver.die(rng.choice(list(driver.cores)), rng.choice(["killed", "crash", "hang"]))

    def start() -> None:
        if driver.startable:
            driver.start(rng.choice(driver.startable))

    def resize() -> None:
        if len(driver.set.links) < 4:
            driver.grow()
        else:
            driver.shrink(rng.choice(list(driver.set.links)))

    def drain() -> None:
        index = rng.choice(list(driver.set.links))
        if driver.set.is_draining(index):
            driver.set.undrain(index)
        else:
            driver.set.drain(index, moves=rng.random() < 0.5)
        driver.settle()

    def deliver_late() -> None:
        driver.deliver_late(rng.randint(1, 5))

    def part() -> None:
        index = rng.choice(list(driver.set.links))
        if index in driver.away:
            driver.regain(index)
        else:
            driver.lose(index)

    operations = {add: 12, abort: 2, step: 40, deliver: 20, die: 3, start: 6, resize: 1, drain: 10, deliver_late: 3}
    operations[part] = 2
    for act in rng.choices(list(operations), list(operations.values()), k=num_operations):
        act()
    driver.run()
    for name, tokens in driver.delivered.items():
        expected = expected_tokens(requests[name])
        was_found_guilty = driver.ends[name].finish_reason is FinishReason.ERROR
        assert tokens == (expected[: len(tokens)] if was_found_guilty else expected)
        assert driver.num_prefill_stats[name] == bool(tokens)
    return driver


@pytest.mark.parametrize("seed", seeds(1))
def test_5_000_operations(seed: int) -> None:
    driver = play(seed, 5000)
    assert driver.set.counts["moved_requests"] > 50
    assert len(driver.ends) > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_10_000_000_operations(seed: int) -> None:
    play(seed, 100_000)


def _uses_ids_again(entry: JournalEntry) -> None:
    entry.standing = Standing.HELD
    entry.num_sends = 0


def _keeps_ids(link: EngineLink, entries: list[JournalEntry]) -> None:
    for entry in entries:
        del link._journal._entries[entry.request_id]
        entry.note_released()


def _forgets_the_last_token(link: EngineLink, entries: list[JournalEntry], *, are_suspects: bool = False) -> None:
    for entry in entries:
        del entry.output_token_ids[-1:]
    ADOPT(link, entries, are_suspects=are_suspects)


def _listens_on(link: EngineLink, death: CoreDeath) -> None:
    link.on_death(death)


def _does_nothing(*args: object) -> None:
    """Nothing is gathered, or released."""


ADOPT = EngineLink.adopt
MUTANTS = [
    (JournalEntry, "note_released", _uses_ids_again),
    (EngineLink, "release", _keeps_ids),
    (EngineLink, "adopt", _forgets_the_last_token),
    (EngineLink, "release", _does_nothing),
    (EngineSet, "_gather", _does_nothing),
    (EngineLink, "cut", _listens_on),
]


@pytest.mark.parametrize(("owner", "name", "mutant"), MUTANTS)
def test_mistakes_in_moves_are_found(owner: type, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge is not asleep: each planted mistake fails an episode."""
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, KeyError)):
        play_until_gathered()


def play_until_gathered() -> None:
    """Plays episodes that find each mistake at once, in each of which requests must be moved from engines that are
    down."""
    for seed in (1, 2, 8, 0):
        driver = play(seed, 500)
        assert any(name.endswith(".waiting") for name in driver.set.counts), "nothing was gathered"


def test_episodes_without_mistakes_pass() -> None:
    play_until_gathered()


@pytest.mark.fresh
@pytest.mark.parametrize("seed", seeds(20))
def test_poisons_among_innocents_on_several_engines(seed: int) -> None:
    """Any crowd on any number of engines: each poison costs two restarts, and never reaches another engine."""
    rng = random.Random(seed)
    driver = SetDriver(rng.randint(2, 4), max_num_seqs=rng.randint(1, 8))
    driver.start_all()
    requests = []
    for i in range(rng.randint(4, 30)):
        num_tokens = rng.randint(1, 8)
        deadly_at = rng.randrange(num_tokens) if rng.random() < 0.1 else None
        requests.append(make_request(f"r{i}", num_tokens, deadly_at))
        driver.add(requests[-1])
        for index in list(driver.cores):
            if rng.random() < 0.7:
                driver.step(index)
        if rng.random() < 0.5:
            driver.start_all()
    driver.run()
    num_poisons = sum((request.prompt_token_ids or [0])[-1] != 0 for request in requests)
    assert sum(driver.num_cores.values()) - len(driver.num_cores) <= 2 * num_poisons
    for request in requests:
        assert request.prompt_token_ids is not None
        is_poison = request.prompt_token_ids[-1] != 0
        reason = driver.ends[request.request_id].finish_reason
        assert reason is (FinishReason.ERROR if is_poison else FinishReason.LENGTH)
        expected = expected_tokens(request)
        given = driver.delivered[request.request_id]
        assert given == (expected[: request.prompt_token_ids[-1] - 1] if is_poison else expected)

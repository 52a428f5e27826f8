"""The link under any order of adds, aborts, steps, lost, repeated and late messages, deaths and restarts.

The driver checks each delivery: nothing for aborted requests, nothing after an end. The machine checks after each rule
that the tokens of a request are a beginning of its one correct output, and at the end that they are all of it.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.frontend.supervision.quarantine import CoreDeath
from quire.wire.engine_core import EngineCoreRequest, FinishReason
from tests.seeds import examples, seeds

from .model_core import Driver, expected_tokens, make_request


class LinkMachine(RuleBasedStateMachine):
    """A user, a network and a core around an `EngineLink`."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.requests: dict[str, EngineCoreRequest] = {}
        self.num_restarts = 0

    @initialize(max_num_seqs=st.integers(1, 4))
    def begin(self, max_num_seqs: int) -> None:
        self.driver.max_num_seqs = max_num_seqs

    # -- the user ---------------------------------------------------------------------------------------------------

    @rule(num_tokens=st.integers(1, 6))
    def add(self, num_tokens: int) -> None:
        name = f"r{len(self.requests)}"
        self.requests[name] = make_request(name, num_tokens)
        self.driver.add(self.requests[name])

    @precondition(lambda self: self.driver.delivered)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.driver.delivered)))
        self.driver.abort(name)

    # -- the network ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.driver.core is not None)
    @rule()
    def core_steps(self) -> None:
        assert self.driver.core is not None
        self.driver.core.step()

    @precondition(lambda self: self.driver.core is not None)
    @rule(count=st.integers(1, 3))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            self.driver.deliver()

    @precondition(lambda self: self.driver.core is not None and self.driver.core.outbox)
    @rule(position=st.integers(0, 3))
    def lose(self, position: int) -> None:
        assert self.driver.core is not None
        outbox = self.driver.core.outbox
        del outbox[min(position, len(outbox) - 1)]
        self.driver.link.on_corrupt_message()
        self.driver.settle()

    @precondition(lambda self: self.driver.core is not None and self.driver.core.outbox)
    @rule()
    def repeat(self) -> None:
        assert self.driver.core is not None
        message = self.driver.core.outbox[0]
        self.driver.deliver()
        for output in message.outputs:
            output.request_id = output.request_id or "forgotten"
        self.driver.link.on_outputs(message)
        self.driver.settle()

    # -- the core ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.driver.core is not None)
    @rule(cause=st.sampled_from(["killed", "crash", "hang", "lost"]), late=st.integers(0, 3))
    def die(self, cause: str, late: int) -> None:
        """Some of its last messages arrive after its death is known, some arrive never."""
        assert self.driver.core is not None
        core, self.driver.core = self.driver.core, None
        if cause == "lost":
            self.driver.link.on_death(CoreDeath("lost", "is gone", None))
        else:
            self.driver.link.on_death(core.death(cause))  # type: ignore[arg-type]
        self.driver.settle()
        for message in core.outbox[:late]:
            self.driver.link.on_outputs(message)
            self.driver.settle()

    @precondition(lambda self: self.driver.core is None)
    @rule(fails=st.booleans())
    def start(self, fails: bool) -> None:
        if fails:
            self.driver.link.on_death(CoreDeath("start", "did not start"))
        else:
            self.driver.start_core()

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def what_was_given_is_a_beginning(self) -> None:
        for name, tokens in self.driver.delivered.items():
            expected = expected_tokens(self.requests[name])
            assert tokens == expected[: len(tokens)]
            if name in self.driver.ends and self.driver.ends[name].finish_reason is FinishReason.LENGTH:
                assert tokens == expected
            assert self.driver.num_prefill_stats[name] == bool(tokens)

    def teardown(self) -> None:
        """From here on nothing bad happens: everything comes to its end. (A request may have been found guilty above:
        a kill in its trial after two others looks like a poison, and it says so.)"""
        self.driver.run()
        for name, tokens in self.driver.delivered.items():
            end = self.driver.ends[name]
            if end.finish_reason is FinishReason.ERROR:
                assert "was in the last step of an engine core that failed" in (end.error_message or "")
            else:
                assert tokens == expected_tokens(self.requests[name])


TestLinkMachine = LinkMachine.TestCase
TestLinkMachine.settings = settings(max_examples=examples(50), stateful_step_count=60)


@pytest.mark.fresh
@pytest.mark.parametrize("seed", seeds(20))
def test_poisons_among_innocents(seed: int) -> None:
    """Any crowd, any order: each poison costs at most two restarts, and only poisons fail."""
    rng = random.Random(seed)
    driver = Driver(max_num_seqs=rng.randint(1, 12))
    requests = []
    num_poisons = 0
    driver.start_core()
    for i in range(rng.randint(1, 20)):
        num_tokens = rng.randint(1, 8)
        deadly_at = rng.randrange(num_tokens) if rng.random() < 0.15 else None
        num_poisons += deadly_at is not None
        requests.append(make_request(f"r{i}", num_tokens, deadly_at))
        driver.add(requests[-1])
        for _ in range(rng.randint(0, 3)):
            if driver.core is None:
                driver.start_core()
            driver.step()
    driver.run()
    assert driver.num_cores - 1 <= 2 * num_poisons
    for request in requests:
        is_poison = request.prompt_token_ids is not None and request.prompt_token_ids[-1] != 0
        assert driver.ends[request.request_id].finish_reason is (
            FinishReason.ERROR if is_poison else FinishReason.LENGTH
        )
        expected = expected_tokens(request)
        if is_poison:
            assert request.prompt_token_ids is not None
            expected = expected[: request.prompt_token_ids[-1] - 1]
        assert driver.delivered[request.request_id] == expected


@pytest.mark.fresh
@pytest.mark.parametrize("seed", seeds(10))
def test_kills_without_end_and_no_token_lost(seed: int) -> None:
    """64 requests; a core killed again and again, at any point, as long as now and then a step is completed."""
    rng = random.Random(seed)
    driver = Driver(max_num_seqs=64)
    requests = [make_request(f"r{i}", rng.randint(1, 12)) for i in range(64)]
    for request in requests:
        driver.add(request)
    while driver.link.num_live_requests:
        driver.start_core()
        for _ in range(rng.randint(1, 3)):
            driver.step()
        assert driver.core is not None
        if rng.random() < 0.5:
            driver.core.step()  # computed, never delivered
        driver.die("killed")
    for request in requests:
        assert driver.delivered[request.request_id] == expected_tokens(request)
        assert driver.ends[request.request_id].finish_reason is FinishReason.LENGTH

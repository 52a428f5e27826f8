"""Several clients of one core, whose deaths are judged in one place: a poison of any client costs two of them."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from quire.frontend.client.link import LinkState, Verdict
from quire.frontend.client.shared_links import DeathReport, MemberLink, OwnerLink, Suspect
from quire.frontend.supervision.quarantine import CoreDeath, DeathCause
from quire.wire.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityOutput
from tests.seeds import seeds

from .model_core import ABORT, ADD, UTILITY, Driver, ModelCore, expected_tokens, make_ready, make_request


class SharedCore(ModelCore):
    """A core of several clients: what it sends each is numbered by itself."""

    def __init__(self, incarnation: int, max_num_seqs: int) -> None:
        super().__init__(incarnation, max_num_seqs)
        self.outboxes: dict[int, deque[EngineCoreOutputs]] = {}
        self.numbers: dict[int, int] = {}
        self.client_of: dict[str, int] = {}

    def send(self, **fields: Any) -> None:
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for output in fields["outputs"]:
            by_client.setdefault(self.client_of[output.request_id], []).append(output)
        for client, outputs in by_client.items():
            self.send_to(client, outputs=outputs)

    def take_in(self) -> None:
        calls = [message.payload for message in self.inbox if message.type is UTILITY]
        self.inbox = [message for message in self.inbox if message.type is not UTILITY]
        self.client_of |= {m.payload.request_id: m.payload.client_index for m in self.inbox if m.type is ADD}
        super().take_in()
        for client, call_id, method, args in calls:
            self.calls.append((method, args))
            self.send_to(client, utility_output=UtilityOutput(call_id, result=method))

    def send_to(self, client: int, **fields: Any) -> None:
        number = self.numbers[client] = self.numbers.get(client, 0) + 1
        message = EngineCoreOutputs(incarnation=self.incarnation, sequence=number, **fields)
        self.outboxes.setdefault(client, deque()).append(message)


class Member(Driver):
    """A client with requests, whose core another process owns."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.link = self.member = MemberLink(index)
        self.index = index

    def settle(self) -> None:
        pass  # the fleet carries what is to be sent

    def settle_with(self, core: SharedCore | None) -> None:
        self.core = core
        super().settle()


class Fleet:
    """An owner, its members, and the core they share."""

    def __init__(self, num_members: int, max_num_seqs: int = 8) -> None:
        self.owner = OwnerLink(lambda: False)
        self.reports: deque[DeathReport] = deque()
        self.owner.on_report = self.reports.append
        self.members = [Member(index) for index in range(1, num_members + 1)]
        self.max_num_seqs = max_num_seqs
        self.core: SharedCore | None = None
        self.num_cores = 0
        self.deaf: set[int] = set()
        """Members that get no report."""

    def start_core(self) -> None:
        self.core = core = SharedCore(self.num_cores, self.max_num_seqs)
        self.num_cores += 1
        self.owner.on_ready(make_ready(core.incarnation))
        self.settle()

    def settle(self) -> None:
        """Carry everything to where it belongs, until nothing moves."""
        core = self.core
        is_moving = True
        while is_moving:
            is_moving = False
            for link in (self.owner, *(member.link for member in self.members)):
                messages, link.messages = link.messages, []
                if core is not None and messages:
                    core.inbox += messages
                    is_moving = True
            for member in self.members:
                member.settle_with(core)
            if core is None or core.is_dead:
                return
            calls = [m for m in core.inbox if m.type is UTILITY]
            if calls:
                core.take_in()
            for client, outbox in core.outboxes.items():
                while outbox:
                    is_moving = True
                    (self.owner if client == 0 else self.members[client - 1].link).on_outputs(outbox.popleft())
            if any(method == "admit_clients" for method, _ in core.calls):
                core.calls.clear()
                is_moving = True
                for member in self.members:
                    member.link.on_ready(make_ready(core.incarnation))

    def answer_reports(self) -> None:
        while self.reports:
            report = self.reports.popleft()
            suspects: list[Suspect] = []
            for member in self.members:
                if member.index in self.deaf:
                    continue
                if report.verdict is not None:
                    member.member.convict(report.verdict)
                suspects += member.member.report_death(report.incarnation, report.death)
            self.owner.try_suspects(suspects)
            self.settle()

    def die(self, cause: DeathCause) -> None:
        assert self.core is not None
        core, self.core = self.core, None
        for member in self.members:
            if member.link.state is not LinkState.DOWN:
                member.link.on_death(CoreDeath("lost", "has disconnected", None))
        self.owner.on_death(core.death(cause))
        self.settle()

    def step(self) -> None:
        assert self.core is not None
        self.core.step()
        if self.core.is_dead:
            self.die("crash")
        else:
            self.settle()

    def add(self, index: int, request: EngineCoreRequest) -> None:
        request.client_index = index
        self.members[index - 1].add(request)
        self.settle()

    @property
    def num_live(self) -> int:
        return sum(member.link.num_live_requests for member in self.members)

    def run(self) -> None:
        for _ in range(10_000):
            if not self.num_live:
                return
            if self.core is None:
                self.start_core()
            self.answer_reports()
            self.step()
        raise AssertionError("requests are stuck")

    def end_of(self, request: EngineCoreRequest) -> EngineCoreOutput:
        return self.members[request.client_index - 1].ends[request.request_id]

    def tokens_of(self, request: EngineCoreRequest) -> list[int]:
        return self.members[request.client_index - 1].delivered[request.request_id]


def is_poison(request: EngineCoreRequest) -> bool:
    assert request.prompt_token_ids is not None
    return request.prompt_token_ids[-1] != 0


def check(fleet: Fleet, requests: list[EngineCoreRequest]) -> None:
    """Every innocent has all its tokens, every poison none after its deed and an error of its own."""
    for request in requests:
        end, expected = fleet.end_of(request), expected_tokens(request)
        if is_poison(request):
            assert request.prompt_token_ids is not None
            assert end.finish_reason is FinishReason.ERROR
            assert f"request {request.request_id} was in the last step" in (end.error_message or "")
            expected = expected[: request.prompt_token_ids[-1] - 1]
            expected = expected[: len(fleet.tokens_of(request))]  # outputs of its trials have no reader
        else:
            assert end.finish_reason is FinishReason.LENGTH, end.error_message
        assert fleet.tokens_of(request) == expected


@pytest.mark.parametrize("deadly_at", [0, 2])
@pytest.mark.parametrize("culprit", [1, 2, 3])
def test_a_poison_costs_two_deaths_whoever_sent_it(culprit: int, deadly_at: int) -> None:
    fleet = Fleet(3, max_num_seqs=16)
    fleet.start_core()
    requests = []
    for i in range(12):
        index = 1 + i % 3
        request = make_request(f"r{i}", 5, deadly_at if i // 3 == 2 and index == culprit else None)
        requests.append(request)
        fleet.add(index, request)
    fleet.run()
    assert fleet.num_cores == 3
    assert fleet.owner.counts["poisoned_requests"] == 1
    check(fleet, requests)


def test_nobody_is_admitted_while_a_suspect_is_tried() -> None:
    fleet = Fleet(2)
    fleet.start_core()
    for index, name in ((1, "a"), (1, "b"), (2, "c")):
        fleet.add(index, make_request(name, 9))
    fleet.step()
    fleet.die("crash")
    fleet.start_core()
    assert fleet.core is not None
    assert not fleet.core.inbox, "it is not known yet who is suspected"
    fleet.add(2, make_request("newcomer", 9))
    fleet.answer_reports()
    tried = []
    while fleet.members[0].link.state is LinkState.DOWN:
        assert fleet.members[1].link.state is LinkState.DOWN
        fleet.core.take_in()
        tried += list(fleet.core.requests)
        assert len(fleet.core.requests) == 1
        fleet.step()
    assert tried == ["a~t", "b~t", "c~t"]
    fleet.core.take_in()
    assert sorted(fleet.core.requests) == ["a", "b", "c", "newcomer"], "the tried ones are with it once more, not twice"
    fleet.run()
    assert fleet.num_cores == 2
    assert fleet.num_live == fleet.owner.num_live_requests == 0


def test_a_verdict_is_carried_out_before_anybody_is_admitted() -> None:
    fleet = Fleet(2)
    fleet.start_core()
    fleet.add(1, poison := make_request("poison", 5, 0))
    fleet.add(2, other := make_request("other", 5))
    fleet.step()
    fleet.start_core()
    fleet.answer_reports()
    fleet.step()
    assert fleet.reports[0].verdict is not None
    assert fleet.reports[0].verdict.request_id == "poison~t"
    fleet.start_core()
    fleet.step()  # the other one is tried meanwhile, and cleared
    assert [member.link.state for member in fleet.members] == [LinkState.DOWN] * 2
    fleet.answer_reports()
    assert "poison" in fleet.members[0].ends
    assert [member.link.state for member in fleet.members] == [LinkState.UP] * 2
    fleet.run()
    check(fleet, [poison, other])


def test_waiting_in_the_queue_of_dying_cores_is_no_guilt() -> None:
    """Requests that no dead core has come to do not count its deaths: only those in the step do."""
    fleet = Fleet(2, max_num_seqs=1)
    fleet.start_core()
    poisons = [make_request(f"p{i}", 3, 0) for i in range(4)]
    innocents = [make_request(f"i{i}", 3) for i in range(3)]
    for poison in poisons:
        fleet.add(1, poison)
    for innocent in innocents:
        fleet.add(2, innocent)
    fleet.run()
    check(fleet, poisons + innocents)


def test_a_kill_from_outside_accuses_nobody() -> None:
    fleet = Fleet(2)
    fleet.start_core()
    requests = [make_request(f"r{i}", 8) for i in range(4)]
    for i, request in enumerate(requests):
        fleet.add(1 + i % 2, request)
    for _ in range(3):
        fleet.step()
        fleet.die("killed")
        fleet.start_core()
        fleet.answer_reports()
        assert fleet.members[0].link.state is LinkState.UP, "nobody was tried"
    fleet.run()
    check(fleet, requests)


def test_one_that_is_killed_for_its_memory_again_and_again_is_tried() -> None:
    """The system kills a core three times in the step of one request, and once more in its trial."""
    fleet = Fleet(2, max_num_seqs=1)
    fleet.start_core()
    fleet.add(1, glutton := make_request("glutton", 5))
    fleet.add(2, other := make_request("other", 5))
    for _ in range(4):
        assert fleet.core is not None
        fleet.core.step()  # its outputs are never sent
        fleet.core.outboxes.clear()
        fleet.die("killed")
        fleet.start_core()
        fleet.answer_reports()
    fleet.run()
    assert fleet.end_of(glutton).finish_reason is FinishReason.ERROR
    assert fleet.tokens_of(other) == expected_tokens(other)


def test_a_process_that_does_not_answer_holds_up_nobody() -> None:
    """Its requests go on untried; what it says later of a core that is gone counts no more."""
    fleet = Fleet(2)
    fleet.start_core()
    fleet.add(1, poison := make_request("poison", 5, 2))
    fleet.add(2, other := make_request("other", 9))
    fleet.deaf = {1}
    for _ in range(3):
        fleet.step()
    report = fleet.reports[0]
    fleet.start_core()
    fleet.answer_reports()
    for _ in range(2):
        fleet.step()  # the core dies a second time only now: its poison was not tried
    assert fleet.members[0].member.report_death(report.incarnation, report.death) == []
    fleet.deaf = set()
    fleet.run()
    check(fleet, [poison, other])


def test_a_death_is_heard_of_once_whichever_way_it_comes_first() -> None:
    link = MemberLink(1)
    assert link.report_death(0, CoreDeath("crash", "")) == [], "there was none yet"
    link.on_ready(make_ready(0))
    link.add_request(make_request("a"))
    death = CoreDeath("crash", "exited with code 1", ("a",))
    (suspect,) = link.report_death(0, death)
    assert suspect.request.request_id == "a~t"
    link.on_death(CoreDeath("lost", "has disconnected", None))
    assert link.report_death(0, death) == []
    assert link.state is LinkState.DOWN
    assert link.counts["poisoned_requests"] == 0
    link.on_ready(make_ready(2))
    assert link.report_death(1, death) == [], "of a core that never had our requests"
    link.on_gone("the budget is used up")
    assert link.report_death(2, death) == []


def test_a_verdict_on_a_request_that_is_with_the_core_again_is_carried_out() -> None:
    link = MemberLink(1)
    link.on_ready(make_ready(0))
    link.add_request(make_request("a"))
    link.messages.clear()
    link.convict(Verdict("a~t", "it kills"))
    assert [(m.type, m.payload) for m in link.messages] == [(ABORT, ["a"])]
    assert link.deliveries[0].outputs[0].error_message == "it kills"
    link.convict(Verdict("a", "it kills"))
    assert len(link.deliveries) == 1


def test_without_anybody_to_ask_the_others_are_admitted_at_once() -> None:
    owner = OwnerLink(lambda: False)
    for incarnation in range(2):
        owner.on_ready(make_ready(incarnation))
        (admission,) = owner.messages
        assert admission.payload[2] == "admit_clients"
        owner.messages.clear()
        owner.on_death(CoreDeath("crash", "", ()))


def test_a_core_is_needed_for_requests_of_others() -> None:
    busy = True
    owner = OwnerLink(lambda: busy)
    assert owner.is_needed
    busy = False
    assert not owner.is_needed


def test_past_the_last_core_nobody_is_tried() -> None:
    owner = OwnerLink(lambda: False)
    owner.on_report = [].append
    owner.on_ready(make_ready(0))
    owner.on_death(CoreDeath("crash", "", ()))
    owner.on_gone("no core any more")
    owner.try_suspects([Suspect(make_request("a"), 0, 0)])
    assert owner.num_live_requests == 0
    assert not owner.deliveries


@pytest.mark.fresh
@pytest.mark.parametrize("seed", seeds(30))
def test_poisons_among_innocents_of_several_clients(seed: int) -> None:
    """Any crowd, any order, answers to reports early or late: each poison costs at most two deaths."""
    rng = random.Random(seed)
    fleet = Fleet(rng.randint(1, 4), max_num_seqs=rng.randint(1, 12))
    requests = []
    fleet.start_core()
    for i in range(rng.randint(1, 24)):
        num_tokens = rng.randint(1, 8)
        deadly_at = rng.randrange(num_tokens) if rng.random() < 0.15 else None
        requests.append(make_request(f"r{i}", num_tokens, deadly_at))
        fleet.add(rng.randint(1, len(fleet.members)), requests[-1])
        for _ in range(rng.randint(0, 3)):
            if fleet.core is None:
                fleet.start_core()
            if rng.random() < 0.7:
                fleet.answer_reports()
            fleet.step()
    fleet.run()
    assert fleet.num_cores - 1 <= 2 * sum(map(is_poison, requests))
    check(fleet, requests)


@pytest.mark.fresh
@pytest.mark.parametrize("seed", seeds(10))
def test_kills_without_end_and_no_token_of_any_client_lost(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(3, max_num_seqs=64)
    requests = [make_request(f"r{i}", rng.randint(1, 12)) for i in range(64)]
    for request in requests:
        fleet.add(rng.randint(1, 3), request)
    while fleet.num_live:
        fleet.start_core()
        if rng.random() < 0.8:
            fleet.answer_reports()
        for _ in range(rng.randint(0, 3)):
            fleet.step()
        fleet.die("killed")
        fleet.answer_reports()
        fleet.start_core()
        fleet.step()
        fleet.die("killed")
    check(fleet, requests)

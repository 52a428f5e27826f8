"""An `EngineSet` over cores without processes, and what its user was given."""

from __future__ import annotations

from typing import Any

from quire.frontend.client.control_calls import Answer
from quire.frontend.client.engine_set import EngineSet
from quire.frontend.client.link import EngineLink, LinkState
from quire.frontend.supervision.quarantine import CoreDeath, DeathCause
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType

from .model_core import ModelCore, Receiver, make_ready


class SetDriver(Receiver):
    """Engines that die, drain, come and go. Every delivery is checked: nothing after an end, nothing of an aborted
    request."""

    def __init__(self, size: int = 2, max_num_seqs: int = 3, **fields: Any) -> None:
        super().__init__()
        self.now = 0.0
        self.set = EngineSet([EngineLink() for _ in range(size)], clock=lambda: self.now, **fields)
        self.max_num_seqs = max_num_seqs
        self.cores: dict[int, ModelCore] = {}
        """Cores that run."""
        self.num_cores = dict.fromkeys(range(size), 0)
        """Cores that were started, by engine."""
        self.late: list[EngineCoreOutputs] = []
        """Messages of dead cores, and of engines that were removed, that have not arrived."""
        self.answers: list[Answer] = []
        self.away: set[int] = set()
        """Engines on machines that are out of reach."""
        self.numerics: dict[int, str] = {}
        """`numerics_id` of each engine, where that matters."""

    # -- engines ------------------------------------------------------------------------------------------------------

    @property
    def startable(self) -> list[int]:
        """Engines that another core may be started for."""
        links = self.set.links.items()
        return [i for i, link in links if i not in self.cores and link.state is not LinkState.GONE]

    def start(self, index: int) -> ModelCore:
        core = self.cores[index] = ModelCore(self.num_cores[index], self.max_num_seqs, engine_index=index)
        self.num_cores[index] += 1
        self.connect(index)
        return core

    def connect(self, index: int) -> None:
        """The ready frame of a core arrives."""
        core, numerics = self.cores[index], self.numerics.get(index, "")
        ready = make_ready(core.incarnation, core.num_sent + 1, engine_index=index, numerics_id=numerics)
        self.set.on_ready(index, ready)
        self.settle()

    def lose(self, index: int) -> None:
        """The machine of an engine is out of reach: its core lives on."""
        self.away.add(index)
        self.set.lose(index, "is out of reach")
        self.settle()

    def regain(self, index: int) -> None:
        self.away.discard(index)
        self.set.regain(index)
        self.settle()

    def start_all(self) -> None:
        for index in self.startable:
            self.start(index)

    def die(self, index: int, cause: DeathCause = "killed") -> None:
        """Ends a core. What it has sent may arrive later."""
        core = self.cores.pop(index)
        self.late += core.outbox
        self.set.on_death(index, core.death(cause))
        self.settle()

    def give_up(self, index: int) -> None:
        """The engine is gone for good."""
        if index in self.cores:
            self.die(index)
        self.set.on_gone(index, "the budget of restarts is used up")
        self.settle()

    def grow(self) -> int:
        index = max(self.num_cores) + 1
        self.num_cores[index] = 0
        self.set.add_engine(index, EngineLink())
        self.settle()
        return index

    def shrink(self, index: int) -> None:
        self.set.remove_engine(index)
        self.settle()
        if (core := self.cores.pop(index, None)) is not None:
            core.take_in()
            core.step()  # it has not ended yet
            self.late += core.outbox

    def step(self, index: int) -> None:
        """A step whose outputs arrive."""
        core = self.cores[index]
        core.step()
        self.deliver(index, len(core.outbox))
        if core.is_dead:
            self.die(index, "crash")

    def deliver(self, index: int, count: int = 1) -> None:
        """The oldest messages of an engine arrive."""
        for _ in range(min(count, len(self.cores[index].outbox))):
            self.set.on_outputs(self.cores[index].outbox.pop(0))
            self.settle()

    def deliver_late(self, count: int = 1) -> None:
        for _ in range(min(count, len(self.late))):
            self.set.on_outputs(self.late.pop(0))
            self.settle()

    def settle(self) -> None:
        """Carries what the set produces to where it belongs."""
        messages, self.set.messages = self.set.messages, []
        greeting = []
        for index, message in messages:
            if index in self.cores:
                if message.type is EngineCoreRequestType.GREET:
                    self.late += self.cores[index].greet()
                    greeting.append(index)
                else:
                    self.cores[index].inbox.append(message)
        deliveries, self.set.deliveries = self.set.deliveries, []
        for outputs in deliveries:
            assert not (outputs.sequence and outputs.engine_index in self.away), "of a core that was given up"
            for output in outputs.outputs:
                self.note(output)
        self.answers += self.set.answers
        self.set.answers.clear()
        links = self.set.links.values()
        live = self.delivered.keys() - self.ends.keys()
        assert self.set.num_live_requests == len(live)
        assert all(sum(link.has_request(name) for link in links) == 1 for name in live)
        for index in greeting:
            self.connect(index)

    # -- the user -----------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> int:
        """Returns the engine it is at."""
        self.expect(request.request_id)
        self.set.add_request(request)
        index = self.set.engine_of(request.request_id)
        self.settle()
        return -1 if index is None else index

    def abort(self, request_id: str) -> None:
        self.set.abort_requests([request_id])
        if request_id not in self.ends:
            del self.delivered[request_id]
        self.settle()

    def run(self, max_turns: int = 2000) -> None:
        """Runs all engines until every request has ended; those that die are started again."""
        for _ in range(max_turns):
            if not self.set.num_live_requests:
                return
            for index in list(self.away):
                self.regain(index)
            self.start_all()
            for index in list(self.cores):
                if index in self.cores:
                    self.step(index)
        raise AssertionError(f"requests are stuck: {self.delivered.keys() - self.ends.keys()}")


def death(cause: DeathCause) -> CoreDeath:
    return CoreDeath(cause, f"died of a {cause}")

"""A core without a process, for tests of the link: it handles its messages, and it dies on command."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from quire.frontend.client.link import EngineLink, Message
from quire.frontend.supervision.quarantine import CoreDeath, DeathCause
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from quire.wire.stats import PrefillStats

ADD, ABORT, UTILITY = EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.UTILITY


def make_request(
    name: str, num_tokens: int = 4, deadly_at: int | None = None, *, prompt: list[int] | None = None, **fields: Any
) -> EngineCoreRequest:
    """A request for `num_tokens` tokens. One that is `deadly_at` a token kills the core that computes this one."""
    prompt = [*(prompt or name.encode()), 0 if deadly_at is None else deadly_at + 1]
    return EngineCoreRequest(name, prompt, SamplingParams(max_tokens=num_tokens), None, 0.0, **fields)


def expected_tokens(request: EngineCoreRequest) -> list[int]:
    """The one correct output: a function of the prompt and the position."""
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens is not None
    return [token_at(request.prompt_token_ids or [], i) for i in range(request.sampling_params.max_tokens)]


def token_at(prompt: Sequence[int], index: int) -> int:
    return hashlib.sha256(f"{list(prompt)} {index}".encode()).digest()[0]


def make_ready(
    incarnation: int = 0, next_sequence: int = 1, engine_index: int = 0, numerics_id: str = ""
) -> EngineCoreReadyResponse:
    return EngineCoreReadyResponse(
        *(64, 8, 16, 128, 2.0, ("generate",)),
        engine_index=engine_index,
        incarnation=incarnation,
        next_sequence=next_sequence,
        numerics_id=numerics_id,
    )


class ModelCore:
    """One incarnation. `step` takes in everything it was sent and computes a token of each of its first `max_num_seqs`
    requests; what it sends waits in `outbox`."""

    def __init__(self, incarnation: int, max_num_seqs: int = 3, engine_index: int = 0) -> None:
        self.incarnation = incarnation
        self.engine_index = engine_index
        self.max_num_seqs = max_num_seqs
        self.inbox: list[Message] = []
        self.outbox: list[EngineCoreOutputs] = []
        self.requests: dict[str, tuple[EngineCoreRequest, list[int]]] = {}
        self.step_members: tuple[str, ...] = ()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.is_dead = False
        self.num_sent = 0

    def send(self, **fields: Any) -> None:
        self.num_sent += 1
        stamps = {"engine_index": self.engine_index, "incarnation": self.incarnation, "sequence": self.num_sent}
        self.outbox.append(EngineCoreOutputs(**stamps, **fields))

    def take_in(self) -> None:
        for message in self.inbox:
            if message.type is ADD:
                request: EngineCoreRequest = message.payload
                assert request.request_id not in self.requests, "sent twice"
                self.requests[request.request_id] = request, list(request.output_token_ids)
            elif message.type is ABORT:
                for request_id in message.payload:
                    self.requests.pop(request_id, None)
            else:
                _, call_id, method, args = message.payload
                self.calls.append((method, args))
                self.send(utility_output=UtilityOutput(call_id, result=method))
        self.inbox.clear()

    def greet(self) -> list[EngineCoreOutputs]:
        """Begins again, as its client wants. Returns what it has sent, which may arrive yet."""
        self.inbox.clear()
        self.requests.clear()
        sent, self.outbox = self.outbox, []
        return sent

    def step(self) -> None:
        """May end with `is_dead`: then nothing of this step was sent."""
        self.take_in()
        members = list(self.requests.items())[: self.max_num_seqs]
        self.step_members = tuple(request_id for request_id, _ in members)
        if any((request.prompt_token_ids or [0])[-1] == len(tokens) + 1 for _, (request, tokens) in members):
            self.is_dead = True
            return
        outputs = [self._advance(*entry) for _, entry in members]
        if outputs:
            self.send(outputs=outputs)

    def _advance(self, request: EngineCoreRequest, tokens: list[int]) -> EngineCoreOutput:
        assert request.sampling_params is not None
        tokens.append(token_at(request.prompt_token_ids or [], len(tokens)))
        is_last = len(tokens) == request.sampling_params.max_tokens
        if is_last:
            del self.requests[request.request_id]
        return EngineCoreOutput(
            request.request_id,
            tokens[-1:],
            finish_reason=FinishReason.LENGTH if is_last else None,
            # With the first output of every core: only the first of all may be handed on.
            prefill_stats=PrefillStats(1, 1) if len(tokens) == len(request.output_token_ids) + 1 else None,
        )

    def death(self, cause: DeathCause) -> CoreDeath:
        return CoreDeath(cause, f"died of a {cause}", self.step_members)


class Receiver:
    """Record of what the user of a link, or of a set of links, was given."""

    def __init__(self) -> None:
        self.delivered: dict[str, list[int]] = {}
        self.ends: dict[str, EngineCoreOutput] = {}
        self.num_prefill_stats: dict[str, int] = {}

    def expect(self, request_id: str) -> None:
        """From now on the request may have outputs."""
        self.delivered[request_id] = []
        self.num_prefill_stats[request_id] = 0

    def note(self, output: EngineCoreOutput) -> None:
        request_id = output.request_id
        assert request_id in self.delivered, f"{request_id} was aborted, or never added"
        assert request_id not in self.ends, f"{request_id} had ended"
        self.delivered[request_id] += output.new_token_ids
        self.num_prefill_stats[request_id] += output.prefill_stats is not None
        if output.finish_reason is not None:
            self.ends[request_id] = output


class Driver(Receiver):
    """An `EngineLink` with a `ModelCore`, and what the link's user was given."""

    def __init__(self, max_num_seqs: int = 3) -> None:
        super().__init__()
        self.link = EngineLink()
        self.max_num_seqs = max_num_seqs
        self.core: ModelCore | None = None
        self.num_cores = 0

    def start_core(self) -> None:
        self.core = ModelCore(self.num_cores, self.max_num_seqs)
        self.num_cores += 1
        self.link.on_ready(make_ready(self.core.incarnation))
        self.settle()

    def settle(self) -> None:
        """Carry what the link says to where it belongs, and check it."""
        messages, self.link.messages = self.link.messages, []
        if self.core is not None:
            self.core.inbox += messages
        deliveries, self.link.deliveries = self.link.deliveries, []
        for outputs in deliveries:
            for output in outputs.outputs:
                self.note(output)

    def add(self, request: EngineCoreRequest) -> None:
        self.expect(request.request_id)
        self.link.add_request(request)
        self.settle()

    def abort(self, request_id: str) -> None:
        self.link.abort_requests([request_id])
        self.settle()
        if request_id not in self.ends:
            del self.delivered[request_id]

    def deliver(self) -> None:
        """The oldest message of the core arrives."""
        assert self.core is not None
        if self.core.outbox:
            self.link.on_outputs(self.core.outbox.pop(0))
            self.settle()

    def step(self) -> None:
        """A step whose outputs arrive."""
        assert self.core is not None
        self.core.step()
        while self.core is not None and self.core.outbox:
            self.deliver()
        if self.core is not None and self.core.is_dead:
            self.die("crash")

    def die(self, cause: DeathCause) -> None:
        assert self.core is not None
        core, self.core = self.core, None
        self.link.on_death(core.death(cause))
        self.settle()

    def run(self, max_turns: int = 10_000) -> None:
        """Runs steps until every request has ended, restarting cores that die."""
        for _ in range(max_turns):
            if not self.link.num_live_requests:
                return
            if self.core is None:
                self.start_core()
            self.step()
        raise AssertionError(f"requests are stuck: {self.delivered.keys() - self.ends.keys()}")

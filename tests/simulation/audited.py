"""A simulation with a frontend.

Outputs pass through the real link, output processor and statistics. After every operation the metrics are scraped and
compared with the laws of promise P12, and with the simulation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from quire.config.engine import EngineConfig
from quire.errors import ValidationError
from quire.frontend.client.link import EngineLink
from quire.frontend.drafts import DraftCounts
from quire.frontend.metrics.collect.ledger import RequestLedger
from quire.frontend.metrics.frontend_stats import FrontendStats
from quire.frontend.output_processor import OutputProcessor, OutputProcessorOutput
from quire.frontend.session import SessionInput
from quire.frontend.supervision.quarantine import CoreDeath
from quire.testing.metrics_audit import MetricsAudit
from quire.wire.engine_core import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
)
from quire.wire.stats import PrefillStats
from tests.simulation.harness import Client, Operation, Simulation
from tests.simulation.world import World

KILLED = CoreDeath("killed", "was killed by SIGKILL")


class Clock:
    """Seconds of the core and of the wall at once; an operation takes some."""

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self._rng = random.Random(seed)

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        """Time passes, in powers of two: sums are exact."""
        self.now += self._rng.choice((0.125, 0.25, 1.0, 8.0))


class Frontend:
    """One frontend without sockets and loop, which keeps the books.

    The simulation itself sends requests to the core; the link is asked what it would have sent, and what it delivers of
    an output.
    """

    def __init__(self, config: EngineConfig, ready: EngineCoreReadyResponse, clock: Clock) -> None:
        self._clock = clock
        self._ready = ready
        self._link = EngineLink()
        self.ledger = RequestLedger()
        drafting = config.speculative_config.drafting
        self._processor = OutputProcessor(
            None,
            log_stats=True,
            ledger=self.ledger,
            max_model_len=ready.max_model_len,
            drafts=None if drafting is None else DraftCounts(drafting.num_speculative_tokens),
        )
        self._stats = FrontendStats(
            config, ready, self._processor, ledger=self.ledger, log_stats=True, wall_clock=clock
        )
        self._stats.attach(self)
        self.restarts: Counter[str] = Counter()
        self.num_finished = self.num_tokens = 0
        """Requests that have ended in any way, and tokens that were received. A session is one request."""
        self.sent: list[EngineCoreRequest] = []
        """Further requests of sessions, since they were last looked at."""
        self.audit = MetricsAudit()
        self._link.on_ready(ready)

    @property
    def counts(self) -> Counter[str]:
        """Counters in the form that clients of a core have."""
        return self._link.counts

    @property
    def is_ready(self) -> bool:
        """A simulated core is always there."""
        return True

    @property
    def num_engines_up(self) -> int:
        """There is one, and it is up."""
        return 1

    def _now(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Simulated requests arrive at times of their own, which are for the order only."""
        return msgspec.structs.replace(request, arrival_time=self._clock.now)

    def knows(self, request_id: str) -> bool:
        """Returns whether a request is live here."""
        return request_id in self._processor.request_states

    def add(self, client: Client) -> None:
        """A new request, some of whose outputs may have come from a core that has died since."""
        self.ledger.receive().accept_one()
        request = self._now(client.request)
        self._processor.add_request(request, None)
        self._link.add_request(request)
        if client.received:
            self.hear(_first_output(client, self._clock.now))
            self.restart("lost")

    def add_input(self, session_id: str, new: SessionInput) -> None:
        """The next input of a session."""
        stats = self._stats.open_iteration()
        self._take(self._processor.add_input(session_id, new._replace(arrival_time=self._clock.now), stats))
        self._stats.close_iteration(stats)

    def _take(self, processed: OutputProcessorOutput) -> None:
        assert not processed.reqs_to_abort
        self.num_finished += sum(output.finished for output in processed.request_outputs)
        for request in processed.reqs_to_add:
            self.sent.append(request)
            self._link.add_request(request)

    def refuse(self) -> None:
        """A request that was not accepted."""
        self.ledger.receive().reject(ValidationError("no"))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Their users leave."""
        stats = self._stats.open_iteration()
        aborted = self._processor.abort_requests(request_ids, internal=True, iteration_stats=stats)
        self._link.abort_requests(aborted)
        if aborted:
            self._stats.close_iteration(stats)
        self.num_finished += len(aborted)

    def hear(self, outputs: EngineCoreOutputs) -> None:
        """Processes one message of the core."""
        ready = self._link.ready_response
        assert ready is not None
        outputs.incarnation = ready.incarnation
        self._link.on_outputs(outputs)
        for delivery in self._link.deliveries:
            batch = self._stats.open_iteration() if delivery.outputs else None
            processed = self._processor.process_outputs(delivery.outputs, delivery.timestamp, batch)
            self._stats.close_batch(delivery, batch)
            self._take(processed)
            self.num_tokens += sum(len(output.new_token_ids) for output in delivery.outputs)
        self._link.deliveries.clear()

    def restart(self, cause: str = "killed") -> list[EngineCoreRequest]:
        """The core has died, and another one is there: what the link sends to it."""
        self.restarts[cause] += 1
        self._link.on_death(KILLED)
        self._link.messages.clear()
        self._link.on_ready(replace(self._ready, incarnation=self.restarts.total()))
        return [m.payload for m in self._link.messages if m.type is EngineCoreRequestType.ADD]

    def check(self, num_live: int) -> None:
        """Scrape; `num_live` requests are known to live."""
        metrics = self._stats.metrics
        assert metrics is not None
        snapshot = metrics.snapshot()
        if num_live or self.restarts:  # a core that dies has drafts in its books that it has not reported
            self.audit.check(snapshot)
        else:
            self.audit.check_at_rest(snapshot)
        seen = {
            "live requests": snapshot.value("quire_requests_live"),
            "finished requests": snapshot.value("vllm:request_success"),
            "tokens": snapshot.value("vllm:generation_tokens"),
            "restarts": snapshot.value("quire_engine_restarts"),
            "late tokens": self.ledger.num_late_tokens,
            "requests in admission": snapshot.value("quire_requests_in_admission"),
        }
        right = {
            "live requests": num_live,
            "finished requests": self.num_finished,
            "tokens": self.num_tokens,
            "restarts": self.restarts.total(),
            "late tokens": 0,
            "requests in admission": 0,
        }
        if not num_live:
            seen["tokens of ended requests"] = snapshot.value("vllm:request_generation_tokens")
            right["tokens of ended requests"] = self.num_tokens
        assert seen == right, f"the metrics say {seen}, and {right} is right"


def _first_output(client: Client, now: float) -> EngineCoreOutputs:
    """Returns the output that a core had sent of a request before it died."""
    request, num_prompt = client.request, len(client.request.prompt_token_ids or ())
    events = [EngineCoreEvent(kind, now) for kind in (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)]
    output = EngineCoreOutput(
        request.request_id,
        list(client.received),
        events=events,
        prefill_stats=PrefillStats(num_prompt, num_prompt),
    )
    return EngineCoreOutputs(outputs=[output], timestamp=now)


class AuditedSimulation(Simulation):
    """Every operation is followed by a scrape."""

    def __init__(self, world: World, log: Callable[[str], None] | None = None, *, seed: int = 0) -> None:
        self.clock = Clock(seed)
        self._sent: list[tuple[str, list[int], list[int]]] = []
        """Since the last restart."""
        self._begun: list[tuple[str, list[int], list[int]]] = []
        """Further requests of sessions in this operation."""
        super().__init__(world, log)
        self.frontend = Frontend(world.config, self.core.ready_response, self.clock)

    def _start_engine(self) -> None:
        super()._start_engine()
        self.core.scheduler.clock = self.clock

    def apply(self, operation: Operation) -> None:
        self.clock.tick()
        super().apply(operation)
        self.frontend.check(len(self.live) + len(self.resting))
        begun, self._begun = self._begun, []
        sent, self.frontend.sent = [_gist(request) for request in self.frontend.sent], []
        assert sent == begun, f"of sessions the frontend sends {sent}, and {begun} is right"
        self.seen["scrapes"] += 1

    def _submit(self, client: Client, in_step: bool = False) -> None:
        if not self.frontend.knows(client.request.request_id):
            self.frontend.add(client)
        super()._submit(client, in_step)

    def _begin_segment(self, client: Client, in_step: bool) -> None:
        num_sent = len(self._sent)
        super()._begin_segment(client, in_step)
        self._begun += self._sent[num_sent:]

    def _add_input(self, client: Client, new: SessionInput) -> None:
        self.frontend.add_input(client.request.request_id, new)
        super()._add_input(client, new)

    def _refused(self, number: int) -> None:
        self.frontend.refuse()
        super()._refused(number)

    def _forget(self, request_ids: list[str]) -> None:
        self.frontend.abort(
            [i for i in request_ids if i in self.resting or (i in self.live and not self.live[i].is_over)]
        )
        super()._forget(request_ids)

    def _hear_all(self, outputs: dict[int, EngineCoreOutputs] | None, *, is_fresh: bool = True) -> None:
        super()._hear_all(outputs, is_fresh=is_fresh)
        for client_outputs in (outputs or {}).values():
            self.frontend.hear(client_outputs)

    def _step(self, number: int) -> None:
        self.clock.tick()
        super()._step(number)

    def _send(self, request: EngineCoreRequest) -> None:
        self._sent.append(_gist(request))
        super()._send(request)

    def _crash(self, number: int) -> None:
        """Compares what the link would send to the next core with what the simulation sends.

        A client that was cut off and has not received its end gives up.
        """
        self.clock.tick()
        self.frontend.abort([i for i, client in self.live.items() if client.is_cut_off])
        self._sent.clear()
        super()._crash(number)
        resent = [_gist(request) for request in self.frontend.restart()]
        assert resent == self._sent, f"the link would send {resent}, and {self._sent} is what the next core needs"


def _gist(request: EngineCoreRequest) -> tuple[str, list[int], list[int]]:
    return request.request_id, list(request.prompt_token_ids or ()), list(request.output_token_ids)

"""The simulation: a real EngineCore, driven by random operations, checked after each of them.

A `Client` is a request from outside: its parameters, the one right answer, and the outputs received so far.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import msgspec
import pytest

from quire.engine import core
from quire.engine.lora.registry import Revision
from quire.engine.sched.interface import PauseState
from quire.errors import ClientError, QuireError, ValidationError
from quire.frontend.session import SessionInput
from quire.sampling_params import SamplingParams
from quire.testing.fake_hardware import fake_invocation
from quire.testing.fake_model import ExpectedOutput, expected_output
from quire.wire.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, PauseMode
from quire.wire.lora import NEVER, AdapterInfo
from tests.simulation.adapters import Adapters
from tests.simulation.invariants import Invariants
from tests.simulation.tier import Tier
from tests.simulation.world import SimulatedExecutor, WorkerFault, World, draw_input, draw_request

MAX_LIVE_REQUESTS = 14
Operation = tuple[str, int]


End = tuple[FinishReason | None, int | str | None]
"""A finish reason and a stop reason."""


@dataclass
class Client:
    """A request and its client's view of it.

    `received` holds all outputs received, also before a crash. `admitted_with` is the number of tokens that were in the
    cache when the request was first admitted by this engine, None before that.

    A session is a client whose `request` and `expected` are those of its present segment: to the engine an ordinary
    request, which has the id of the one before it.
    """

    request: EngineCoreRequest
    expected: ExpectedOutput
    received: list[int] = field(default_factory=list)
    admitted_with: int | None = None
    is_cut_off: bool = False
    """The engine ended it on its own account; its end is still to be received."""
    inputs: deque[SessionInput] = field(default_factory=deque)
    """Inputs of a session that have not begun."""
    digest: str = ""
    """Digest of the adapter's files that `expected` follows from."""
    revision: Revision | None = None
    """Revision that it is bound to, if its adapter had been loaded before it came."""

    @property
    def is_complete(self) -> bool:
        """True if all outputs have been received."""
        return len(self.received) == len(self.expected.token_ids)

    @property
    def is_over(self) -> bool:
        """True if the engine is done with it, though its end was not received: cut off, or complete before a
        restart."""
        return self.is_cut_off or self.is_complete

    @property
    def takes_input(self) -> bool:
        """A session whose last input has not been sent."""
        return not self.is_cut_off and (not self.inputs[-1].is_last if self.inputs else self.request.resumable)

    @property
    def skips_cache(self) -> bool:
        """True if it must not look anything up in the prefix cache."""
        return bool(self.request.params.skip_reading_prefix_cache)


class SimulationError(AssertionError):
    """Something promised did not hold; `operation` is the index of the operation that showed it."""

    def __init__(self, seed: int, operation: int, cause: BaseException) -> None:
        super().__init__(seed, operation, cause)  # all of it, so that it crosses processes
        self.seed = seed
        self.operation = operation
        self.cause = cause

    def __str__(self) -> str:
        return f"seed {self.seed}, operation {self.operation}: {type(self.cause).__name__}: {self.cause}"


class Simulation:
    """One engine and its clients. `log` is called with a line per event; `seen` counts situations."""

    def __init__(self, world: World, log: Callable[[str], None] | None = None) -> None:
        self.world = world
        self.log = log
        self.live: dict[str, Client] = {}
        self.resting: dict[str, Client] = {}
        """Sessions that wait for input: the engine knows nothing of them."""
        self._answered: list[Client] = []
        """Sessions that have just received the end of an answer."""
        self.seen: Counter[str] = Counter()
        self._history: list[list[int]] = []
        self._num_added = self._num_inputs = 0
        self.weights = ""
        """The checkpoint of the last update."""
        self.adapters = Adapters(self)
        self.tier = Tier(self)
        self._start_engine()

    def _start_engine(self) -> None:
        # An engine collects garbage once, at its start. Here thousands start: that would be most of the time.
        with patch.object(core, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None)):
            self.core = core.EngineCore(self.world.config, self.world.executor_class, True, wake=self.adapters.wake)
        executor = self.core.executor
        assert isinstance(executor, SimulatedExecutor)
        self.executor = executor
        self.model = executor.model
        """The one that answers are expected of."""
        self.invariants = Invariants(self)
        executor.on_step = self.invariants.scheduled
        self.adapters.begin_engine()
        self.tier.begin_engine()

    def close(self) -> None:
        """The engine goes away."""
        self.core.shutdown()

    def apply(self, operation: Operation) -> None:
        """Do one operation and check everything that must hold after it."""
        kind, number = operation
        self.seen[kind] += 1
        if self.log is not None:
            self.log(f"{kind} {number}")
        getattr(self, f"_{kind}")(number)
        self.invariants.check()

    # -- requests -----------------------------------------------------------------------------------------------

    def _add(self, number: int) -> None:
        if len(self.live) >= MAX_LIVE_REQUESTS:
            return self._step(number)
        rng = random.Random(number)
        max_model_len = self.core.ready_response.max_model_len
        request_id = f"r{self._num_added}"
        request = draw_request(rng, self.world, request_id, self._num_added, max_model_len, self._history)
        client = self._make_client(request)
        expected = client.expected
        if rng.random() < 0.1:  # began before a restart that this engine knows nothing of
            if self.world.adapter_share and request.lora_request is not None:
                client.digest = rng.choice(self.adapters.list_contents(request.lora_request))
                client.expected = expected = self._expect(request, [], client.digest)
            client.received = expected.token_ids[: rng.randint(0, len(expected.token_ids))]
        self._num_added += 1
        self._note_text(client)
        return self._submit(client)

    def _make_client(self, request: EngineCoreRequest, **fields: Any) -> Client:
        digest = self.adapters.digest_for(request.lora_request)
        return Client(request, self._expect(request, [], digest), digest=digest, **fields)

    def _note_text(self, client: Client) -> None:
        """Later prompts may begin like this one and its answer."""
        text = (client.request.prompt_token_ids or []) + client.expected.token_ids
        self._history = [*self._history[-15:], text]

    def _submit(self, client: Client, in_step: bool = False) -> None:
        self.live[client.request.request_id] = client
        self.invariants.added(client.request.request_id, in_step)
        lora, received = client.request.lora_request, list(client.received)
        if lora is not None and not received:  # it may have been sent to another engine before
            client.digest = self.adapters.digest_for(lora)
            client.revision = self.adapters.find_loaded(lora)
            client.expected = self._expect(client.request, [], client.digest)
        began = self.adapters.began(client)
        try:
            self._send(msgspec.structs.replace(client.request, output_token_ids=received, adapter=began))
        except QuireError as e:
            if not self.adapters.is_legitimate_failure(client, type(e).__name__):
                raise
            self.seen["requests refused for their adapter"] += 1
            del self.live[client.request.request_id]

    def _send(self, request: EngineCoreRequest) -> None:
        if self.log is not None:
            self.log(f"    {msgspec.to_builtins(request)}")
        self.core.add_request(*self.core.preprocess_add_request(request))

    def _feed(self, number: int) -> None:
        """The next input of a session, whether it rests or is being answered."""
        clients = [client for client in [*self.live.values(), *self.resting.values()] if client.takes_input]
        if not clients:
            return self._step(number)
        rng = random.Random(number)
        client = rng.choice(clients)
        self._num_inputs += 1
        arrival_time = self._num_added // 2 + 0.5 + self._num_inputs / (1 << 20)
        self._add_input(client, draw_input(rng, self.world, client.request, arrival_time))
        return None

    def _add_input(self, client: Client, new: SessionInput) -> None:
        client.inputs.append(new)
        if client.request.request_id in self.resting:
            self._begin_segment(client, in_step=False)

    def _go_on(self, client: Client) -> None:
        """An answer to a session is complete: begin with the next input, or wait for one."""
        self.seen["segments"] += 1
        if client.inputs:
            self._begin_segment(client, in_step=True)
        elif client.takes_input:
            self.resting[client.request.request_id] = client

    def _begin_segment(self, client: Client, in_step: bool) -> None:
        before, new = client.request, client.inputs.popleft()
        self.resting.pop(before.request_id, None)
        if not new.token_ids:
            self.seen["sessions closed"] += 1
            return
        kept = (before.prompt_token_ids or []) + client.expected.token_ids[:-1]  # the last one was never computed
        request = msgspec.structs.replace(
            before,
            prompt_token_ids=kept + new.token_ids,
            sampling_params=new.sampling_params,
            arrival_time=new.arrival_time,
            resumable=not new.is_last,
        )
        if len(request.prompt_token_ids or ()) >= self.core.ready_response.max_model_len:
            self.seen["sessions without room"] += 1
            return
        following = self._make_client(request, inputs=client.inputs)
        self._note_text(following)
        self._submit(following, in_step)

    def _refused(self, number: int) -> None:
        """A request that cannot be accepted leaves no trace: its id is in use, or the context has no room for it."""
        used = [request_id for request_id, client in self.live.items() if not client.is_over]
        request_id = used[number % len(used)] if used and number % 2 else "too-long"
        prompt = [1] * (1 if request_id != "too-long" else self.core.ready_response.max_model_len)
        request = EngineCoreRequest(request_id, prompt, SamplingParams(), None, 0.0)
        with pytest.raises(ValidationError):
            self.core.add_request(*self.core.preprocess_add_request(request))

    def _choose(self, number: int) -> list[str]:
        """One live request, or sometimes several, or one that does not exist."""
        ids = [*self.live, *self.resting]
        if not ids or number % 23 == 0:
            return ["unknown"]
        return ids[:: 1 + number % 3] if number % 11 == 0 else [ids[number % len(ids)]]

    def _abort(self, number: int) -> None:
        chosen = self._choose(number)
        with self.invariants.free_order(chosen):
            self.core.abort_requests(chosen)
        self._forget(chosen)

    def _abort_in_flight(self, number: int) -> None:
        """The abort arrives while a step is being computed: not even that step's token may be delivered."""
        chosen = self._choose(number)
        self.core.aborts_queue.put_nowait(chosen)
        self.seen["aborted in flight"] += any(r.request_id in chosen for r in self.core.scheduler.running)
        self._forget(chosen)
        self._step(number)
        # There may have been no step to do; a second abort does nothing, but to a session that has gone on by its id.
        self.core.abort_requests([request_id for request_id in chosen if request_id not in self.live])

    def _forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.resting.pop(request_id, None)
            if request_id in self.live and not self.live[request_id].is_over:
                del self.live[request_id]

    # -- steps --------------------------------------------------------------------------------------------------

    def _step(self, number: int) -> None:
        self.adapters.pass_time()
        self.tier.pass_time()
        if self.core.is_blocked():
            self.seen["blocked by transfers" if self.tier.num_under_way else "blocked by adapters"] += 1
            is_awaited = self.executor.adapters.num_under_way or self.tier.num_under_way
            assert is_awaited, "the core waits, and nothing will wake it"
            return None
        self.invariants.scheduling()
        try:
            outputs, executed = self.core.step_fn()
        except WorkerFault:
            self.seen["failed steps"] += 1
            self.executor.recover()
            return self.invariants.lost_steps()
        self.core.post_step(executed)
        return self._hear_all(outputs)

    def _hear_all(self, outputs: dict[int, EngineCoreOutputs] | None, *, is_fresh: bool = True) -> None:
        """Give the outputs of a step to the clients; it is fresh if nothing has happened since it ended."""
        for client_index, client_outputs in (outputs or {}).items():
            for output in client_outputs.outputs:
                client = self.live.get(output.request_id)
                if client is None and output.error_type and (self.world.adapter_share or self.world.has_tier):
                    continue  # aborted after its adapter, or a block, could not be had, before its end was sent
                assert client is not None, f"an output for {output.request_id}, which is not live: {output}"
                assert client.request.client_index == client_index, f"{output.request_id} was sent to {client_index}"
                self._hear(client, output)
        for client_outputs in (outputs or {}).values():
            self.invariants.heard_stats(client_outputs.scheduler_stats, is_fresh=is_fresh)
        answered, self._answered = self._answered, []
        for client in answered:
            self._go_on(client)

    def _wait_for_steps(self, verb: Callable[[], object]) -> bool:
        """Call a control verb that waits for the steps in flight: their outputs come after it. False if one of them
        failed: then the verb has done nothing but, perhaps, pause."""
        self.seen["verbs with steps in flight"] += bool(self.core.batch_queue)
        try:
            verb()
            done = True
        except WorkerFault:
            self.seen["failed steps"] += 1
            self.executor.recover()
            self.invariants.lost_steps()
            done = False
        assert not self.core.batch_queue
        while self.core._undelivered:
            outputs, executed = self.core.step_fn()
            self.core.post_step(executed)
            self._hear_all(outputs, is_fresh=False)
        return done

    def _hear(self, client: Client, output: EngineCoreOutput) -> None:
        if self.log is not None:
            self.log(f"    {output.request_id}: {output.new_token_ids} {output.finish_reason or ''}")
        if output.adapter is not None:
            self.adapters.heard(client, output.adapter)
        if self.tier.takes_failure(output) or self.adapters.takes_failure(client, output):
            del self.live[output.request_id]
            return
        self.invariants.heard(client, output)
        expected, client.received = client.expected, client.received + output.new_token_ids
        heard = len(client.received)
        assert client.received == expected.token_ids[:heard], (
            f"{output.request_id} heard {client.received}, the right answer is {expected.token_ids}"
        )
        if not output.finished:
            assert heard < len(expected.token_ids), f"{output.request_id} should have ended: {client}"
            return
        del self.live[output.request_id]
        if client.is_cut_off:
            assert output.finish_reason is FinishReason.ABORT, f"not the end of a request that was cut off: {output}"
            return
        self._check_end(client, (output.finish_reason, output.stop_reason))
        self.seen[f"finished: {output.finish_reason}"] += 1
        if client.request.resumable or client.inputs:
            self._answered.append(client)

    def _check_end(self, client: Client, end: End) -> None:
        heard = (len(client.received), *end)
        right = (len(client.expected.token_ids), client.expected.finish_reason, client.expected.stop_reason)
        assert heard == right, f"{client.request.request_id} ended with {heard}, not {right}"

    # -- control ------------------------------------------------------------------------------------------------

    def _reset_prefix_cache(self, number: int) -> None:
        with_running = number % 2 == 0
        done = self.core.lifecycle.reset_prefix_cache(reset_running_requests=with_running)
        self.invariants.reset_prefix_cache(done, with_running)

    def _pause(self, number: int) -> None:
        if number % 4 == 0 and not self.core.lifecycle.is_sleeping():
            return self.core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        clear_cache = number % 8 < 4
        mode: PauseMode = "abort" if number % 4 == 1 else "keep"
        self._cut_off(mode)
        done = self._wait_for_steps(lambda: self.core.lifecycle.pause_scheduler(mode, clear_cache))
        if done and clear_cache:
            self.invariants.reset_prefix_cache(True, with_running=True)
        return None

    def _cut_off(self, mode: PauseMode) -> None:
        if mode == "abort":
            for client in self.live.values():
                client.is_cut_off = client.is_cut_off or not client.is_over

    def _sleep(self, number: int) -> None:
        """The executor drops requests and blocks at level 1: a request that continued with them would read zeros."""
        level, mode = number % 3, cast("PauseMode", ("abort", "keep", "keep", "keep")[number // 3 % 4])
        self._cut_off(mode)
        if not self._wait_for_steps(lambda: self.core.lifecycle.sleep(level, mode)):
            return
        assert self.core.lifecycle.is_sleeping()
        if level:
            self.invariants.reset_prefix_cache(True, with_running=True)
            assert self.executor.num_live_requests == 0
        if level == 2:
            self.adapters.slept()

    def _wake_up(self, number: int) -> None:
        tags = (None, ["weights"], ["kv_cache"], ["weights", "kv_cache"])[number % 4]
        awake = self.core.lifecycle.wake_up(tags)
        assert awake == (not self.core.lifecycle.is_sleeping())
        assert awake == (not self.core.lifecycle.is_scheduler_paused())

    def _resume(self, number: int) -> None:
        try:
            self.core.lifecycle.resume_scheduler()
        except ClientError:
            assert self.core.lifecycle.is_sleeping()
            self.core.lifecycle.wake_up()

    def _update_weights(self, number: int) -> None:
        """Changes the model: from the next token on every answer must be the new model's."""
        path = f"/checkpoint-{number % 3}"
        if not self._wait_for_steps(lambda: self.core.lifecycle.update_weights(path)):
            return
        self.weights, self.model = path, self.executor.model
        self.invariants.reset_prefix_cache(True, with_running=True)
        for client in self.live.values():
            self.seen["answers changed by weights"] += not client.is_over and bool(client.received)
            if not client.is_over:
                client.expected = self._expect(client.request, client.received, client.digest)

    def _expect(self, request: EngineCoreRequest, received: list[int], digest: str) -> ExpectedOutput:
        prompt, params = request.prompt_token_ids, request.sampling_params
        assert prompt is not None
        assert params is not None
        max_model_len = self.core.ready_response.max_model_len
        lora = request.lora_request
        start = 0 if lora is None else AdapterInfo(1, 1, "", 1, 1, fake_invocation(lora)).find_start(prompt)
        self.seen["adapters that begin inside a prompt"] += 0 < start < NEVER
        return expected_output(self.model, prompt, params, max_model_len, lora, received, digest, start)

    def _adapters(self, number: int) -> None:
        """Adapters are loaded, loaded again, removed, pinned, or change on the disk."""
        self.adapters.do(number)

    def _tier_fault(self, number: int) -> None:
        """The store outside the engine loses or changes something."""
        self.tier.fault(number)

    def _complete_load(self, number: int) -> None:
        """Transfers end."""
        self.tier.complete(number)

    def _fault(self, number: int) -> None:
        """A step fails in the worker, which lives on: what it computed is lost, no request is."""
        self.executor.fault = "sample" if number % 2 else "forward"
        if self.world.has_tier and number % 3 == 0:
            self.executor.fault = "before"
        self._step(number)

    def _crash(self, number: int) -> None:
        """Kills the engine, sometimes with the outputs of a step that no client received. Clients continue with a new
        one."""
        if number % 2:
            self.invariants.scheduling()
            with suppress(WorkerFault):
                self.core.step_fn()
        survivors, self.live = self.live, {}
        if number % 3:
            self.tier.kill()
        self.close()
        self._start_engine()
        if self.weights:  # a supervisor gives the weights to an engine that it starts again
            self.core.lifecycle.update_weights(self.weights)
            self.model = self.executor.model
        for client in survivors.values():
            client.admitted_with = None
            if not client.is_cut_off:
                self._submit(client)

    def _drain(self, number: int) -> None:
        """Nothing new arrives: everything must finish, within a number of steps known beforehand."""
        self.core.lifecycle.wake_up()
        self.tier.store.asks_again = False
        for client in [client for client in [*self.live.values(), *self.resting.values()] if client.takes_input]:
            self._add_input(client, SessionInput([], None, 0.0, is_last=True))
        limit = self.invariants.max_steps_to_finish()
        for _ in range(limit):
            if not self.core.has_work():  # a step in flight may yet fail
                break
            self._step(number)
            self.invariants.check()
        left = [*self.live, *self.resting]
        assert not left, f"after {limit} steps without new requests these are not finished: {left}"
        self.adapters.settle()
        self.tier.settle()
        self.invariants.check_idle()

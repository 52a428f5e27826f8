"""The simulation: a real EngineCore, driven by random operations, checked after each of them.

A `Client` is what the outside world knows of a request: what it asked, the one right answer, and what it has heard.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import pytest

from quire.engine import core
from quire.engine.sched.interface import PauseState
from quire.errors import ValidationError
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import ExpectedOutput, expected_output
from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason
from tests.simulation.invariants import Invariants
from tests.simulation.world import SimulatedExecutor, WorkerFault, World, draw_operations, draw_request

MAX_LIVE_REQUESTS = 14
Operation = tuple[str, int]


@dataclass
class Client:
    """`received` holds what was heard, before a crash included. `admitted_with` is the number of tokens that were in
    the cache when the request was first admitted by this engine, None before that."""

    request: EngineCoreRequest
    expected: ExpectedOutput
    received: list[int] = field(default_factory=list)
    admitted_with: int | None = None
    is_cut_off: bool = False
    """The engine ended it on its own account; the client will hear so."""

    @property
    def is_over(self) -> bool:
        """The engine is done with it, though the client has not heard: cut off, or complete before a restart."""
        return self.is_cut_off or len(self.received) == len(self.expected.token_ids)

    @property
    def skips_cache(self) -> bool:
        """Whether it must not look anything up in the prefix cache."""
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
        self.seen: Counter[str] = Counter()
        self._history: list[list[int]] = []
        self._num_added = 0
        self._start_engine()

    def _start_engine(self) -> None:
        # An engine collects garbage once, at its start. Here thousands start: that would be most of the time.
        with patch.object(core, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None)):
            self.core = core.EngineCore(self.world.config, self.world.executor_class, log_stats=True)
        executor = self.core.executor
        assert isinstance(executor, SimulatedExecutor)
        self.executor = executor
        self.invariants = Invariants(self)
        executor.on_step = self.invariants.scheduled

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
        prompt, params = request.prompt_token_ids, request.sampling_params
        assert prompt is not None
        assert params is not None
        expected = expected_output(self.executor.model, prompt, params, max_model_len, request.lora_request)
        client = Client(request, expected)
        if rng.random() < 0.1:  # began before a restart that this engine knows nothing of
            client.received = expected.token_ids[: rng.randint(0, len(expected.token_ids))]
        self._num_added += 1
        self._history = [*self._history[-15:], prompt + expected.token_ids]
        return self._submit(client)

    def _submit(self, client: Client) -> None:
        fields = {name: getattr(client.request, name) for name in client.request.__struct_fields__}
        request = EngineCoreRequest(**{**fields, "output_token_ids": list(client.received)})
        if self.log is not None:
            self.log(f"    {msgspec.to_builtins(request)}")
        self.live[request.request_id] = client
        self.invariants.added(request.request_id)
        self.core.add_request(*self.core.preprocess_add_request(request))

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
        ids = list(self.live)
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
        self.core.abort_requests(chosen)  # there may have been no step to do; a second abort does nothing

    def _forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self.live and not self.live[request_id].is_over:
                del self.live[request_id]

    # -- steps --------------------------------------------------------------------------------------------------

    def _step(self, number: int) -> None:
        self.invariants.scheduling()
        try:
            outputs, executed = self.core.step_fn()
        except WorkerFault:
            self.seen["failed steps"] += 1
            self.executor.recover()
            return self.invariants.lost_steps()
        self.core.post_step(executed)
        for client_index, client_outputs in (outputs or {}).items():
            self.invariants.heard_stats(client_outputs.scheduler_stats)
            for output in client_outputs.outputs:
                client = self.live.get(output.request_id)
                assert client is not None, f"an output for {output.request_id}, which is not live: {output}"
                assert client.request.client_index == client_index, f"{output.request_id} was sent to {client_index}"
                self._hear(client, output)
        return None

    def _hear(self, client: Client, output: EngineCoreOutput) -> None:
        if self.log is not None:
            self.log(f"    {output.request_id}: {output.new_token_ids} {output.finish_reason or ''}")
        self.invariants.heard(client, output)
        expected, client.received = client.expected, client.received + output.new_token_ids
        heard = len(client.received)
        assert client.received == expected.token_ids[:heard], (
            f"{output.request_id} heard {client.received}, the right answer is {expected.token_ids}"
        )
        if client.is_cut_off:
            assert output.finish_reason is FinishReason.ABORT, f"not the end of a request that was cut off: {output}"
        elif output.finished:
            end = (heard, output.finish_reason, output.stop_reason)
            right = (len(expected.token_ids), expected.finish_reason, expected.stop_reason)
            assert end == right, f"{output.request_id} ended with {end}, not {right}"
            self.seen[f"finished: {output.finish_reason}"] += 1
        else:
            assert heard < len(expected.token_ids), f"{output.request_id} should have ended: {client}"
            return
        del self.live[output.request_id]

    # -- control ------------------------------------------------------------------------------------------------

    def _reset_prefix_cache(self, number: int) -> None:
        with_running = number % 2 == 0
        done = self.core.reset_prefix_cache(reset_running_requests=with_running)
        self.invariants.reset_prefix_cache(done, with_running)

    def _pause(self, number: int) -> None:
        if number % 4 == 0:
            return self.core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        clear_cache = number % 8 < 4
        if number % 4 == 1:
            for client in self.live.values():
                client.is_cut_off = client.is_cut_off or not client.is_over
            self.core.pause_scheduler("abort", clear_cache)
        else:
            self.core.pause_scheduler("keep", clear_cache)
        if clear_cache:
            self.invariants.reset_prefix_cache(True, with_running=True)
        return None

    def _resume(self, number: int) -> None:
        self.core.resume_scheduler()

    def _fault(self, number: int) -> None:
        """A step fails in the worker, which lives on: what it computed is lost, no request is."""
        self.executor.fault = "sample" if number % 2 else "forward"
        self._step(number)

    def _crash(self, number: int) -> None:
        """The engine dies, sometimes with the outputs of a step nobody heard. Clients go on with a new one."""
        if number % 2:
            self.invariants.scheduling()
            with suppress(WorkerFault):
                self.core.step_fn()
        survivors, self.live = self.live, {}
        self.close()
        self._start_engine()
        for client in survivors.values():
            client.admitted_with = None
            if not client.is_cut_off:
                self._submit(client)

    def _drain(self, number: int) -> None:
        """Nothing new arrives: everything must finish, within a number of steps known beforehand."""
        self.core.resume_scheduler()
        limit = self.invariants.max_steps_to_finish()
        for _ in range(limit):
            if not self.core.scheduler.has_requests():
                break
            self._step(number)
            self.invariants.check()
        assert not self.live, f"after {limit} steps without new requests these are not finished: {list(self.live)}"
        self.invariants.check_idle()


def run_episode(
    seed: int,
    num_operations: int,
    *,
    keep: Callable[[int], bool] | None = None,
    log: Callable[[str], None] | None = None,
) -> Counter[str]:
    """Run the operations that follow from `seed`, then drain; `keep` picks a part of them by index.

    Returns how often each situation was met, "operations" among them. Raises SimulationError.
    """
    rng = random.Random(seed)
    world = World.draw(rng)
    operations = draw_operations(rng, world, num_operations)
    if log is not None:
        log(str(world))
    simulation = Simulation(world, log)
    for index, operation in enumerate([*operations, ("drain", 0)]):
        if keep is not None and index < num_operations and not keep(index):
            continue
        try:
            simulation.apply(operation)
        except Exception as e:
            raise SimulationError(seed, index, e) from e
        simulation.seen["operations"] += 1
    simulation.close()
    return simulation.seen

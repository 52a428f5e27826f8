"""The simulation: a real EngineCore, driven by random operations, checked after each of them.

A `Client` is what the outside world knows of a request: what it asked, the one right answer, and what it has heard.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine.core import EngineCore
from quire.testing.fake_model import ExpectedOutput, expected_output
from quire.wire.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from tests.simulation.invariants import Invariants
from tests.simulation.world import RecordingExecutor, World, draw_operations, draw_request

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
    heard: bool = False
    """Whether this engine has sent it an output."""

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
    """One engine and its clients. `log` is called with a line per event."""

    def __init__(self, world: World, log: Callable[[str], None] | None = None) -> None:
        self.world = world
        self.log = log
        self.live: dict[str, Client] = {}
        self.history: list[list[int]] = []
        self.num_added = 0
        self.paused = False
        self._start_engine()

    def _start_engine(self) -> None:
        self.core = EngineCore(self.world.config, self.world.executor_class, log_stats=True)
        executor = self.core.executor
        assert isinstance(executor, RecordingExecutor)
        self.executor = executor
        self.max_model_len = self.core.ready_response.max_model_len
        self.paused = False
        self.invariants = Invariants(self)

    def apply(self, operation: Operation) -> None:
        """Do one operation and check everything that must hold after it."""
        kind, number = operation
        if self.log is not None:
            self.log(f"{kind} {number}")
        getattr(self, f"_{kind}")(number)
        self.invariants.check()

    # -- operations ---------------------------------------------------------------------------------------------

    def _add(self, number: int) -> None:
        if len(self.live) >= MAX_LIVE_REQUESTS:
            return self._step(number)
        rng = random.Random(number)
        request_id = f"r{self.num_added}"
        request = draw_request(rng, self.world, request_id, self.num_added, self.max_model_len, self.history)
        assert request.prompt_token_ids is not None
        assert request.sampling_params is not None
        expected = expected_output(
            self.executor.model,
            request.prompt_token_ids,
            request.sampling_params,
            self.max_model_len,
            request.lora_request,
        )
        client = Client(request, expected)
        if rng.random() < 0.1:  # began before a restart that this engine knows nothing of
            client.received = expected.token_ids[: rng.randrange(len(expected.token_ids))]
        self.num_added += 1
        self.history = [*self.history[-15:], request.prompt_token_ids + expected.token_ids]
        self._submit(client)
        return None

    def _submit(self, client: Client) -> None:
        origin = client.request
        request = EngineCoreRequest(
            **{name: getattr(origin, name) for name in origin.__struct_fields__ if name != "output_token_ids"},
            output_token_ids=list(client.received),
        )
        if self.log is not None:
            self.log(f"    {request}")
        self.live[request.request_id] = client
        self.invariants.added(request.request_id)
        self.core.add_request(*self.core.preprocess_add_request(request))

    def _step(self, number: int) -> None:
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        self.invariants.stepped()
        for client_index, client_outputs in (outputs or {}).items():
            self._deliver(client_index, client_outputs)

    def _deliver(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        self.invariants.heard_stats(outputs.scheduler_stats)
        for output in outputs.outputs:
            if self.log is not None:
                self.log(f"    {output.request_id}: {output.new_token_ids} {output.finish_reason or ''}")
            client = self.live.get(output.request_id)
            assert client is not None, f"an output for {output.request_id}, which is not live: {output}"
            assert client.request.client_index == client_index, f"{output.request_id} was sent to {client_index}"
            self._hear(client, output)

    def _hear(self, client: Client, output: EngineCoreOutput) -> None:
        expected = client.expected
        client.received = client.received + output.new_token_ids
        heard = len(client.received)
        assert client.received == expected.token_ids[:heard], (
            f"{output.request_id} heard {client.received}, the right answer is {expected.token_ids}"
        )
        self.invariants.heard(client, output)
        client.heard = True
        if output.finished:
            end = (heard, output.finish_reason, output.stop_reason)
            right = (len(expected.token_ids), expected.finish_reason, expected.stop_reason)
            assert end == right, f"{output.request_id} ended with {end}, not {right}"
            del self.live[output.request_id]
        else:
            assert heard < len(expected.token_ids), f"{output.request_id} should have ended: {client}"

    def _choose(self, number: int) -> list[str]:
        """One live request, or sometimes several, or one that does not exist."""
        ids = list(self.live)
        if not ids or number % 23 == 0:
            return ["unknown"]
        return ids[:: 1 + number % 3] if number % 11 == 0 else [ids[number % len(ids)]]

    def _abort(self, number: int) -> None:
        chosen = self._choose(number)
        self.invariants.aborting(chosen)
        self.core.abort_requests(chosen)
        self._gone(chosen)

    def _abort_in_flight(self, number: int) -> None:
        """The abort arrives while the step is being computed."""
        chosen = self._choose(number)
        self.core.aborts_queue.put_nowait(chosen)
        before = dict(self.live)
        try:
            outputs, executed = self.core.step_fn()
        finally:
            self.live = before
        self.core.post_step(executed)
        self.invariants.stepped()
        for client_index, client_outputs in (outputs or {}).items():
            self._deliver(client_index, client_outputs)
        self.core.abort_requests(chosen)  # the step may have had nothing to do: a second abort must be harmless
        self._gone(chosen)

    def _gone(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.live.pop(request_id, None)

    def _reset_prefix_cache(self, number: int) -> None:
        with_running = number % 2 == 0
        done = self.core.reset_prefix_cache(reset_running_requests=with_running)
        self.invariants.reset(done, with_running)

    def _pause(self, number: int) -> None:
        self.core.pause_scheduler(mode="keep")
        self.paused = True

    def _resume(self, number: int) -> None:
        self.core.resume_scheduler()
        self.paused = False

    def _crash(self, number: int) -> None:
        """The engine dies, sometimes with the outputs of a step nobody heard. Clients go on with a new one."""
        if number % 2:
            self.core.step_fn()
        survivors, self.live = self.live, {}
        self._start_engine()
        for client in survivors.values():
            client.admitted_with, client.heard = None, False
            self._submit(client)

    def _drain(self, number: int) -> None:
        """Nothing new arrives: everything must finish, within a number of steps known beforehand."""
        self.core.resume_scheduler()
        self.paused = False
        limit = self.invariants.max_steps_to_finish()
        for _ in range(limit):
            if not self.live and not self.core.scheduler.has_requests():
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
) -> int:
    """Run the operations that follow from `seed`, then drain; `keep` picks a part of them by index.

    Returns the number of operations done. Raises SimulationError.
    """
    rng = random.Random(seed)
    world = World.draw(rng)
    operations = draw_operations(rng, world, num_operations)
    simulation = Simulation(world, log)
    done = 0
    for index, operation in enumerate([*operations, ("drain", 0)]):
        if keep is not None and index < num_operations and not keep(index):
            continue
        try:
            simulation.apply(operation)
        except Exception as e:
            raise SimulationError(seed, index, e) from e
        done += 1
    return done

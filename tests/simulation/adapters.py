"""The adapters of a simulation: their files, which change, what clients may see of them, and what must hold.

A request ends with the tokens of one version of its adapter's files: the one that was newest when it came, or, where
none was loaded by then, one that the load found.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec
import pytest

from quire.engine.lora.registry import AdapterState, Revision
from quire.errors import ClientError, GenerationError
from quire.lora_request import LoRARequest
from quire.testing.fake_hardware import fake_invocation
from quire.wire.engine_core import EngineCoreOutput, FinishReason
from quire.wire.lora import AdapterInfo, RegisteredAdapter
from tests.simulation.world import MORE_LORAS

if TYPE_CHECKING:
    from tests.simulation.harness import Client, Simulation

TICK_S = 0.25
"""Seconds on the manager's clock per step."""


class Adapters:
    """Knows what the engine should know of adapters, over all deaths of the engine."""

    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation
        self.now = 0.0
        self.is_woken = False
        self._versions: Counter[str] = Counter()
        self._contents: defaultdict[str, set[str]] = defaultdict(set)
        self._registered: dict[int, RegisteredAdapter] = {}
        """Adapters that a supervisor registers again after a restart."""
        self._adding: list[tuple[LoRARequest, Future[AdapterInfo]]] = []
        self._has_pinned = self._has_slept = False

    def begin_engine(self) -> None:
        """Sets up a new engine."""
        self._adding, self._has_slept, self.is_woken = [], False, False
        self._has_pinned = any(adapter.is_pinned for adapter in self._registered.values())
        self.manager, self.worker = self.sim.core.adapters, self.sim.executor.adapters
        self.manager.clock = lambda: self.now
        self.worker.read = self.read
        self.manager.register_loras([msgspec.structs.replace(one) for one in self._registered.values()])

    def wake(self) -> None:
        """The engine's call when something was loaded."""
        self.is_woken = True

    def read(self, lora: LoRARequest) -> str:
        """The digest of the files as they are now."""
        digest = f"{lora.lora_path}@{self._versions[lora.lora_path]}"
        self._contents[lora.lora_path].add(digest)
        return digest

    # -- requests -----------------------------------------------------------------------------------------------

    def digest_for(self, lora: LoRARequest | None) -> str:
        """The digest that a new request will get, if nothing changes before the load."""
        if lora is None:
            return ""
        newest = self.find_loaded(lora)
        return self.read(lora) if newest is None else newest.digest

    def list_contents(self, lora: LoRARequest) -> list[str]:
        """The digests that the adapter's files have had."""
        return sorted(self._contents[lora.lora_path])

    def find_loaded(self, lora: LoRARequest) -> Revision | None:
        """Returns the revision that new requests get, if the adapter has been loaded before."""
        newest = self.manager.registry.newest.get(lora.lora_int_id)
        return newest if newest is not None and newest.digest else None

    def began(self, client: Client) -> AdapterInfo | None:
        """Returns what the client's first output has said of its adapter."""
        lora = client.request.lora_request
        if lora is None or not client.received:
            return None
        return AdapterInfo(lora.lora_int_id, 1, client.digest, 1, 1, fake_invocation(lora))

    def heard(self, client: Client, info: AdapterInfo) -> None:
        """Handles the first output of a request, which names the revision that it uses."""
        lora = client.request.lora_request
        assert lora is not None
        assert info.lora_int_id == lora.lora_int_id
        assert not client.received
        if info.digest == client.digest:
            return
        path = lora.lora_path
        assert info.digest in self._contents[path], f"{client.request.request_id} runs with {info}, which never was"
        bound = client.revision
        assert bound is None or bound.has_changed, f"{client.request.request_id} was bound to {client.digest}: {info}"
        self.sim.seen["bound to files that changed"] += 1
        client.digest = info.digest
        client.expected = self.sim._expect(client.request, [], info.digest)

    def is_legitimate_failure(self, client: Client, error_type: str) -> bool:
        """Returns whether a request may end with this error."""
        lora = client.request.lora_request
        if lora is None:
            return False
        if error_type == GenerationError.__name__:
            return self._versions[lora.lora_path] > 0
        has_begun = client.admitted_with is not None and bool(client.received)
        if has_begun and not self._has_slept:
            return False
        limits = self.sim.world.config.lora_config
        is_too_large = self.worker.size_of(lora) > (limits.lora_memory_bytes or 0)
        return error_type == "AdapterError" and (
            bool(self.worker.num_failed[lora.lora_int_id]) or is_too_large or self._has_pinned
        )

    def takes_failure(self, client: Client, output: EngineCoreOutput) -> bool:
        """Returns whether this output is the end of a request whose adapter cannot be had."""
        if output.finish_reason is not FinishReason.ERROR or client.is_over:
            return False
        assert self.is_legitimate_failure(client, output.error_type), f"{output} for {client}"
        assert not output.new_token_ids
        self.sim.seen["requests without their adapter"] += 1
        return True

    # -- verbs --------------------------------------------------------------------------------------------------

    def do(self, number: int) -> None:
        """Does one thing to an adapter, as an operator would."""
        rng = random.Random(number)
        lora = rng.choice(MORE_LORAS)
        verb = rng.choice(["add", "add", "reload", "reload", "remove", "pin", "change", "list"])
        self.sim.seen[f"adapter: {verb}"] += 1
        match verb:
            case "add":
                self._add(lora)
            case "reload":
                self._versions[lora.lora_path] += rng.random() < 0.8
                self._add(msgspec.structs.replace(lora, load_inplace=True))
            case "change":
                self._versions[lora.lora_path] += 1
            case "remove":
                known = lora.lora_int_id in self.manager.registry.newest
                assert self.manager.remove_lora(lora.lora_int_id) == known
                self._registered.pop(lora.lora_int_id, None)
            case "pin":
                if lora.lora_int_id in self.manager.registry.newest and rng.random() < 0.3:
                    self._has_pinned = True
                    self.manager.pin_lora(lora.lora_int_id)
                    if lora.lora_int_id in self._registered:
                        self._registered[lora.lora_int_id].is_pinned = True
            case _:
                assert self._registered.keys() - self._failed() <= self.manager.list_loras()

    def _failed(self) -> set[int]:
        return {i for i, one in self.manager.registry.newest.items() if one.state is AdapterState.FAILED}

    def _add(self, lora: LoRARequest) -> None:
        if self.manager._is_asleep:
            with pytest.raises(ClientError, match="sleeps"):
                self.manager.add_lora(lora)
        else:
            self._adding.append((lora, self.manager.add_lora(lora)))

    def _take_added(self) -> None:
        done = [(lora, future) for lora, future in self._adding if future.done()]
        self._adding = [(lora, future) for lora, future in self._adding if not future.done()]
        for lora, future in done:
            error = future.exception()
            if error is not None:
                assert isinstance(error, ClientError), f"{error!r}"
                continue
            info = future.result()
            assert info.digest in self._contents[lora.lora_path], f"{info}"
            newest = self.manager.registry.newest.get(lora.lora_int_id)
            if newest is not None and newest.digest == info.digest:
                self._registered[lora.lora_int_id] = RegisteredAdapter(lora, *newest.key[1:], info.digest)
                self._registered[lora.lora_int_id].is_pinned = newest.is_pinned

    def slept(self) -> None:
        """The engine was at level 2: adapters may be missing now for requests that had begun."""
        self._has_slept = True

    # -- time and checks ----------------------------------------------------------------------------------------

    def pass_time(self) -> None:
        """A step's time passes; the engine is woken as its loop would be."""
        self._take_added()
        self.now += TICK_S
        self.worker.tick()
        if self.is_woken:
            self.is_woken = False
            self.sim.core.take_news()

    def check(self) -> None:
        """Checks after every operation: references, places and memory add up, and stay below their bounds."""
        manager, limits = self.manager, self.sim.world.config.lora_config
        scheduler = self.sim.invariants.scheduler
        bound = Counter(request.adapter for request in scheduler.requests.values() if request.adapter is not None)
        found = {key: revision.num_bound for key, revision in manager.registry.revisions.items() if revision.num_bound}
        assert found == dict(bound), f"references {found}, requests have {dict(bound)}"
        running = {request.adapter for request in scheduler.running if request.adapter is not None}
        assert running == set(manager.places.running), f"{running} run, places are held by {manager.places.running}"
        assert limits.max_loras is None or len(running) <= limits.max_loras, f"{running}"
        assert running <= self.worker.loaded.keys(), f"{running} run, {self.worker.loaded} are loaded"
        held = self.worker.loaded.keys() | self.worker.loading.keys()
        num_bytes = sum(100 + 60 * lora_id for lora_id, _ in held)
        assert num_bytes == manager.memory.num_bytes <= (limits.lora_memory_bytes or 0), f"{held}"
        assert limits.max_cpu_loras is None or len(held) <= limits.max_cpu_loras, f"{held}"
        assert len(manager._blocked) <= len(scheduler.requests)

    def settle(self) -> None:
        """No request is left: every load ends."""
        for _ in range(1000):
            self.pass_time()
            if not self.worker.num_under_way and not self.is_woken:
                break
        self._take_added()
        assert not self._adding, f"these loads never end: {self._adding}"
        self.check()
        self.check_idle()

    def check_idle(self) -> None:
        """No request is left: nothing may hold on to an adapter."""
        assert not self.manager._blocked
        assert all(not one.num_bound and not one.num_begun for one in self.manager.registry.revisions.values())
        assert all(one.is_newest for one in self.manager.registry.revisions.values()), (
            "an old revision is held by nothing"
        )

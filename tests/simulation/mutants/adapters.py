"""Planted bugs in the management of adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.kv_cache import block_pool, hashing
from quire.engine.lora.manager import AdapterManager
from quire.engine.lora.memory import AdapterMemory, AdapterPlaces
from quire.engine.lora.registry import AdapterRegistry, AdapterState, Revision
from quire.engine.request import Request, RequestStatus
from quire.engine.sched.policy import WaitingRequests
from tests.simulation.mutants.kv_cache import drop_extra_keys
from tests.simulation.mutants.registry import Patch, mutant, wrap


@mutant
def end_kept_from_the_gates(patch: Patch) -> None:
    """A request that ends keeps its adapter referenced, and its place taken."""

    def note_left(original: Any, self: WaitingRequests, request: Request) -> None:
        if request.status is RequestStatus.PREEMPTED:
            original(self, request)

    wrap(patch, WaitingRequests, "note_left", note_left)


@mutant
def preemption_kept_from_the_gates(patch: Patch) -> None:
    """A preempted request keeps its adapter's place."""

    def note_left(original: Any, self: WaitingRequests, request: Request) -> None:
        if request.status is not RequestStatus.PREEMPTED:
            original(self, request)

    wrap(patch, WaitingRequests, "note_left", note_left)


@mutant
def revision_not_in_the_key(patch: Patch) -> None:
    """A reloaded adapter finds the blocks that its former files made."""
    drop_extra_keys(patch, "lora_revision")


@mutant
def adapter_in_the_keys_before_it_begins(patch: Patch) -> None:
    """Blocks before an invocation are not shared with the base model."""

    original = hashing.block_extra_keys

    def block_extra_keys(request: Request, block_index: int, block_size: int) -> Any:
        start, request.report.lora_start = request.lora_start, min(request.lora_start, block_index * block_size)
        keys = original(request, block_index, block_size)
        request.report.lora_start = start
        return keys

    for module in (hashing, block_pool):
        patch.setattr(module, "block_extra_keys", block_extra_keys)


@mutant
def adapter_begins_unsettled(patch: Patch) -> None:
    """The invocation is not looked for in prompts that came before the adapter's first load."""
    patch.setattr(AdapterManager, "_settle_start", lambda self, request: setattr(request.report, "lora_start", 0))


@mutant
def adapter_evicted_in_use(patch: Patch) -> None:
    """The least recently used adapter is evicted, whatever uses it."""

    def choose_victims(
        original: Any, self: AdapterMemory, num_bytes: int, may_go: Callable[[Revision], bool]
    ) -> list[Revision] | None:
        victims: list[Revision] | None = original(self, num_bytes, lambda one: one.state is AdapterState.READY)
        return victims

    wrap(patch, AdapterMemory, "choose_victims", choose_victims)


@mutant
def adapters_beyond_the_budget(patch: Patch) -> None:
    """Adapters are loaded whatever memory they take."""
    patch.setattr(AdapterMemory, "fits", lambda self, *args: True)


@mutant
def one_adapter_too_many(patch: Patch) -> None:
    """max_loras + 1 adapters run at once."""

    def init(original: Any, self: AdapterPlaces, max_loras: int | None, *args: Any) -> None:
        original(self, None if max_loras is None else max_loras + 1, *args)

    wrap(patch, AdapterPlaces, "__init__", init)


@mutant
def admitted_before_it_is_loaded(patch: Patch) -> None:
    """A request starts while its adapter is being read."""

    def is_ready(original: Any, self: AdapterManager, request: Request) -> bool:
        return original(self, request) or self.registry.revisions[request.adapter].state is AdapterState.LOADING

    wrap(patch, AdapterManager, "is_ready", is_ready)


@mutant
def resumed_on_other_files(patch: Patch) -> None:
    """A request goes on after a restart with whatever its adapter's files are now."""
    patch.setattr("quire.engine.lora.manager._error_of_resumed", lambda request, revision: None)
    patch.setattr(AdapterRegistry, "find_begun", lambda self, lora, began: None)


@mutant
def core_not_woken(patch: Patch) -> None:
    """A load that ends is taken in only when something else happens."""

    def init(original: Any, self: AdapterManager, *args: Any, wake: Callable[[], None], **kwargs: Any) -> None:
        original(self, *args, wake=lambda: None, **kwargs)

    wrap(patch, AdapterManager, "__init__", init)

"""The adapters of an engine, without an engine: loads end when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import pytest

from quire.config.lora import LoRAConfig
from quire.engine.lora.manager import PINNED_DELAY_S, UNKNOWN, AdapterManager
from quire.engine.lora.memory import MAX_WAIT_S
from quire.engine.lora.registry import FAILURE_S
from quire.engine.request import Request, RequestStatus
from quire.errors import AdapterError, ClientError, GenerationError, ValidationError
from quire.lora_request import LoRARequest
from quire.wire.lora import NEVER, AdapterInfo, AdapterKey, AdapterLoad, RegisteredAdapter
from quire.wire.stats import SchedulerStats

from ..harness import make_core_request

A, B, C = LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b"), LoRARequest("c", 3, "/c")
AGAIN = msgspec.structs.replace(A, load_inplace=True)


class Worker:
    """Loads are ended by `end`."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.loading: dict[AdapterKey, tuple[AdapterLoad, Future[AdapterInfo]]] = {}
        self.loaded: set[AdapterKey] = set()
        self.log: list[Any] = []

    def measure_adapter(self, lora_request: LoRARequest) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(self.sizes.get(lora_request.lora_name, 100))
        return future

    def load_adapter(self, load: AdapterLoad) -> Future[AdapterInfo]:
        assert load.key not in self.loading.keys() | self.loaded
        future: Future[AdapterInfo] = Future()
        self.loading[load.key] = load, future
        self.log.append(("load", *load.key))
        return future

    def drop_adapter(self, key: AdapterKey) -> None:
        self.loaded.remove(key)
        self.log.append(("drop", *key))

    def end(
        self,
        key: AdapterKey,
        digest: str = "",
        error: Exception | None = None,
        num_bytes: int = 0,
        invocation: Sequence[int] = (),
    ) -> None:
        load, future = self.loading.pop(key)
        if error is not None:
            future.set_exception(error)
            return
        self.loaded.add(key)
        name = load.lora_request.lora_name
        size = num_bytes or self.sizes.get(name, 100)
        future.set_result(AdapterInfo(*key, digest or f"{name}0", size, 8, list(invocation)))


class Manager(AdapterManager):
    """With a worker, a clock that stands still, and requests."""

    def __init__(self, memory_bytes: int = 1000, **limits: Any) -> None:
        self.worker = Worker()
        self.now = 100.0
        self.num_wakes = 0
        super().__init__(
            LoRAConfig(**{"enable_lora": True, **limits}),
            cast("Any", self.worker),
            memory_bytes,
            wake=self._count_wake,
            clock=lambda: self.now,
        )

    def _count_wake(self) -> None:
        self.num_wakes += 1

    def request(self, name: str, lora: LoRARequest, **fields: Any) -> Request:
        origin = msgspec.structs.replace(make_core_request(name), lora_request=lora, **fields)
        key = self.bind(origin)
        return Request(origin, None, key, self.find_start(origin, key))

    def end(self, lora: LoRARequest, number: int = 1, **result: Any) -> None:
        self.take_results()
        self.worker.end((lora.lora_int_id, number), **result)
        self.take_results()

    def start(self, request: Request) -> None:
        assert self.is_ready(request)
        assert self.get_error(request) is None
        request.status = RequestStatus.RUNNING
        self.note_admitted(request)

    def finish(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_STOPPED
        self.note_left(request)

    def loaded(self) -> list[AdapterKey]:
        return sorted(self.worker.loaded)


def states(manager: Manager) -> dict[str, int]:
    stats = SchedulerStats()
    manager.add_stats(stats)
    assert stats.adapters is not None
    return {state: count for state, count in stats.adapters.num_adapters.items() if count}


# -- a request -------------------------------------------------------------------------------------------------


def test_a_request_waits_for_its_adapter() -> None:
    manager = Manager()
    request = manager.request("r", A)
    assert request.adapter == (1, 1)
    assert manager.num_wakes == 1, "it was measured"
    manager.take_results()
    assert not manager.is_ready(request)
    manager.now += 0.5
    manager.end(A)
    assert manager.num_wakes == 2
    manager.start(request)
    assert request.report.adapter == AdapterInfo(1, 1, "a0", 100, 8)
    stats = SchedulerStats()
    manager.add_stats(stats)
    assert stats.adapters is not None
    assert (stats.adapters.num_loads, stats.adapters.load_seconds) == ({"loaded": 1}, [0.5])
    assert (stats.adapters.wait_seconds, stats.adapters.resident_bytes) == ([0.5], 100)
    manager.finish(request)
    again = manager.request("s", A)
    manager.start(again)
    stats = SchedulerStats()
    manager.add_stats(stats)
    assert stats.adapters is not None
    assert (stats.adapters.wait_seconds, stats.adapters.num_loads) == ([], {})


def test_an_adapter_begins_at_the_last_invocation_in_the_prompt() -> None:
    manager = Manager()
    prompts = {"none": [1, 5, 7, 6], "end": [1, 5, 6], "two": [5, 6, 5, 5, 6, 9], "short": [6]}
    starts = {"none": NEVER, "end": 1, "two": 3, "short": NEVER}
    early = {name: manager.request(name, A, prompt_token_ids=prompt) for name, prompt in prompts.items()}
    assert {request.lora_start for request in early.values()} == {UNKNOWN}, "nothing is known of the adapter"
    manager.end(A, invocation=[5, 6])
    for request in early.values():
        manager.start(request)
    assert {name: request.lora_start for name, request in early.items()} == starts
    late = {name: manager.request(name, A, prompt_token_ids=prompt) for name, prompt in prompts.items()}
    assert {name: request.lora_start for name, request in late.items()} == starts
    assert early["two"].report.adapter == AdapterInfo(1, 1, "a0", 100, 8, [5, 6])
    # a request that goes on after a restart: its outputs hold the invocation again, and begin nothing
    again, began = Manager(), early["two"].report.adapter
    again.register_loras([RegisteredAdapter(A, 1, "a0")])
    resumed = again.request("two", A, prompt_token_ids=prompts["two"], adapter=began, output_token_ids=[5, 6])
    assert resumed.lora_start == 3, "before the adapter is loaded"
    again.end(A, invocation=[5, 6])
    again.start(resumed)
    assert resumed.lora_start == 3
    # a reload with another invocation is for those that come afterwards
    manager.add_lora(AGAIN)
    manager.end(A, 2, digest="a1", invocation=[1])
    assert [manager.request("new", A, prompt_token_ids=prompts["end"]).lora_start, early["end"].lora_start] == [0, 1]


def test_requests_without_an_adapter_pass() -> None:
    manager = Manager()
    plain = Request(make_core_request("r"), None, manager.bind(make_core_request("r")))
    assert plain.adapter is None
    assert manager.is_ready(plain)
    manager.note_admitted(plain)
    manager.note_left(plain)
    stats = SchedulerStats()
    manager.add_stats(stats)
    assert stats.adapters is None


def test_a_load_that_fails_ends_those_that_wait_and_is_remembered() -> None:
    manager = Manager()
    one, two = manager.request("r", A), manager.request("s", A)
    manager.end(A, error=AdapterError("/a: rank 0"))
    assert manager.is_ready(one)
    assert str(manager.get_error(one)) == str(manager.get_error(two)) == "/a: rank 0"
    with pytest.raises(AdapterError, match="rank 0"):
        manager.request("t", A)
    for request in (one, two):
        manager.finish(request)
    manager.now += FAILURE_S - 1
    with pytest.raises(AdapterError, match="rank 0"):
        manager.request("t", A)
    manager.now += 1
    third = manager.request("t", A)
    manager.end(A)
    manager.start(third)


def test_an_unexpected_error_is_named() -> None:
    manager = Manager()
    future = manager.add_lora(A)
    manager.end(A, error=KeyError("surprise"))
    with pytest.raises(GenerationError, match="adapter 'a' could not be loaded: KeyError: 'surprise'"):
        future.result(0)
    assert manager.list_loras() == set()
    assert not manager.registry.revisions, "it never was an adapter"


def test_a_new_path_replaces_one_that_could_not_be_loaded() -> None:
    manager = Manager()
    request = manager.request("r", A)
    manager.end(A, error=AdapterError("nothing there"))
    right = LoRARequest("a", 1, "/right")
    future = manager.add_lora(right)
    manager.finish(request)
    manager.take_results()
    (key,) = manager.worker.loading
    manager.worker.end(key)
    manager.take_results()
    assert future.result(0).lora_int_id == 1


@pytest.mark.parametrize("other", [LoRARequest("b", 1, "/a"), LoRARequest("a", 1, "/b")])
def test_an_id_has_one_name_and_path(other: LoRARequest) -> None:
    manager = Manager()
    manager.add_lora(A)
    for call in (lambda: manager.add_lora(other), lambda: manager.request("r", other)):
        with pytest.raises(ValidationError, match="adapter id 1 is 'a' of '/a', not"):
            call()


# -- memory ----------------------------------------------------------------------------------------------------


def load(manager: Manager, *adapters: LoRARequest) -> None:
    for lora in adapters:
        future = manager.add_lora(lora)
        manager.take_results()
        manager.worker.end((lora.lora_int_id, 1))
        manager.take_results()
        assert future.result(0).num_bytes


def test_the_least_recently_used_adapter_goes() -> None:
    manager = Manager(250)
    load(manager, A, B)
    request = manager.request("r", A)
    manager.start(request)
    manager.finish(request)
    load(manager, C)
    assert manager.loaded() == [(1, 1), (3, 1)]
    assert manager.worker.log[-2:] == [("drop", 2, 1), ("load", 3, 1)]
    assert states(manager) == {"ready": 2, "cold": 1}


def test_what_is_pinned_or_in_use_stays() -> None:
    manager = Manager(250)
    load(manager, A, B)
    assert manager.pin_lora(1)
    running = manager.request("r", B)
    manager.start(running)
    future = manager.add_lora(C)
    manager.take_results()
    assert manager.loaded() == [(1, 1), (2, 1)]
    assert not future.done(), "it waits"
    running.status = RequestStatus.PREEMPTED
    manager.note_left(running)
    manager.now += 2 * MAX_WAIT_S
    manager.take_results()
    assert (2, 1) in manager.worker.loaded, "a preempted request goes on with what it began"
    manager.finish(running)
    manager.end(C)
    assert future.done()
    assert manager.loaded() == [(1, 1), (3, 1)]


def test_what_requests_only_wait_for_goes_after_two_seconds() -> None:
    manager = Manager(150)
    load(manager, A)
    waiting, other = manager.request("r", A), manager.request("s", B)
    manager.take_results()
    assert manager.is_ready(waiting)
    assert not manager.is_ready(other)
    manager.now += MAX_WAIT_S
    assert not manager.is_ready(waiting), "it has gone, for the one that waited so long"
    assert manager.worker.log[-2:] == [("drop", 1, 1), ("load", 2, 1)]
    manager.end(B)
    manager.start(other)
    assert not manager.is_ready(waiting)
    manager.finish(other)
    manager.end(A)
    manager.start(waiting)


def test_what_can_never_fit_fails_with_both_numbers() -> None:
    manager = Manager(250)
    manager.worker.sizes["b"] = 300
    request = manager.request("r", B)
    manager.take_results()
    assert manager.is_ready(request)
    assert "takes 300 bytes; all adapters together have 250: raise --lora-memory-bytes" in str(
        manager.get_error(request)
    )
    assert not manager.worker.loading


def test_an_adapter_that_is_larger_than_its_header_says_is_dropped() -> None:
    manager = Manager(250)
    future = manager.add_lora(A)
    manager.end(A, num_bytes=251)
    with pytest.raises(AdapterError, match="takes 251 bytes"):
        future.result(0)
    assert not manager.worker.loaded
    assert manager.memory.num_bytes == 0


def test_the_executor_has_two_loads_at_once() -> None:
    manager = Manager()
    for lora in (A, B, C):
        manager.add_lora(lora)
    manager.take_results()
    assert manager.worker.log == [("load", 1, 1), ("load", 2, 1)]
    manager.end(A)
    assert manager.worker.log[-1] == ("load", 3, 1)


def test_a_smaller_one_does_not_pass_one_that_waits_for_memory() -> None:
    manager = Manager(250)
    manager.worker.sizes |= {"a": 200, "b": 200, "c": 10}
    load(manager, A)
    running = manager.request("r", A)
    manager.start(running)
    manager.add_lora(B)
    manager.add_lora(C)
    manager.take_results()
    assert not manager.worker.loading
    manager.finish(running)
    manager.take_results()
    assert sorted(manager.worker.loading) == [(2, 1), (3, 1)]


# -- revisions -------------------------------------------------------------------------------------------------


def test_a_reload_is_a_revision_and_old_requests_end_on_theirs() -> None:
    manager = Manager()
    load(manager, A)
    old = manager.request("old", A)
    manager.start(old)
    future = manager.add_lora(AGAIN)
    manager.take_results()
    meanwhile = manager.request("meanwhile", A)
    assert meanwhile.adapter == (1, 1), "until it is loaded, the present one serves"
    manager.end(A, 2, digest="a1")
    assert future.result(0) == AdapterInfo(1, 2, "a1", 100, 8)
    new = manager.request("new", A)
    assert new.adapter == (1, 2)
    assert manager.loaded() == [(1, 1), (1, 2)]
    manager.finish(old)
    assert manager.loaded() == [(1, 1), (1, 2)]
    manager.start(meanwhile)
    manager.finish(meanwhile)
    assert manager.loaded() == [(1, 2)], "its last request is gone"
    manager.start(new)


def test_a_reload_of_the_same_files_is_no_revision() -> None:
    manager = Manager()
    load(manager, A)
    future = manager.add_lora(AGAIN)
    manager.end(A, 2)
    assert future.result(0).revision == 1
    assert manager.loaded() == [(1, 1)]


def test_a_reload_that_fails_leaves_the_present_one() -> None:
    manager = Manager()
    load(manager, A)
    future = manager.add_lora(AGAIN)
    manager.end(A, 2, error=AdapterError("broken"))
    with pytest.raises(AdapterError, match="broken"):
        future.result(0)
    manager.start(manager.request("r", A))
    assert states(manager) == {"ready": 1}


def test_a_reload_may_come_from_another_directory() -> None:
    manager = Manager()
    load(manager, A)
    moved = LoRARequest("a", 1, "/moved", load_inplace=True)
    manager.add_lora(moved)
    manager.end(A, 2, digest="a0")
    assert manager.request("r", LoRARequest("a", 1, "/moved")).adapter == (1, 2)
    with pytest.raises(ValidationError, match="'/moved', not 'a' of '/a'"):
        manager.request("s", A)


def test_numbers_are_not_given_again() -> None:
    """They are in the keys of cached blocks: a number that named other files once would find theirs."""
    manager = Manager()
    load(manager, A, B)
    assert manager.remove_lora(1)
    assert not manager.remove_lora(1)
    assert manager.loaded() == [(2, 1)]
    future = manager.add_lora(A)
    manager.take_results()
    assert list(manager.worker.loading) == [(1, 2)]
    manager.end(A, 2, digest="other files")
    assert future.result(0).revision == 2
    same_place = LoRARequest("b", 9, "/b")
    manager.add_lora(same_place)
    manager.take_results()
    assert list(manager.worker.loading) == [(9, 3)]
    manager.add_lora(C)
    manager.take_results()
    assert (3, 1) in manager.worker.loading


def test_what_was_removed_serves_its_requests_to_the_end() -> None:
    manager = Manager()
    load(manager, A)
    running, waiting = manager.request("r", A), manager.request("s", A)
    manager.start(running)
    assert manager.remove_lora(1)
    assert manager.list_loras() == set()
    manager.start(waiting)
    for request in (running, waiting):
        assert manager.loaded() == [(1, 1)]
        manager.finish(request)
    assert manager.loaded() == []
    assert not manager.registry.revisions


def test_an_adapter_that_is_removed_while_it_loads_is_dropped() -> None:
    manager = Manager()
    future = manager.add_lora(A)
    manager.take_results()
    manager.remove_lora(1)
    with pytest.raises(ClientError, match="was removed while it was loading"):
        future.result(0)
    manager.end(A)
    assert manager.loaded() == []
    assert not manager.registry.revisions


def test_files_that_changed_while_it_was_cold_are_another_revision() -> None:
    manager = Manager(150)
    load(manager, A, B)
    waiting = manager.request("r", A)
    assert waiting.adapter == (1, 1)
    manager.end(A, digest="other files")
    assert not manager.is_ready(waiting)
    assert waiting.adapter == (1, 2), "it has no output yet, and gets the new files"
    assert manager.loaded() == []
    manager.end(A, 2, digest="other files")
    manager.start(waiting)
    assert (1, 1) not in manager.registry.revisions


# -- restarts and sleep ----------------------------------------------------------------------------------------


def test_a_restarted_core_reads_nothing_and_loads_what_is_asked_for_first() -> None:
    manager = Manager()
    manager.register_loras(
        [
            RegisteredAdapter(A, 4, "a3", is_pinned=True),
            RegisteredAdapter(B, 2, "b1", is_pinned=True),
            RegisteredAdapter(C, 1, "c0"),
        ]
    )
    assert manager.list_loras() == {1, 2, 3}
    assert not manager.worker.log
    resumed = manager.request("r", C, adapter=AdapterInfo(3, 1, "c0", 100, 8), output_token_ids=[5])
    manager.now += PINNED_DELAY_S
    manager.take_results()
    assert manager.worker.log == [("load", 3, 1)]
    manager.end(C)
    manager.start(resumed)
    manager.take_results()
    assert manager.worker.log[1:] == [("load", 1, 4)]
    manager.end(A, 4, digest="a3")
    assert manager.worker.log[2:] == [("load", 2, 2)]


def test_registering_asks_the_workers_for_nothing() -> None:
    manager = Manager()
    manager.register_loras([RegisteredAdapter(LoRARequest(f"a{i}", i, f"/a{i}"), 1, "d") for i in range(1, 1001)])
    manager.take_results()
    assert states(manager) == {"cold": 1000}
    assert not manager.worker.log


def test_a_resumed_request_goes_on_with_the_same_files_only() -> None:
    began = AdapterInfo(1, 1, "a0", 100, 8)
    manager = Manager()
    manager.register_loras([RegisteredAdapter(A, 2, "a1")])
    resumed = manager.request("r", A, adapter=began, output_token_ids=[5])
    assert resumed.adapter == (1, 1)
    manager.end(A, 1, digest="a0")  # an older directory that is still there
    manager.start(resumed)
    assert manager.request("s", A).adapter == (1, 2)

    manager = Manager()
    manager.register_loras([RegisteredAdapter(A, 2, "a1")])
    resumed = manager.request("r", A, adapter=began, output_token_ids=[5])
    manager.end(A, 1, digest="a1")
    assert manager.is_ready(resumed)
    assert "files of adapter 'a' in '/a' have changed since the request began" in str(manager.get_error(resumed))
    assert manager.loaded() == []

    manager = Manager()  # which does not know the adapter
    resumed = manager.request("r", A, adapter=began, output_token_ids=[5])
    manager.end(A, 1, digest="a1")
    assert "have changed since the request began" in str(manager.get_error(resumed))


def test_sleep_makes_all_adapters_cold() -> None:
    manager = Manager()
    load(manager, A, B)
    manager.pin_lora(2)
    kept = manager.request("r", A)
    manager.start(kept)
    kept.status = RequestStatus.PREEMPTED
    manager.note_left(kept)
    loading = manager.add_lora(C)
    manager.take_results()
    manager.sleep()
    assert manager.loaded() == []
    manager.end(C)
    assert loading.done()
    assert manager.loaded() == [], "what ends to load is not kept either"
    with pytest.raises(ClientError, match="wake_up"):
        manager.add_lora(A)
    manager.take_results()
    assert not manager.worker.loading
    manager.wake_up()
    assert list(manager.worker.loading) == [(2, 1)], "the pinned one"
    assert not manager.is_ready(kept)
    manager.end(A)
    manager.start(kept)

"""The order of loads, memory and places of adapters."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.lora.memory import MAX_WAIT_S, AdapterMemory, AdapterPlaces, LoadQueue
from quire.engine.lora.registry import Revision
from quire.errors import AdapterError
from quire.lora_request import LoRARequest

from ..harness import make_request


def revision(lora_id: int, num_bytes: int = 0, number: int = 1, **fields: object) -> Revision:
    made = Revision(LoRARequest(f"a{lora_id}", lora_id, f"/{lora_id}"), number)
    made.num_bytes = num_bytes
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def filled(max_bytes: int, *held: Revision, max_adapters: int | None = None) -> AdapterMemory:
    memory = AdapterMemory(max_bytes, max_adapters)
    for one in held:
        memory.put(one)
    return memory


# -- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "max_bytes", "max_adapters", "size", "staying", "victims"),
    [
        ([], 100, None, 100, [], []),
        ([40, 40], 100, None, 20, [], []),
        ([40, 40], 100, None, 21, [], [1]),
        ([40, 40], 100, None, 100, [], [1, 2]),
        ([40, 40], 100, None, 50, [1], [2]),  # the least recently used one is in use
        ([40, 40], 100, None, 61, [1], None),
        ([40, 40], 100, None, 30, [1, 2], None),
        ([10, 10], 100, 2, 10, [], [1]),
        ([10, 10], 100, 2, 10, [1], [2]),
        ([10, 10], 100, 2, 10, [1, 2], None),
        ([90, 5], 100, 2, 8, [], [1]),  # one eviction gives both
    ],
)
def test_victims(
    sizes: list[int], max_bytes: int, max_adapters: int | None, size: int, staying: list[int], victims: list[int] | None
) -> None:
    held = [revision(i, num_bytes) for i, num_bytes in enumerate(sizes, start=1)]
    memory = filled(max_bytes, *held, max_adapters=max_adapters)
    found = memory.choose_victims(size, lambda one: one.key[0] not in staying)
    assert (None if found is None else [one.key[0] for one in found]) == victims


def test_what_was_used_last_goes_last() -> None:
    one, two, three = held = [revision(i, 30) for i in (1, 2, 3)]
    memory = filled(100, *held)
    memory.touch(one)
    memory.touch(revision(9))  # one that is not here
    assert list(memory) == [two, three, one]
    memory.resize(two, 50)
    assert memory.num_bytes == 110
    assert memory.choose_victims(20, lambda _: True) == [two]
    memory.remove(two)
    assert (memory.num_bytes, len(memory), two in memory) == (60, 2, False)


@pytest.mark.parametrize(
    ("pinned", "max_adapters", "size", "words"),
    [
        ([], None, 101, "takes 101 bytes; all adapters together have 100: raise --lora-memory-bytes"),
        ([60], None, 41, "takes 41 bytes, and 60 of 100 are held by pinned adapters: remove one, or raise --lora-mem"),
        ([10, 10], 2, 10, "2 adapters are pinned, and --max-cpu-loras is 2; remove one, or raise it"),
    ],
)
def test_what_can_never_fit_is_refused_with_numbers(
    pinned: list[int], max_adapters: int | None, size: int, words: str
) -> None:
    held = [revision(i, num_bytes, is_pinned=True) for i, num_bytes in enumerate(pinned, start=1)]
    memory = filled(100, *held, revision(8, 5), max_adapters=max_adapters)
    with pytest.raises(AdapterError, match=words):
        memory.validate(revision(9, size))


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=12), st.integers(1, 120), st.integers(1, 8))
def test_victims_are_enough_and_no_more(held: list[tuple[int, bool]], size: int, max_adapters: int) -> None:
    revisions = [revision(i, num_bytes) for i, (num_bytes, _) in enumerate(held, start=1)]
    may_go = {one.key for one, (_, goes) in zip(revisions, held, strict=True) if goes}
    memory = AdapterMemory(120, max_adapters)
    for one in revisions:
        if memory.fits(one.num_bytes):
            memory.put(one)
    victims = memory.choose_victims(size, lambda one: one.key in may_go)
    kept = [one for one in memory if victims is None or one not in victims]
    if victims is None:
        assert all(one.key not in may_go for one in kept) or not memory.fits(
            size - sum(one.num_bytes for one in kept if one.key in may_go),
            1 - sum(one.key in may_go for one in kept),
        )
        return
    for one in victims:
        memory.remove(one)
    assert memory.fits(size)
    if victims:
        memory.put(victims[-1])
        assert not memory.fits(size), "the last one need not have gone"


# -- places ----------------------------------------------------------------------------------------------------

A, B, C = (1, 1), (2, 1), (3, 1)


def test_without_a_limit_every_adapter_starts() -> None:
    places = AdapterPlaces(None)
    for number in range(100):
        assert places.may_start((number, 1), 0.0, has_begun=False)
        places.enter((number, 1), make_request("a"))


def test_places_are_given_in_order_and_new_requests_wait_after_two_seconds() -> None:
    places = AdapterPlaces(1)
    first, second = make_request("a"), make_request("b")
    assert places.may_start(A, 0.0, has_begun=False)
    places.enter(A, first)
    places.enter(A, second)
    assert not places.may_start(B, 1.0, has_begun=False)
    assert not places.may_start(C, 1.5, has_begun=False)
    assert places.may_start(A, 1.0 + MAX_WAIT_S - 0.1, has_begun=False)
    assert not places.may_start(A, 1.0 + MAX_WAIT_S, has_begun=False)
    assert places.may_start(A, 1.0 + MAX_WAIT_S, has_begun=True), "one that has begun goes on"
    places.leave(A, first)
    assert not places.may_start(B, 4.0, has_begun=False)
    places.leave(A, second)
    places.leave(A, second)
    assert places.running == []
    assert not places.may_start(C, 4.0, has_begun=False), "B waits longer"
    assert not places.may_start(A, 4.0, has_begun=False)
    assert places.may_start(A, 4.0, has_begun=True)
    assert places.may_start(B, 4.0, has_begun=False)
    places.enter(B, first)
    assert (places.count_running(B), places.count_running(C)) == (1, 0)
    places.forget(C)
    assert places.may_start(B, 9.0, has_begun=False) is False, "A waits since 4.0"
    places.forget(A)
    assert places.may_start(B, 9.0, has_begun=False)


def test_an_adapter_that_is_not_in_memory_holds_no_place_free() -> None:
    absent = {B}
    places = AdapterPlaces(1, lambda key: key not in absent)
    request = make_request("a")
    places.enter(A, request)
    assert not places.may_start(B, 0.0, has_begun=False)
    assert places.may_start(A, 10.0, has_begun=False)
    places.leave(A, request)
    assert places.may_start(C, 10.0, has_begun=False)
    absent.clear()
    assert not places.may_start(C, 10.0, has_begun=False), "it is back, and waits longest"


# -- the order of loads ----------------------------------------------------------------------------------------


def test_loads_begin_in_order_and_pinned_ones_when_no_other_waits() -> None:
    queue = LoadQueue()
    one, two, pinned = (revision(i) for i in (1, 2, 3))
    queue.add(one)
    queue.add(two)
    queue.add_later([pinned], 5.0)
    assert queue.first(5) == [one, two]
    assert queue.take_later(9.0) is None, "others wait"
    queue.note_waiting(1.0)
    queue.note_waiting(2.0)
    assert not queue.waits_too_long(1.0 + MAX_WAIT_S - 0.1)
    assert queue.waits_too_long(1.0 + MAX_WAIT_S)
    queue.remove(two)
    assert queue.waits_too_long(9.0)
    queue.remove(one)
    assert not queue.waits_too_long(9.0), "the one that waited is gone"
    assert queue.take_later(4.9) is None
    queue.begin(one)
    assert (queue.num_busy, one.is_busy, queue.take_later(5.0)) == (1, True, None)
    done: Future[int] = Future()
    queue.results.put((one, done))
    assert list(queue.take_results()) == [(one, done)]
    assert queue.take_later(5.0) is pinned
    assert queue.take_later(5.0) is None


def test_a_cold_adapter_is_small() -> None:
    import sys

    one = Revision(LoRARequest("a" * 40, 1, "/adapters/" + "a" * 80), 1, "d" * 64)
    parts = (one, one.request, one.request.lora_name, one.request.lora_path, one.digest, one.key, one.waiters)
    assert sum(map(sys.getsizeof, parts)) < 1024

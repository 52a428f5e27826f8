"""Stored responses: never beyond the limits, never visible to another key, the oldest dropped first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.errors import NotFoundError, OverloadedError, ValidationError
from quire.frontend.openai.responses.store import OVERHEAD, ResponseStore, StoredResponse
from tests.seeds import examples

MAX_NUM, MAX_BYTES = 5, 6 * OVERHEAD
OWNERS = st.sampled_from([b"a", b"b", b"c"])


def stored(owner: bytes, response_id: str, size: int = 0) -> StoredResponse:
    response = StoredResponse(owner, response_id)
    response.body = b"x" * size
    return response


class Store(RuleBasedStateMachine):
    """Random operations beside the plainest model: a list of what was put in, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(MAX_NUM, MAX_BYTES)
        self.running: list[StoredResponse] = []
        self.put_order: dict[bytes, list[str]] = {}
        self.number = 0

    def next_id(self) -> str:
        self.number += 1
        return f"r{self.number}"

    def kept(self, owner: bytes) -> list[str]:
        found = []
        for response_id in self.put_order.get(owner, ()):
            try:
                self.store.get(owner, response_id)
            except NotFoundError:
                continue
            found.append(response_id)
        return found

    @rule(owner=OWNERS, size=st.integers(0, 7 * OVERHEAD))
    def put(self, owner: bytes, size: int) -> None:
        response = stored(owner, self.next_id(), size)
        if self.store.put(response):
            self.put_order.setdefault(owner, []).append(response.response_id)

    @rule(owner=OWNERS)
    def begin(self, owner: bytes) -> None:
        response = stored(owner, self.next_id())
        try:
            self.store.begin(response)
        except OverloadedError:
            assert len(self.running) + 1 > MAX_NUM or self.store.num_bytes + OVERHEAD > MAX_BYTES
        else:
            self.running.append(response)

    @rule(data=st.data(), size=st.integers(0, 2 * OVERHEAD))
    def grow(self, data: st.DataObject, size: int) -> None:
        if self.running:
            self.store.grow(data.draw(st.sampled_from(self.running)), size)

    @rule(data=st.data(), size=st.integers(0, 2 * OVERHEAD))
    def finish(self, data: st.DataObject, size: int) -> None:
        if self.running:
            response = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            response.body = b"x" * size
            if self.store.finish(response):
                self.put_order.setdefault(response.owner, []).append(response.response_id)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.running:
            response = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.store.delete(response.owner, response.response_id)
            assert self.store.grow(response, 10)
            assert self.store.finish(response)

    @invariant()
    def it_is_bounded_and_counts_right(self) -> None:
        store = self.store
        kept = [store.get(owner, i) for owner in (b"a", b"b", b"c") for i in self.kept(owner)]
        assert store.num_responses == len(kept) + len(self.running) <= MAX_NUM
        assert store.num_bytes <= MAX_BYTES
        assert store.num_bytes == sum(r.size for r in kept) + sum(store._bytes_of_running.values())

    @invariant()
    def the_oldest_go_first(self) -> None:
        for owner, order in self.put_order.items():
            kept = self.kept(owner)
            assert kept == order[len(order) - len(kept) :]

    @invariant()
    def what_runs_stays(self) -> None:
        for response in self.running:
            assert self.store.get(response.owner, response.response_id) is response


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=examples(60), stateful_step_count=30)


def test_who_keeps_most_loses_first() -> None:
    store = ResponseStore(4, 1 << 20)
    store.put(stored(b"quiet", "q"))
    for number in range(20):
        store.put(stored(b"loud", f"l{number}"))
    assert store.get(b"quiet", "q")
    assert store.get(b"loud", "l19")
    with pytest.raises(NotFoundError):
        store.get(b"loud", "l0")


def test_nothing_follows_what_has_not_ended() -> None:
    with pytest.raises(ValidationError, match="not come to an answer"):
        stored(b"", "x").get_conversation()

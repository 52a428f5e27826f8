"""Stored responses of several processes: each is found from each, and is its key's own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.errors import NotFoundError, ValidationError
from quire.frontend.http.membership import Membership, Peers
from quire.frontend.openai.responses.store import (
    OPERATIONS,
    LocalResponses,
    ResponseStore,
    ServerResponses,
    StoredResponse,
)


class Neighbours(Peers):
    """The responses of all processes, called as over a wire: what crosses is JSON or bytes."""

    def __init__(self) -> None:
        self.locals: dict[int, LocalResponses] = {}
        self.calls: list[tuple[int, str]] = []

    async def call(self, index: int, method: str, *args: Any) -> Any:
        self.calls.append((index, method))
        local = self.locals[index]
        if method == "response_events":
            return await local.events_from(*args)
        return await OPERATIONS[method](local, *args)


class Server:
    """Two processes."""

    def __init__(self) -> None:
        self.peers = Neighbours()
        self.members = {i: Membership(i, 2, self.peers) for i in (1, 2)}
        self.stores = {i: ResponseStore(8, 1 << 20) for i in (1, 2)}
        self.peers.locals = {i: LocalResponses(store) for i, store in self.stores.items()}
        self.responses = {i: ServerResponses(self.peers.locals[i], self.members[i]) for i in (1, 2)}

    def keep(self, index: int) -> StoredResponse:
        stored = StoredResponse(b"me", self.responses[index].make_id())
        stored.body, stored.conversation = b'{"n":1}', b'[{"role":"user"}]'
        self.stores[index].put(stored)
        return stored

    def begin(self, index: int) -> StoredResponse:
        stored = StoredResponse(b"me", self.responses[index].make_id())
        stored.is_background, stored.events = True, []
        stored.describe = lambda: {"status": "in_progress"}
        self.stores[index].begin(stored)
        return stored


@pytest.mark.parametrize("asked", [1, 2])
def test_it_is_found_by_every_process_and_for_its_owner_only(asked: int) -> None:
    async def run() -> None:
        server = Server()
        shelf = server.responses[asked]
        for home in (1, 2):
            response_id = server.keep(home).response_id
            assert json.loads(await shelf.call("show_response", b"me", response_id)) == {"n": 1}
            assert json.loads(await shelf.call("conversation", b"me", response_id)) == [{"role": "user"}]
            for operation in OPERATIONS:
                with pytest.raises(NotFoundError):
                    await shelf.call(operation, b"other", response_id)
            with pytest.raises(ValidationError, match="background: true can be cancelled"):
                await shelf.call("cancel_response", b"me", response_id)
            with pytest.raises(ValidationError, match="stream: true are kept"):
                await shelf.follow(b"me", response_id, 0)
            await shelf.call("delete_response", b"me", response_id)
            with pytest.raises(NotFoundError):
                await shelf.call("show_response", b"me", response_id)
        assert {index for index, _ in server.peers.calls} == {3 - asked}, "nobody asks itself"

    asyncio.run(run())


@pytest.mark.parametrize("asked", [1, 2])
def test_events_are_followed_from_anywhere(asked: int) -> None:
    async def run() -> None:
        server = Server()
        stored = server.begin(1)
        assert stored.events is not None
        stored.events += [b"e0", b"e1", b"e2"]
        events = await server.responses[asked].follow(b"me", stored.response_id, 1)
        seen = [await anext(events), await anext(events)]
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        stored.events.append(b"e3")
        stored.note_news()
        seen.append(await waiting)
        stored.events.append(b"e4")
        stored.describe = None
        stored.note_news()
        seen += [event async for event in events]
        assert seen == [b"e1", b"e2", b"e3", b"e4"]

    asyncio.run(run())


def test_ids_of_a_single_process_tell_nothing_and_foreign_ones_lead_nowhere() -> None:
    assert ServerResponses(LocalResponses(ResponseStore(1, 1)), Membership()).make_id().count("_") == 1

    async def run() -> None:
        server = Server()
        for response_id in ("resp_3_x", "resp_0_x", "resp_999999999999999_x", "resp_x", "", "resp_1_" + "x" * 10_000):
            with pytest.raises(NotFoundError):
                await server.responses[1].call("show_response", b"me", response_id)
        assert not server.peers.calls

    asyncio.run(run())

"""Calls that an API process answers for the others and its parent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec
import pytest

from quire.errors import NotFoundError, ValidationError
from quire.frontend.client.engine_set import EngineSet
from quire.frontend.client.mp import AsyncMPClient
from quire.frontend.client.shared_links import MemberLink
from quire.frontend.fleet.crash_attribution import decode_suspects
from quire.frontend.fleet.proc import PeerServices
from quire.frontend.http.server import StopRequests
from quire.frontend.http.state import ServerState
from quire.frontend.metrics.collect.facts import Load
from quire.frontend.metrics.publish.snapshot import ProcessReport
from quire.frontend.openai.responses.store import LocalResponses, ResponseStore, StoredResponse
from quire.wire.peers import PeerMessage
from tests.unit.frontend.client.model_core import make_ready, make_request
from tests.unit.frontend.metrics.books import Books

T = TypeVar("T")


class Process:
    """The services of a process without the process, and the calls that they made."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.stop = StopRequests()
        self.link = MemberLink(1)
        self.responses = ResponseStore(8, 1 << 20)
        state = SimpleNamespace(
            engine=SimpleNamespace(
                abort=self._note("abort"),
                pipeline=SimpleNamespace(stats=SimpleNamespace(note_load=self.heard.append)),
            ),
            metrics=SimpleNamespace(take=Books("1").take),
            watch=SimpleNamespace(look_here=lambda *args: ["seen", *args]),
            part=lambda kind: SimpleNamespace(local=LocalResponses(self.responses)),
        )
        client = SimpleNamespace(
            engines=EngineSet([self.link]),
            ask_link=_at_once,
            note_gone=lambda reason, engine: self.heard.append(("gone", reason)),
        )
        self.services = PeerServices(cast("ServerState", state), cast("AsyncMPClient", client), self.stop)

    def _note(self, name: str) -> Callable[..., Any]:
        async def note(*args: Any) -> Any:
            self.heard.append((name, *args))
            return f"{name} was done"

        return note

    def ask(self, method: str, *args: Any) -> Any:
        return asyncio.run(self.services.handle(PeerMessage(1, method, args=args)))


def _at_once(command: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(command())
    return future


def test_a_report_is_given_for_the_load() -> None:
    process = Process()
    report = msgspec.msgpack.decode(process.ask("report", [0.5, 3, 2, 0.75]), type=ProcessReport)
    assert report.facts.num_processes == {"answered": 1}
    assert process.heard == [Load(0.5, 3, 2, 0.75)]


def test_each_call_reaches_what_does_it() -> None:
    process = Process()
    assert process.ask("abort", ["a", "b"]) is None
    assert process.ask("watch", ["a"], 7) == ["seen", ["a"], 7]
    assert process.ask("core_gone", "it is used up") is None
    assert process.heard == [("abort", ["a", "b"]), ("gone", "it is used up")]


def test_calls_for_a_stored_response_reach_it() -> None:
    process = Process()
    stored = StoredResponse(b"owner", "id")
    stored.body, stored.conversation = b'{"n":1}', b"[]"
    process.responses.put(stored)
    assert process.ask("show_response", b"owner", "id") == b'{"n":1}'
    assert process.ask("conversation", b"owner", "id") == b"[]"
    with pytest.raises(ValidationError, match="background: true can be cancelled"):
        process.ask("cancel_response", b"owner", "id")
    with pytest.raises(ValidationError, match="stream: true are kept"):
        process.ask("response_events", b"owner", "id", 0, 0.0)
    assert process.ask("delete_response", b"owner", "id") == b""
    with pytest.raises(NotFoundError):
        process.ask("show_response", b"owner", "id")


def test_what_is_no_call_is_refused() -> None:
    with pytest.raises(NotFoundError, match="no call 'handle'"):
        Process().ask("handle")
    with pytest.raises(TypeError):
        Process().ask("abort")


def test_the_wish_to_end_and_the_hurry() -> None:
    process = Process()
    for _ in range(2):
        process.ask("stop", False)
        assert process.stop.asked.is_set()
        assert not process.stop.hurried.is_set(), "asked twice is not hurried: a signal may have come, too"
    process.ask("stop", True)
    assert process.stop.hurried.is_set()


def test_a_death_is_answered_with_suspects_and_a_verdict_carried_out() -> None:
    process = Process()
    link = process.link
    link.on_ready(make_ready(0))
    for name in ("a", "b", "c"):
        link.add_request(make_request(name))
    assert process.ask("core_died", 0, 1, "crash", "exited", ["a"], False) == [], "that one we never knew"
    encoded = process.ask("core_died", 0, 0, "crash", "exited with code 1", ["b", "theirs"], False)
    assert [suspect.request.request_id for suspect in decode_suspects(encoded)] == ["b~t", "c~t", "a~t"]
    process.ask("convict", 0, "b~t", "it kills")
    process.ask("convict", 0, "theirs", "it kills")
    ((end,),) = [outputs.outputs for outputs in link.deliveries]
    assert (end.request_id, end.error_message) == ("b", "it kills")


def test_nobody_is_asked_who_was_in_no_step_of_a_core_that_was_killed() -> None:
    process = Process()
    process.link.on_ready(make_ready(0))
    process.link.add_request(make_request("a"))
    assert process.ask("core_died", 0, 0, "killed", "was killed by SIGKILL", ["a"], False) == []
    assert process.link.num_live_requests == 1

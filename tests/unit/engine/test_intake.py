"""Messages as they arrive: what becomes work, what an answer, and what is dropped."""

from __future__ import annotations

import logging
import queue
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.engine.heartbeat import HeartbeatWriter
from quire.engine.intake import DropCounter, InputItem, MessageIntake, RefusedRequest, UtilityCall
from quire.engine.request import Request
from quire.errors import ValidationError
from quire.wire.engine_core import EngineCoreRequest, EngineCoreRequestType
from quire.wire.heartbeat import HeartbeatPage
from quire.wire.serial import Frame, MsgpackEncoder

from .harness import make_core_request

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"


class Intake:
    """A MessageIntake and its queues."""

    def __init__(self) -> None:
        self.input_queue: queue.SimpleQueue[InputItem] = queue.SimpleQueue()
        self.aborts_queue: queue.Queue[str | list[str]] = queue.Queue()
        self.dropped = DropCounter()
        self.intake = MessageIntake(self.preprocess, self.input_queue, self.aborts_queue, self.dropped)
        self.prepared: list[EngineCoreRequest] = []

    def preprocess(self, request: EngineCoreRequest) -> tuple[Request, int]:
        self.prepared.append(request)
        return Request(request), request.current_wave

    def take(self, *frames: Frame, client_index: int = 0) -> list[InputItem]:
        self.intake.take_message(client_index, frames)
        items = []
        while not self.input_queue.empty():
            items.append(self.input_queue.get_nowait())
        return items


@pytest.fixture
def intake() -> Intake:
    return Intake()


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def test_a_request_is_prepared_before_it_is_queued(intake: Intake) -> None:
    (item,) = intake.take(ADD, pack(make_core_request("a", [1, 2, 3])))
    request_type, (request, wave) = item
    assert (request_type, request.request_id, wave) == (EngineCoreRequestType.ADD, "a", 0)
    assert request.prompt_token_ids == [1, 2, 3]


def test_answers_go_where_the_question_came_from(intake: Intake) -> None:
    ((_, (request, _)),) = intake.take(ADD, pack(make_core_request("a", client_index=0)), client_index=2)
    assert request.origin.client_index == 2
    ((_, call),) = intake.take(UTILITY, pack((0, 7, "profile", (True,))), client_index=1)
    assert call == UtilityCall(1, 7, "profile", (True,))


def test_arrays_come_in_frames_of_their_own(intake: Intake) -> None:
    request = make_core_request("a")
    request.prompt_embeds = np.arange(1000, dtype=np.float32).reshape(100, 10)
    frames = MsgpackEncoder().encode(request)
    assert len(frames) == 2
    intake.take(ADD, *frames)
    assert np.array_equal(intake.prepared[0].prompt_embeds, request.prompt_embeds)  # type: ignore[arg-type]


def test_an_abort_goes_into_both_queues(intake: Intake) -> None:
    assert intake.take(ABORT, pack(["a", "b"])) == [(EngineCoreRequestType.ABORT, ["a", "b"])]
    assert intake.aborts_queue.get_nowait() == ["a", "b"]


def test_a_request_that_cannot_be_prepared_fails_alone(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [ValidationError("it is too long"), KeyError()]

    def preprocess(request: EngineCoreRequest) -> tuple[Request, int]:
        raise errors.pop(0)

    intake.intake = MessageIntake(preprocess, intake.input_queue, intake.aborts_queue, intake.dropped)
    for message, kind in (("it is too long", "ValidationError"), ("KeyError", "")):
        ((_, refused),) = intake.take(ADD, pack(make_core_request("a")), client_index=1)
        assert refused == RefusedRequest(1, "a", message, kind)
    assert not intake.dropped.counts


def test_the_request_being_prepared_is_on_the_page(intake: Intake, tmp_path: Path) -> None:
    """If the process dies while it prepares a request, that request is known."""
    page = HeartbeatPage.create(tmp_path / "page")
    seen: list[str] = []

    def preprocess(request: EngineCoreRequest) -> tuple[Request, int]:
        seen.append(page.get_heartbeat().intake_id)
        if request.request_id == "b":
            raise ValueError("no")
        return Request(request), 0

    intake.intake = MessageIntake(
        preprocess, intake.input_queue, intake.aborts_queue, intake.dropped, HeartbeatWriter(page)
    )
    for request_id in ("a", "b"):
        intake.take(ADD, pack(make_core_request(request_id)))
        assert page.get_heartbeat().intake_id == ""
    assert seen == ["a", "b"]
    page.close()


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (b"",),
        (b"\x02", b"\xc0"),  # START_DP_WAVE: not from a client
        (b"\x04", b""),  # a sentinel of this process
        (b"\x05", b""),
        (b"\x09", b"\x90"),
        (b"\x00\x00", b"\x90"),
        (b"ENGINE_CORE_DEAD",),
    ],
)
def test_unknown_messages_are_counted(intake: Intake, frames: tuple[bytes, ...]) -> None:
    assert intake.take(*frames) == []
    assert intake.dropped.counts == {"unknown type": 1}


@pytest.mark.parametrize(
    "frames",
    [
        (ADD,),
        (ADD, b""),
        (ADD, b"\xc1"),
        (ADD, pack(make_core_request("a"))[:-3]),
        (ADD, pack({"request_id": "a"})),
        (ADD, b"\x91" * 100_000),
        (ABORT, pack("a")),
        (ABORT, pack([1])),
        (ABORT, pack(["a"]) + b"x"),
        (UTILITY, pack([0, 1, "sleep"])),
        (UTILITY, pack([0, "1", "sleep", []])),
        (UTILITY, pack([0, 1, "sleep", {}])),
    ],
)
def test_corrupt_messages_are_counted(intake: Intake, frames: tuple[bytes, ...]) -> None:
    assert intake.take(*frames) == []
    assert intake.aborts_queue.empty()
    assert intake.dropped.counts == {"corrupt": 1}


def test_a_request_that_is_none_is_answered_if_it_says_whose_it_is(intake: Intake) -> None:
    """Its frontend would wait for ever otherwise; the loop answers unless a request of that id lives."""
    ((request_type, refused),) = intake.take(ADD, pack(["a", "no tokens", None, None, 0.0]))
    assert request_type is EngineCoreRequestType.ADD
    assert (refused.client_index, refused.request_id) == (0, "a")
    assert "Expected `array | null`, got `str`" in refused.message
    assert intake.dropped.counts == {"corrupt": 1}


def test_the_log_is_not_flooded(caplog: pytest.LogCaptureFixture) -> None:
    dropped = DropCounter()
    with caplog.at_level(logging.WARNING, "quire"):
        for _ in range(1000):
            dropped.drop("corrupt", "detail")
    assert dropped.counts == {"corrupt": 1000}
    assert len(caplog.records) == 10  # 1, 2, 4, … 512

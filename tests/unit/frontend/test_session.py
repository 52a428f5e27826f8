"""A session comes back on a new core from what its journal kept, wherever the old one died."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.engine.request import Request
from quire.frontend.session import SessionRecord
from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason

from ..engine.harness import Engine, digest, make_core_request, make_scheduler


def make_inputs() -> list[EngineCoreRequest]:
    """A session of four segments that end in different ways, and the empty input that closes it."""
    stop = digest("", [1, 2, 3])
    later: dict[str, Any] = {"continues_session": True, "resumable": True}
    return [
        make_core_request("a", [1, 2, 3], resumable=True, max_tokens=4),
        make_core_request("a", [4], **later, max_tokens=1),
        make_core_request("a", [5] * 6, **later, max_tokens=9, stop_token_ids=[stop]),
        make_core_request("a", [6], **later, max_tokens=30),
        make_core_request("a", [], continues_session=True),
    ]


class Frontend:
    """Sends a session's inputs to one core after another, and keeps what it hears."""

    def __init__(self) -> None:
        self.record: SessionRecord | None = None
        self.heard: list[tuple[list[int], FinishReason | None, FinishReason | None]] = []
        self.start_core()

    def start_core(self) -> None:
        self.core = Engine(make_scheduler(max_model_len=40), digest)
        if self.record is not None:
            for request in self.record.make_requests():
                self._send(request)

    def _send(self, request: EngineCoreRequest) -> None:
        self.core.add(Request(request))

    def add(self, request: EngineCoreRequest) -> None:
        if self.record is None:
            self.record = SessionRecord(request)
        else:
            self.record.add_input(request)
        self._send(request)

    def step(self) -> None:
        self.core.step()
        for output in self.core.outputs.pop("a", []):
            self.hear(output)

    def hear(self, output: EngineCoreOutput) -> None:
        assert self.record is not None
        self.heard.append((output.new_token_ids, output.segment_finish_reason, output.finish_reason))
        self.record.take_in(output)
        self.is_over = output.finished

    def run(self) -> None:
        for _ in range(100):
            if not self.core.scheduler.has_requests():
                break
            self.step()


def undisturbed() -> list[tuple[list[int], FinishReason | None, FinishReason | None]]:
    frontend = Frontend()
    for request in make_inputs():
        frontend.add(request)
        frontend.run()
    assert frontend.is_over
    return frontend.heard


def tokens_and_ends(heard: list[tuple[list[int], FinishReason | None, FinishReason | None]]) -> list[object]:
    """Everything in order, whether or not an end came with its last token."""
    flat: list[object] = []
    for tokens, segment_end, end in heard:
        flat += [*tokens, *(e for e in (segment_end or end,) if e is not None)]
    return flat


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_or_said_twice_whenever_the_core_dies(seed: int) -> None:
    rng = random.Random(seed)
    frontend, waiting = Frontend(), make_inputs()
    num_deaths = 0
    while waiting or frontend.core.scheduler.has_requests():
        roll = rng.random()
        if waiting and (roll < 0.1 or not frontend.core.scheduler.has_requests()):
            frontend.add(waiting.pop(0))
        elif roll < 0.3:
            if rng.random() < 0.5:
                frontend.core.step()  # and nobody hears
            frontend.start_core()
            num_deaths += 1
        else:
            frontend.step()
    assert frontend.is_over
    assert frontend.core.scheduler.requests == {}
    whole = undisturbed()
    if whole[-1][0] == []:  # the empty input came while the session was at rest: the last reason is told once more
        closing = [(tokens, segment_end, end) for tokens, segment_end, end in frontend.heard if not tokens]
        assert len(closing) <= 1
        whole = whole[:-1]
        frontend.heard = [one for one in frontend.heard if one[0]]
    assert tokens_and_ends(frontend.heard) == tokens_and_ends(whole)


def test_a_segment_that_filled_the_old_context_is_over_in_a_larger_one() -> None:
    frontend = Frontend()
    frontend.add(make_core_request("a", [1] * 38, resumable=True))
    frontend.run()
    assert frontend.heard[-1][1] is FinishReason.LENGTH
    assert frontend.record is not None
    larger = Engine(make_scheduler(max_model_len=100), digest)
    for request in frontend.record.make_requests():
        larger.add(Request(request))
    assert not larger.scheduler.has_requests(), "it waits for input"


def test_an_unanswered_session_is_sent_as_it_was() -> None:
    first, second, *_ = make_inputs()
    record = SessionRecord(first)
    record.add_input(second)
    assert record.make_requests() == [first, second]


def test_inputs_of_one_token_keep_the_record_short() -> None:
    """A segment that has begun leaves one request with everything before it."""
    record = SessionRecord(make_core_request("a", [1], resumable=True, max_tokens=2))
    for token in range(2, 6):
        record.take_in(EngineCoreOutput("a", [70]))
        record.take_in(EngineCoreOutput("a", [71], segment_finish_reason=FinishReason.LENGTH))
        record.add_input(make_core_request("a", [token], resumable=True, continues_session=True, max_tokens=2))
    record.take_in(EngineCoreOutput("a", [72]))
    (request,) = record.make_requests()
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 70, 2, 70, 3, 70, 4, 70, 5], [72])

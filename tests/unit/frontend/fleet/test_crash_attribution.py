"""After a death of the core the parent collects all suspects before it admits a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from quire.frontend.client.shared_links import OwnerLink, Suspect
from quire.frontend.fleet import crash_attribution as crash_attribution
from quire.frontend.fleet.crash_attribution import CrashAttribution, decode_suspects, encode_suspects
from quire.frontend.supervision.quarantine import CoreDeath
from quire.wire.engine_core import EngineCoreRequestType
from tests.unit.frontend.client.model_core import make_ready, make_request

DEATH = CoreDeath("crash", "exited with code 3", ("a",))


class Court:
    """The crash attribution of an owner whose processes give the `answers`, by call."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []
        self.owner = OwnerLink(lambda: False)
        self.owner.on_ready(make_ready(0))
        self.owner.messages.clear()
        self.closed = asyncio.Event()
        """A report was answered."""
        self.attribution = CrashAttribution(self.owner, self._post, self._ask_all)

    def _post(self, command: Callable[[], None]) -> None:
        command()
        self.closed.set()

    async def _ask_all(self, method: str, *args: Any) -> Mapping[int, Any]:
        self.asked.append((method, *args))
        answer = self.answers.get(method, {})
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, list):
            return answer.pop(0)  # type: ignore[no-any-return]
        return answer  # type: ignore[no-any-return]

    async def _survive(self, *deaths: CoreDeath) -> None:
        running = asyncio.create_task(self.attribution.run())
        while self.owner.on_report is None:
            await asyncio.sleep(0)
        for number, death in enumerate(deaths, start=1):
            self.closed.clear()
            self.owner.on_death(death)
            await self.closed.wait()
            self.owner.on_ready(make_ready(number))
        running.cancel()
        await asyncio.wait([running])
        assert self.owner.on_report is None

    def survive(self, *deaths: CoreDeath) -> list[str]:
        """Returns what a core receives after these deaths: the ids of tried requests, and the control calls."""
        asyncio.run(self._survive(*deaths))
        return [
            m.payload.request_id if m.type is EngineCoreRequestType.ADD else m.payload[2] for m in self.owner.messages
        ]


def suspects(*names: str) -> Any:
    return encode_suspects(Suspect(make_request(name), 1, 0) for name in names)


def test_all_are_asked_and_the_first_suspect_tried() -> None:
    court = Court(core_died={1: suspects("a", "b"), 2: [], 3: suspects("c")})
    assert court.survive(DEATH) == ["a"]
    assert court.asked == [("core_died", 0, 0, "crash", "exited with code 3", ("a",), False, False)]
    assert court.owner.num_live_requests == 3


def test_a_verdict_is_told_first() -> None:
    court = Court(core_died=[{1: suspects("a")}, {1: []}])
    assert court.survive(DEATH, DEATH) == ["a", "admit_clients"]
    assert [call[0] for call in court.asked] == ["core_died", "convict", "core_died"]
    _, engine, request_id, message = court.asked[1]
    assert (engine, request_id) == (0, "a")
    assert "do not send it again unchanged" in message


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"core_died": {1: [], 2: []}},
        {"core_died": RuntimeError("surprise")},
        {"core_died": {1: [([b"\xc1"], 0, 0)]}},
        {"core_died": {1: [[1, 2]]}},
    ],
    ids=["nobody there", "nobody suspected", "a fault", "no request", "no suspect"],
)
def test_without_a_suspect_all_are_admitted(answers: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert Court(**answers).survive(DEATH) == ["admit_clients"]


def test_suspects_are_the_same_on_the_other_side() -> None:
    embeds = np.arange(600, dtype=np.float32).reshape(30, 20)
    request = make_request("a", prompt_embeds=embeds, output_token_ids=[1, 2], external_req_id="theirs")
    (suspect,) = decode_suspects(encode_suspects([Suspect(request, 2, 3)]))
    assert suspect[1:] == (2, 3)
    assert suspect.request.prompt_embeds is not None
    assert np.array_equal(suspect.request.prompt_embeds, embeds)
    assert suspect.request.output_token_ids == [1, 2]


def test_more_than_a_message_holds_goes_on_untried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = suspects("a", "b", "c")
    size = sum(len(frame) for frames, _, _ in whole[:2] for frame in frames)
    monkeypatch.setattr(crash_attribution, "MAX_SUSPECT_BYTES", size)
    assert suspects("a", "b", "c") == whole[:2]
    assert "more requests are suspected than can be tried: 2 are" in caplog.text

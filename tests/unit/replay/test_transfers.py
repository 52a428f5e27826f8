"""Recordings of engines with a store: a replay loads nothing, and decides the same again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.cli.main import main
from quire.engine.recording.format import ACCEPTED, LOADING, AnyEvent, Header, RecordingReader, Transfers
from quire.engine.request import RequestStatus
from quire.errors import ConfigError, GenerationError
from quire.replay.replay import Difference
from quire.replay.replay import replay as play
from quire.replay.step_times import StepTimes
from quire.replay.study import study
from quire.replay.what_if import predict
from quire.testing.fake_tier import FakeTier
from tests.unit.engine.recording.recorded import encode
from tests.unit.engine.sched.test_exchange import PROMPT, Engine, begin, filled, lease, tier

__all__ = ["filled", "tier"]

Events = list[AnyEvent]
Change = Callable[[Transfers], Transfers]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rec"


def read(engine: Engine, path: Path) -> tuple[Header, Events]:
    """The recording of an engine, which ends."""
    engine.worker.free()
    engine.core.shutdown()
    with path.open("rb") as file:
        reader = RecordingReader(file)
        return reader.header, list(reader.events())


def check(engine: Engine, path: Path) -> tuple[Header, Events]:
    """The same, once it was replayed."""
    header, events = read(engine, path)
    assert header.format == 2
    assert header.connector == "FakeTier"
    assert play(header, events) == (None, len(events))
    return header, events


def calls(events: Events) -> list[Any]:
    return [call for event in events if isinstance(event, Transfers) for call in event.calls]


def test_a_load_is_recorded_from_its_match_to_what_was_verified(filled: FakeTier, path: Path) -> None:
    engine = begin(filled, record=path)
    engine.finish()
    header, events = check(engine, path)
    (begun,) = [call for call in calls(events) if call.match]
    assert begun.match == (0, "disk", 28)
    assert [(kind, len(blocks)) for kind, _, blocks in begun.changes] == [(LOADING, 7)]
    (ended,) = [call for call in calls(events) if call.loaded]
    assert ended.loaded == [(0, "ok", 28)]
    assert [change[2] for change in ended.changes if change[0] == ACCEPTED] == [[7]]
    found = study(header, events)
    assert found.loads == {"ok": 1}
    assert found.num_loaded_tokens == found.requests[0].num_cached_tokens == 28


def test_loads_that_fail_in_a_part_or_are_given_up_replay(filled: FakeTier, path: Path) -> None:
    place, record = list(filled.records.items())[3]
    filled.records[place] = replace(record, slots=b"")
    engine = begin(filled, record=path)
    engine.finish()
    engine.worker.manners = ["wedged"]
    engine.core.scheduler.reset_prefix_cache()
    engine.add("b", max_tokens=2)
    engine.step(2)
    assert engine.status("b") is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert not engine.core.scheduler.reset_prefix_cache(), "a request waits for a load"
    engine.clock.now += 3
    engine.step()
    engine.clock.now += 3
    engine.worker.active.clear()
    engine.finish()
    header, events = check(engine, path)
    assert set(study(header, events).loads) == {"partial", "failed"}


def test_a_request_that_waits_for_the_load_of_another_replays(filled: FakeTier, path: Path) -> None:
    engine = begin(filled, record=path)
    engine.add("b", [*PROMPT[:17], 1, 2, 3])
    engine.step()
    engine.core.abort_requests(["a"])
    engine.requests.pop("a")
    engine.finish()
    _, events = check(engine, path)
    assert [call.ready for call in calls(events) if call.ready] == [[1], [1]], "and then for one of its own"


def test_leases_and_what_breaks_them_replay(tier: FakeTier, path: Path) -> None:
    engine = lease(tier, record=path, num_blocks=14)
    engine.add("b", [8] * 30, max_tokens=1)
    engine.step()
    assert engine.exchange._waits, "it waits for the blocks of the lease"
    engine.worker.free()
    engine.finish()
    check(engine, path)


def test_a_request_that_nothing_will_make_room_for_replays(filled: FakeTier, path: Path) -> None:
    engine = begin(filled, "wedged", record=path, num_blocks=12)
    engine.core.abort_requests(["a"])
    engine.requests.clear()
    engine.step()
    engine.clock.now += 10
    engine.step()
    engine.add("b", [8] * 30)
    engine.step()
    assert not engine.scheduler.requests
    _, events = check(engine, path)
    assert [event.unfit for event in events if isinstance(event, Transfers) and event.unfit] == [[1]]


def test_a_request_that_its_connector_fails_replays(filled: FakeTier, path: Path) -> None:
    engine = begin(filled, record=path)
    engine.exchange.connector.get_error = lambda request: GenerationError("it must load")  # type: ignore[method-assign]
    engine.move()
    engine.step()
    assert not engine.scheduler.requests
    _, events = check(engine, path)
    assert [event.errors for event in events if isinstance(event, Transfers) and event.errors] == [[0]]


# -- differences -----------------------------------------------------------------------------------------------


def other_blocks(transfers: Transfers) -> Transfers:
    (call,) = transfers.calls
    changes = [(kind, holder, blocks[::-1]) for kind, holder, blocks in call.changes]
    return Transfers(transfers.at, [msgspec.structs.replace(call, changes=changes)])


def another_request(transfers: Transfers) -> Transfers:
    (call,) = transfers.calls
    return Transfers(transfers.at, [msgspec.structs.replace(call, match=(1, "disk", 28))])


def too_many_tokens(transfers: Transfers) -> Transfers:
    (call,) = transfers.calls
    return Transfers(transfers.at, [msgspec.structs.replace(call, match=(0, "disk", 2800))])


def a_call_too_many(transfers: Transfers) -> Transfers:
    return Transfers(transfers.at, [*transfers.calls, msgspec.structs.replace(transfers.calls[0], number=99)])


def nothing(transfers: Transfers) -> Transfers:
    return Transfers(transfers.at)


@pytest.mark.parametrize("change", [other_blocks, another_request, too_many_tokens, a_call_too_many, nothing])
def test_what_is_no_load_of_this_engine_is_a_difference(change: Change, filled: FakeTier, path: Path) -> None:
    engine = begin(filled, record=path)
    engine.finish()
    header, events = read(engine, path)
    number = next(i for i, event in enumerate(events) if isinstance(event, Transfers))
    transfers = events[number]
    assert isinstance(transfers, Transfers)
    events[number] = change(transfers)
    difference, _ = play(header, events)
    assert isinstance(difference, Difference)
    assert difference.number == number + 2, "it is that of the step after it"


# -- reports ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_predicted_is_refused_and_the_rest_reported(
    filled: FakeTier, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = begin(filled, record=path)
    engine.finish()
    header, events = read(engine, path)
    path.write_bytes(encode(header, events))
    assert main(["replay", str(path)]) == 0
    text = capsys.readouterr().out
    assert "every decision is the same\nFakeTier was played back: loads ok 1; 28 tokens. Predictions are not" in text
    assert main(["replay", str(path), "--max-num-seqs", "2"]) == 2
    assert "with kv_connector 'FakeTier': a prediction does not know" in capsys.readouterr().err
    assert main(["replay", str(path), "--rerun", "demo"]) == 2
    with pytest.raises(ConfigError, match="a prediction does not know"):
        predict(study(header, events), StepTimes((0.0,) * 8, 0, 0.0, 0.0, 0.0))

"""A recording replays to the same decisions, to the last block id, whatever happened to the scheduler."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.recording.format import Add, End, Header, Step, StepDetails, Update
from quire.engine.request import Request
from quire.errors import ConfigError, ValidationError
from quire.pooling_params import PoolingParams
from quire.replay.replay import replay
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.execution import ModelRunnerOutput
from tests.seeds import examples, seeds
from tests.unit.engine.harness import Engine, make_request, make_scheduler
from tests.unit.engine.recording.recorded import FakeGrammar, encode, make_header, read, watch
from tests.unit.engine.sched.test_scheduler_random import Life


class RecordedLife(Life):
    """A random life, recorded. Some requests have grammars, some belong together (n > 1), some come twice."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.header = make_header(self.engine.scheduler, self.fields)
        self.engine.scheduler, self.events = watch(self.engine.scheduler)  # type: ignore[assignment]

    def add(self) -> None:
        rng = self.rng
        roll = rng.random()
        if roll < 0.25:
            request = make_request(f"g{len(self.expected)}", [1] * rng.randint(1, 20), max_tokens=rng.randint(1, 12))
            request.structured_output = FakeGrammar(random.Random(rng.random()))
            self.expected[request.request_id] = []
            self.engine.add(request)
        elif roll < 0.4:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 24))]
            number = len(self.expected)
            for i in range(3):
                self.expected[f"{i}_{number}"] = []
                self.engine.add(make_request(f"{i}_{number}", prompt, max_tokens=rng.randint(1, 12)))
        elif roll < 0.45 and self.engine.scheduler.requests:
            with pytest.raises(ValidationError):
                self.engine.add(make_request(next(iter(self.engine.scheduler.requests)), 4))
        else:
            super().add()


def live(seed: int, num_actions: int = 150) -> RecordedLife:
    life = RecordedLife(seed)
    for _ in range(num_actions):
        life.act()
    return life


@given(st.integers(0, 2**32))
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.too_slow])
def test_random_lives_replay(seed: int) -> None:
    life = live(seed)
    reader = read(encode(life.header, life.events))
    assert reader.header == life.header
    assert replay(reader.header, reader.events()) == (None, len(life.events))


@pytest.mark.fresh
def test_the_lives_have_everything_in_them() -> None:
    seen: Counter[str] = Counter()
    for seed in seeds(60):
        life = live(seed)
        seen["preemptions"] += life.num_preemptions
        for event in life.events:
            seen[type(event).__name__] += 1
            if isinstance(event, Step) and event.details is not None:
                seen["prefix hits"] += sum(computed > 0 for _, computed, _ in event.details.new)
                seen["ready"] += len(event.details.ready)
                seen["failed"] += len(event.details.failed)
                seen["drafts"] += len(event.details.drafts)
            if isinstance(event, Update):
                seen["several"] += sum(count > 1 for _, count in event.counts)
                seen["jumps"] += len(event.jumps)
                seen["broken"] += sum(reason == 3 for _, reason, _ in event.ends)
    for name in ("preemptions", "prefix hits", "ready", "failed", "drafts", "several", "broken", "jumps"):
        assert seen[name] > 10, seen
    assert {"Add", "End", "Step", "Update", "Drafts", "Abandon", "Reset"} <= set(seen)


def test_pooling_requests_replay() -> None:
    scheduler, events = watch(make_scheduler(max_num_batched_tokens=8))
    for i in range(3):
        origin = EngineCoreRequest(f"p{i}", [1] * (6 + i), None, PoolingParams(task="embed"), 0.0)
        scheduler.add_request(Request(origin))
    while scheduler.has_requests():
        output = scheduler.schedule()
        done = [r for r in scheduler.running if r.num_computed_tokens == r.num_tokens]
        result = ModelRunnerOutput(
            list(output.num_scheduled_tokens),
            [[] for _ in output.num_scheduled_tokens],
            pooler_output={r.request_id: np.zeros(2) for r in done},
        )
        scheduler.update_from_output(output, result)
    header = make_header(scheduler.observed, {"max_num_batched_tokens": 8})  # type: ignore[arg-type]
    assert replay(header, events) == (None, len(events))


# -- differences -----------------------------------------------------------------------------------------------------


def small() -> tuple[Header, list[Any]]:
    """Two requests, three steps each."""
    fields = {"enable_caching": True, "num_blocks": 20, "max_num_batched_tokens": 8}
    scheduler, events = watch(make_scheduler(**fields))  # type: ignore[arg-type]
    engine = Engine(scheduler)  # type: ignore[arg-type]
    engine.add(make_request("a", 10, max_tokens=3), make_request("b", 5, max_tokens=4))
    engine.run()
    return make_header(scheduler.observed, fields), events  # type: ignore[arg-type]


def test_the_first_difference_is_said() -> None:
    header, events = small()
    index = next(i for i, event in enumerate(events) if isinstance(event, Step) and event.details and i > 4)
    details = msgspec.structs.replace(events[index].details, finished=[1])
    events[index] = msgspec.structs.replace(events[index], details=details)
    difference, num_events = replay(header, events)
    assert difference is not None
    assert (difference.number, num_events, difference.kind) == (index + 1, index + 1, "step")
    assert "finished was [1], is" in str(difference)
    assert difference.seconds > 0


@pytest.mark.parametrize(
    ("field", "value"), [("digest", 1), ("num_tokens", 7), ("num_rows", 9), ("details", StepDetails(chunks=[(0, 3)]))]
)
def test_every_part_of_a_step_is_compared(field: str, value: object) -> None:
    header, events = small()
    index = next(i for i, event in enumerate(events) if isinstance(event, Step))
    events[index] = msgspec.structs.replace(events[index], **{field: value})
    difference, _ = replay(header, events)
    assert difference is not None
    assert difference.number == index + 1


def test_other_settings_decide_differently() -> None:
    header, events = small()
    other = msgspec.structs.replace(header, scheduler=type(header.scheduler)(max_num_batched_tokens=16, max_num_seqs=1))
    difference, _ = replay(other, events)
    assert difference is not None


def test_an_impossible_recording_is_a_difference_and_no_crash() -> None:
    header, events = small()
    for broken in ([events[-1]], [*events[:2], End(0, [77], 7, False)], [Update(0, 0)]):
        difference, _ = replay(header, broken)
        assert difference is not None
        assert "the replay fails" in difference.what


def test_a_recording_does_not_choose_what_code_is_run() -> None:
    header, events = small()
    scheduler = type(header.scheduler)(scheduler_cls="os:system", max_num_batched_tokens=8, max_num_seqs=2)
    with pytest.raises(ConfigError, match="os:system"):
        replay(msgspec.structs.replace(header, scheduler=scheduler), events)


def test_prompts_are_not_in_a_recording() -> None:
    """Neither tokens nor anything they could be tried against."""
    header, events = small()
    data = encode(header, events)
    request = make_request("a", 10)
    assert [event.prompt for event in events if isinstance(event, Add)] == [None, None]
    for block_hash in request.block_hashes:
        assert block_hash not in data
        assert block_hash[:16] not in data

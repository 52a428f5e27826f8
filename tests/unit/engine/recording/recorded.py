"""Recordings in memory, of the scheduler alone."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable
from typing import Any

import msgspec

from quire.engine.recording.format import (
    AnyEvent,
    Header,
    RecordingReader,
    encode_events,
    encode_header,
)
from quire.engine.recording.recorder import Recorder, keyed_digest
from quire.engine.request import Request
from quire.engine.sched.interface import AdmissionGate, ObservedScheduler
from quire.engine.sched.scheduler import Scheduler
from quire.engine.structured_output.request import GrammarVerdict, StructuredOutputRequest
from quire.errors import GenerationError
from quire.structured_outputs import StructuredOutputsParams


class TransparentScheduler(ObservedScheduler):
    """Tests look into the scheduler."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.observed, name)


class FakeGrammar(StructuredOutputRequest):
    """Is ready after it was asked for `waits` times; then begins as `start` says; breaks, jumps, ends at random."""

    __slots__ = ("rng", "start", "waits")

    def __init__(self, rng: random.Random) -> None:
        super().__init__(StructuredOutputsParams(json_object=True))
        self.rng = rng
        self.waits = rng.randint(0, 6)
        self.jumps = rng.random() < 0.5
        self.start = rng.choice([GrammarVerdict.GOES_ON] * 6 + [GrammarVerdict.BROKEN, GrammarVerdict.COMPLETE])

    def check_start(self) -> GrammarVerdict:
        if self.start is GrammarVerdict.BROKEN:
            self.error = GenerationError("it cannot be compiled")
        return self.start

    def accept(self, token_id: int) -> GrammarVerdict:
        verdict = self.rng.choice([GrammarVerdict.GOES_ON] * 6 + [GrammarVerdict.BROKEN, GrammarVerdict.COMPLETE])
        if verdict is GrammarVerdict.BROKEN:
            self.error = GenerationError("it is broken")
        return verdict

    def count_valid(self, token_ids: list[int]) -> int:
        return self.rng.randint(0, len(token_ids))

    def forced_token(self) -> int | None:
        return 1 if self.rng.random() < 0.5 else None


class FakeGrammars(AdmissionGate):
    """A structured-output manager."""

    def is_ready(self, request: Request) -> bool:
        grammar = request.structured_output
        if grammar is None:
            return True
        assert isinstance(grammar, FakeGrammar)
        grammar.waits -= 1
        return grammar.waits < 0

    def grammar_bitmask(self, requests: Any, scheduler_output: Any) -> None:
        return None


def make_header(scheduler: Scheduler, fields: dict[str, Any], **more: Any) -> Header:
    """Returns the header for a scheduler that the harness made with `fields`."""
    from quire.config.engine import SchedulerConfig
    from tests.unit.engine.harness import make_kv_cache_config

    own = ("num_blocks", "max_model_len", "enable_caching", "log_stats", "num_spec_tokens", "num_lookahead_tokens")
    config = {"max_num_batched_tokens": 64, "max_num_seqs": 16, **{k: v for k, v in fields.items() if k not in own}}
    return Header(
        quire="test",
        created_at=0.0,
        clock=0.0,
        model="test",
        scheduler=SchedulerConfig(**config),
        kv_cache=make_kv_cache_config(fields.get("num_blocks", 101)),
        max_model_len=fields.get("max_model_len", 200),
        enable_caching=fields.get("enable_caching", False),
        num_spec_tokens=fields.get("num_spec_tokens", 0),
        num_lookahead_tokens=fields.get("num_lookahead_tokens", 0),
        **more,
    )


def watch(scheduler: Scheduler, *, clock: Any = None) -> tuple[TransparentScheduler, list[AnyEvent]]:
    """The scheduler, recorded into a list."""
    events: list[AnyEvent] = []
    recorder = Recorder(events.append, keyed_digest(b"k" * 32), clock=0.0)
    grammars = recorder.watch_grammars(FakeGrammars())
    scheduler.structured_output_manager = grammars
    scheduler.waiting.gates = (grammars,)
    ticks = clock or _ticks()
    return TransparentScheduler(scheduler, [recorder], clock=lambda: next(ticks)), events


def _ticks() -> Any:
    now = 0.0
    while True:
        now += 0.001
        yield now


def encode(header: Header, events: Iterable[AnyEvent], frame: int = 10) -> bytes:
    """The bytes of a recording, `frame` events in each frame."""
    data, events = encode_header(header), list(events)
    for start in range(0, len(events), frame):
        part = events[start : start + frame]
        data += encode_events(len(part), b"".join(map(msgspec.msgpack.encode, part)))
    return data


def read(data: bytes) -> RecordingReader:
    """A reader of these bytes."""
    return RecordingReader(io.BytesIO(data))

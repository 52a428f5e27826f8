"""Replays a recording with the real scheduler and KV cache, without a model.

Requests have no text: a block's tokens are made from its recorded hash, so that shared prefixes stay shared. The
model's part is a length and a reason to end. The replayed scheduler has a recorder of its own, and its events must
equal those of the recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quire.config.engine import SchedulerConfig
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.recording.format import (
    HAS_GRAMMAR,
    HASH_BYTES,
    IS_POOLING,
    SKIPS_CACHE,
    Abandon,
    Add,
    AnyEvent,
    Drafts,
    End,
    Hashes,
    Header,
    Pause,
    Reset,
    Step,
    StepDetails,
    Transfers,
    Update,
)
from quire.engine.recording.recorder import Recorder
from quire.engine.request import Request, RequestStatus
from quire.engine.sched.drafts import DraftFitter
from quire.engine.sched.interface import AdmissionGate, ObservedScheduler, PauseState, StructuredOutputManager
from quire.engine.sched.scheduler import Scheduler
from quire.engine.structured_output.request import GrammarVerdict, StructuredOutputRequest
from quire.errors import ConfigError, GenerationError, QuireError
from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.replay.transfers import ReplayedExchange
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams
from quire.wire.engine_core import EngineCoreRequest, FinishReason
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.lora import NEVER

SCHEDULER = SchedulerConfig().scheduler_cls
STOP_TOKEN, BROKEN_TOKEN = -1, -2
"""Tokens that no vocabulary has: one ends the output, the grammar refuses the other."""
_NO_FORM = StructuredOutputsParams(json_object=True)


class ReplayedGrammar(StructuredOutputRequest):
    """A grammar that repeats its recorded behaviour."""

    __slots__ = ("forced", "start")

    def __init__(self) -> None:
        super().__init__(_NO_FORM)
        self.start = GrammarVerdict.GOES_ON
        self.jumps = True
        self.forced: list[int] = []
        """The tokens of the next jump, last first."""

    def check_start(self) -> GrammarVerdict:
        """Returns the recorded verdict of the admission."""
        if self.start is GrammarVerdict.BROKEN:
            self.error = GenerationError("as recorded")
        return self.start

    def accept(self, token_id: int) -> GrammarVerdict:
        """Refuses BROKEN_TOKEN; everything else ends the output in other ways."""
        if token_id != BROKEN_TOKEN:
            return GrammarVerdict.GOES_ON
        self.error = GenerationError("as recorded")
        return GrammarVerdict.BROKEN

    def count_valid(self, token_ids: list[int]) -> int:
        """Returns the number of all: the recording has only drafts that were allowed."""
        return len(token_ids)

    def forced_token(self) -> int | None:
        """Returns the next of `forced`."""
        return self.forced.pop() if self.forced else None


class ReplayedGrammars(AdmissionGate):
    """A manager whose ready grammars are those of the requests in `ready`."""

    def __init__(self) -> None:
        self.ready: set[str] = set()

    def is_ready(self, request: Request) -> bool:
        """Returns whether the recording has found the grammar ready by now."""
        return request.structured_output is None or request.request_id in self.ready

    def grammar_bitmask(self, requests: Sequence[Request], scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Returns no masks: nothing is sampled."""
        return None


class ReplayedAdapters(AdmissionGate):
    """The gate of adapters. Those of the requests in `absent` are not in memory, or have no place; those of `failed`
    cannot be loaded."""

    def __init__(self) -> None:
        self.absent: set[str] = set()
        self.failed: set[str] = set()
        self.rehashed: dict[str, bytes] = {}
        """Hashes of blocks that requests get when they are looked at, joined."""

    def is_ready(self, request: Request) -> bool:
        """Returns what the recording has found."""
        digests = self.rehashed.pop(request.request_id, None)
        if digests is not None:
            assert isinstance(request, ReplayedRequest)
            request.set_blocks(0, digests)
            request.block_hashes = []
            request.block_hashes = request.hash_blocks()
        return request.request_id not in self.absent

    def get_error(self, request: Request) -> QuireError | None:
        """Returns an error for one that could not be loaded."""
        return GenerationError("as recorded") if request.request_id in self.failed else None

    def note_left(self, request: Request) -> None:
        """Forgets a request that has ended."""
        if request.is_finished:
            self.absent.discard(request.request_id)
            self.failed.discard(request.request_id)
            self.rehashed.pop(request.request_id, None)


class ReplayedRequest(Request):
    """A request whose blocks have the hashes `blocks`, as far as they are known, and tokens that follow from these."""

    __slots__ = ("block_size", "blocks")

    def __init__(self, origin: EngineCoreRequest, block_size: int, has_grammar: bool) -> None:
        self.blocks: list[bytes] = []
        self.block_size = block_size
        super().__init__(origin, _take_block_hashes)
        if has_grammar:
            self.structured_output = ReplayedGrammar()

    def set_blocks(self, start: int, digests: bytes) -> None:
        """Sets the recorded hashes of the blocks from `start` on."""
        parts = range(0, len(digests), HASH_BYTES)
        self.blocks[start:] = [digests[i : i + HASH_BYTES] for i in parts]

    def hash_blocks(self) -> list[bytes]:
        """Returns the hashes of full blocks that have none yet, and makes their tokens from them."""
        first, stop = len(self.block_hashes), min(self.num_tokens // self.block_size, len(self.blocks))
        last = self.all_token_ids[-1] if self.all_token_ids else 0
        for index in range(first, stop):
            token = int.from_bytes(self.blocks[index][:7], "little")
            self.all_token_ids[index * self.block_size : (index + 1) * self.block_size] = [token] * self.block_size
        if last < 0:  # the scheduler has not seen yet that it ends the output; it is never computed
            self.all_token_ids[-1] = last
        return self.blocks[first:stop]


def _take_block_hashes(request: Request) -> list[bytes]:
    assert isinstance(request, ReplayedRequest)
    return request.hash_blocks()


class Difference(NamedTuple):
    """The first event in which a replay differs from the recording."""

    number: int
    """Number of the event in the recording, from 1."""
    seconds: float
    """Time after the start of the recording."""
    kind: str
    what: str

    def __str__(self) -> str:
        return f"event {self.number} ({self.kind}, {self.seconds:.6f} s after the start): {self.what}"


def make_scheduler(
    header: Header, grammars: StructuredOutputManager | None, gates: Sequence[AdmissionGate] = ()
) -> Scheduler:
    """Returns the real scheduler, as it was configured.

    Raises ConfigError for one that is not Quire's own: a file must not decide which code runs.
    """
    if header.scheduler.scheduler_cls != SCHEDULER:
        raise ConfigError(f"the recording is of scheduler {header.scheduler.scheduler_cls!r}; only {SCHEDULER} replays")
    return Scheduler(
        header.kv_cache,
        header.scheduler,
        max_model_len=header.max_model_len,
        enable_caching=header.enable_caching,
        log_stats=False,
        structured_output_manager=grammars,
        gates=gates,
        drafts=DraftFitter(
            header.num_spec_tokens, header.max_model_len, num_lookahead_tokens=header.num_lookahead_tokens
        )
        if header.num_spec_tokens
        else None,
        max_concurrent_steps=header.max_concurrent_steps,
        clock=lambda: 0.0,
    )


def make_request(event: Add, block_size: int) -> ReplayedRequest:
    """Returns the request of an arrival. One that had ended before it came ends again."""
    flags, skips = event.flags, bool(event.flags & SKIPS_CACHE) or None
    outputs = [0] * event.num_output_tokens
    if outputs and event.end in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_REPETITION):
        outputs[-1] = STOP_TOKEN
    is_pooling = bool(flags & IS_POOLING)
    params = SamplingParams(max_tokens=event.max_tokens, skip_reading_prefix_cache=skips)
    params.eos_token_id = STOP_TOKEN
    origin = EngineCoreRequest(
        request_id=event.request_id,
        prompt_token_ids=[0] * event.num_prompt_tokens,
        sampling_params=None if is_pooling else params,
        pooling_params=PoolingParams(skip_reading_prefix_cache=skips) if is_pooling else None,
        arrival_time=event.arrival_time,
        client_index=event.client_index,
        priority=event.priority,
        output_token_ids=outputs,
        lora_request=None if event.adapter is None else LoRARequest(event.adapter[0], 1),
    )
    request = ReplayedRequest(origin, block_size, bool(flags & HAS_GRAMMAR))
    request.adapter = None if event.adapter is None else (0, event.adapter[1])
    request.report.lora_start = NEVER  # the recorded hashes, and so the tokens, have the adapter
    return request


class Replayer:
    """Replays event after event: `apply` returns the difference, or None."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._block_size = min(header.kv_cache.block_sizes)
        self._grammars = ReplayedGrammars()
        self._adapters = ReplayedAdapters()
        self._emitted: list[AnyEvent] = []
        self._transfers: Transfers | None = None
        """The transfers of the next event."""
        recorder = Recorder(self._emitted.append, lambda digest: digest, clock=0.0)
        self.scheduler = make_scheduler(
            header, recorder.watch_grammars(self._grammars), [recorder.watch_adapters(self._adapters)]
        )
        self.live: dict[int, ReplayedRequest] = {}
        """Unfinished requests, by number."""
        self._exchange: ReplayedExchange | None = None
        if header.connector:
            self.scheduler.connect(recorder.watch_exchange(self._make_exchange))
        self._observed = ObservedScheduler(self.scheduler, [recorder], clock=lambda: 0.0)
        self.in_flight: deque[SchedulerOutput] = deque()
        """Steps whose results are not applied yet, oldest first."""
        self.num_new_tokens: dict[int, int] = {}
        """Tokens that the last update gave to each request, by number."""
        self._ids: list[str] = []
        self._numbers: dict[str, int] = {}
        self.num_events = 0
        self._microseconds = 0

    def _make_exchange(self, manager: KVCacheManager) -> ReplayedExchange:
        self._exchange = ReplayedExchange(manager, self.live)
        return self._exchange

    def apply(self, event: AnyEvent) -> Difference | None:
        """Applies an event of the recording to the scheduler."""
        self.num_events += 1
        self._microseconds += event.at + getattr(event, "took", 0)
        if isinstance(event, Transfers):
            self._transfers = event
            return None
        self._emitted.clear()
        if self._exchange is not None:
            self._exchange.expect(self._transfers or Transfers(0))
        why = ""
        try:
            self._apply(event)
        except (QuireError, LookupError, RuntimeError, ValueError, AssertionError) as e:
            why = f"the replay fails: {type(e).__name__}: {e}"
        if not why:
            why = self._compare(event)
        self._transfers = None
        if not why:
            return None
        return Difference(self.num_events, self._microseconds / 1e6, type(event).__name__.lower(), why)

    def take_ended(self) -> list[tuple[int, ReplayedRequest]]:
        """Returns the requests that have ended since the last call, by number, and forgets them."""
        ended = [(number, request) for number, request in self.live.items() if request.is_finished]
        for number, request in ended:
            del self.live[number]
            if self._numbers.get(request.request_id) == number:
                del self._numbers[request.request_id]
        return ended

    def _compare(self, event: AnyEvent) -> str:
        emitted = self._emitted
        if self._exchange is not None:
            transfers = emitted.pop(0) if emitted and isinstance(emitted[0], Transfers) else Transfers(0)
            why = describe_difference(self._transfers or Transfers(0), transfers)
            if why:
                return f"transfers: {why}"
        if len(emitted) != 1:
            return f"{len(emitted)} things happen instead"
        return describe_difference(event, emitted[0])

    def _apply(self, event: AnyEvent) -> None:
        match event:
            case Add():
                self._add(event)
            case End():
                ids = None if event.requests is None else [self._ids[i] for i in event.requests]
                self._observed.finish_requests(ids, RequestStatus(event.status), report=event.report)
            case Step():
                self._prepare(event.details or StepDetails())
                self.in_flight.append(self._observed.schedule())
            case Update():
                self._update(event)
            case Drafts():
                requests = [(self.live[index], count) for index, count in event.counts]
                drafts = [request.unsent_token_ids + [0] * count for request, count in requests]
                ids = [request.request_id for request, _ in requests]
                self._observed.update_draft_token_ids(DraftTokenIds(ids, drafts))
            case Abandon():
                self.in_flight.clear()
                self._observed.abandon_steps()
            case Reset():
                self._observed.reset_prefix_cache(event.reset_running_requests)
            case Pause():
                self._observed.set_pause_state(PauseState(event.state))

    def _add(self, event: Add) -> None:
        request = make_request(event, self._block_size)
        if event.is_accepted:
            if request.adapter is not None:
                self._adapters.absent.add(event.request_id)
            self.live[len(self._ids)] = request
            self._numbers[event.request_id] = len(self._ids)
            self._ids.append(event.request_id)
        if event.hashes is not None:
            self._set_hashes([event.hashes])
            request.block_hashes += request.hash_blocks()
        try:
            self._observed.add_request(request)
        except QuireError:
            if event.is_accepted:
                raise

    def _set_hashes(self, hashes: list[Hashes]) -> None:
        for index, start, digests in hashes:
            if index in self.live:
                self.live[index].set_blocks(start, digests)

    def _prepare(self, details: StepDetails) -> None:
        """Applies what came from outside while the step was scheduled."""
        self._grammars.ready |= {self._ids[index] for index in details.ready}
        for index, has_adapter in details.adapters:
            (self._adapters.absent.discard if has_adapter else self._adapters.absent.add)(self._ids[index])
        self._adapters.rehashed |= {self._ids[index]: digests for index, _, digests in details.hashes}
        others = [] if self._transfers is None else [*self._transfers.errors, *self._transfers.unfit]
        for index, status in details.failed:
            has_adapter = index in self.live and self.live[index].adapter is not None
            if status == RequestStatus.FINISHED_ERROR and has_adapter and index not in others:
                self._adapters.failed.add(self._ids[index])
            grammar = self.live[index].structured_output if index in self.live else None
            if isinstance(grammar, ReplayedGrammar):
                is_complete = status == RequestStatus.FINISHED_STOPPED
                grammar.start = GrammarVerdict.COMPLETE if is_complete else GrammarVerdict.BROKEN

    def _update(self, event: Update) -> None:
        if not self.in_flight:
            raise ConfigError("the recording has the result of a step that it does not have")
        output = self.in_flight.popleft()
        self._set_hashes(event.hashes)
        outputs = self._observed.update_from_output(output, self._make_result(output, event))
        self.num_new_tokens = {
            self._numbers[one.request_id]: len(one.new_token_ids)
            for batch in outputs.values()
            for one in batch.outputs
            if one.new_token_ids
        }

    def _make_result(self, output: SchedulerOutput, event: Update) -> ModelRunnerOutput:
        tokens = {request_id: [0] for request_id in output.num_scheduled_tokens}
        for index, count in event.counts:
            tokens[self._ids[index]] = [0] * count
        sampled = {request_id: len(ids) for request_id, ids in tokens.items()}
        for index, count in event.jumps:
            tokens[self._ids[index]] += [0] * count
        for index, reason, num_kept in event.ends:
            ids = tokens.get(self._ids[index], [])
            if 0 < num_kept <= len(ids) and reason != FinishReason.LENGTH:
                ids[num_kept - 1] = BROKEN_TOKEN if reason == FinishReason.ERROR else STOP_TOKEN
        for index, _ in event.jumps:
            grammar, ids = self.live[index].structured_output, tokens[self._ids[index]]
            if isinstance(grammar, ReplayedGrammar):
                count = sampled[self._ids[index]]
                grammar.forced, tokens[self._ids[index]] = ids[count:][::-1], ids[:count]
        return ModelRunnerOutput(
            req_ids=list(tokens),
            sampled_token_ids=list(tokens.values()),
            pooler_output={self._ids[index]: np.zeros(1) for index in event.pooled},
        )


_SAME_END = {int(FinishReason.REPETITION): int(FinishReason.STOP)}
_SAME_STATUS = {int(RequestStatus.FINISHED_REPETITION): int(RequestStatus.FINISHED_STOPPED)}


def describe_difference(recorded: AnyEvent, replayed: AnyEvent) -> str:
    """Returns how two events differ, times aside; empty if they do not. A repetition ends a replayed output as a stop
    does."""
    if type(recorded) is not type(replayed):
        return f"recorded a {type(recorded).__name__.lower()}, replayed a {type(replayed).__name__.lower()}"
    one, other = _comparable(recorded), _comparable(replayed)
    parts = [f"{name} was {one[name]}, is {other[name]}" for name in one if one[name] != other[name]]
    return "; ".join(parts)


def _comparable(event: AnyEvent) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in ("at", "took", "prompt")}
    match event:
        case Add():
            fields["end"] = _SAME_STATUS.get(event.end, event.end)
        case Update():
            fields["ends"] = [(index, _SAME_END.get(reason, reason), kept) for index, reason, kept in event.ends]
        case Step():
            details = event.details or StepDetails()
            del fields["details"]
            fields |= msgspec.to_builtins(msgspec.structs.asdict(details))
            fields["failed"] = [[index, _SAME_STATUS.get(status, status)] for index, status in details.failed]
    return fields


def replay(header: Header, events: Iterable[AnyEvent]) -> tuple[Difference | None, int]:
    """Replays a recording. Returns (the first difference or None, number of events replayed)."""
    replayer = Replayer(header)
    for event in events:
        difference = replayer.apply(event)
        if difference is not None:
            return difference, replayer.num_events
        replayer.take_ended()
    return None, replayer.num_events

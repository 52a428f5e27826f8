"""Makes the events of a recording from calls of a scheduler. Knows nothing of files.

What follows from earlier events is left out: a step that only decodes is recorded as a digest, because the real
scheduler decides the same again. What comes from outside is recorded: arrivals, ends, lengths, which grammars were
ready.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

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
    Emit,
    End,
    Hashes,
    Pause,
    Reset,
    Step,
    StepDetails,
    Update,
)
from quire.engine.recording.transfers import WatchedExchange
from quire.engine.request import Request, RequestStatus
from quire.engine.sched.interface import (
    AdmissionGate,
    MakeExchange,
    NoExchange,
    PauseState,
    SchedulerObserver,
    StructuredOutputManager,
)
from quire.wire.engine_core import EngineCoreOutputs
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput

Digest = Callable[[bytes], bytes]
"""Returns the HASH_BYTES that stand for a block's hash in the recording."""


def keyed_digest(key: bytes) -> Digest:
    """Returns a digest under a secret key: equal hashes stay equal, and cannot be traced back to a prompt."""
    return lambda block_hash: blake2b(block_hash, digest_size=HASH_BYTES, key=key).digest()


class _Known:
    """A request with its number."""

    __slots__ = ("has_adapter", "index", "is_ready", "num_hashes", "request")

    def __init__(self, index: int, request: Request) -> None:
        self.index = index
        self.request = request
        self.num_hashes = 0
        """Number of block hashes that the recording has."""
        self.is_ready = request.structured_output is None
        self.has_adapter = request.adapter is None
        """True if its adapter was in memory, and had a place, as far as the recording says."""


class Recorder(SchedulerObserver):
    """Emits an event per call of the scheduler, in the order of the calls."""

    def __init__(self, emit: Emit, digest: Digest, *, clock: float, with_prompts: bool = False) -> None:
        self._write = emit
        self._digest = digest
        self._with_prompts = with_prompts
        self._clock = round(clock * 1e6)
        """Time of the last event, in microseconds."""
        self._known: dict[str, _Known] = {}
        """Requests by id: live ones, and those whose end the worker does not know yet."""
        self._replaced: list[_Known] = []
        """Ended requests whose id is in use again."""
        self._num_requests = 0
        self._ready: list[int] = []
        self._adapters: dict[str, bool] = {}
        """Last findings since the last step, by request id."""
        self._rehashed: dict[str, None] = {}
        """Requests whose blocks got other hashes since the last step."""
        self._encoder = msgspec.msgpack.Encoder()
        self._transfers: WatchedExchange | None = None
        """The exchange with stores; None: there is none."""

    def _emit(self, event: AnyEvent) -> None:
        if self._transfers is not None:
            transfers = self._transfers.take()
            if transfers is not None:
                self._write(transfers)
        self._write(event)

    # -- from outside --------------------------------------------------------------------------------------------

    def watch_grammars(self, manager: StructuredOutputManager | None) -> StructuredOutputManager | None:
        return None if manager is None else _WatchedGrammars(manager, self._note_ready)

    def _note_ready(self, request: Request) -> None:
        known = self._known.get(request.request_id)
        if known is not None and not known.is_ready:
            known.is_ready = True
            self._ready.append(known.index)

    def watch_adapters(self, gate: AdmissionGate) -> AdmissionGate:
        return _WatchedAdapters(gate, self._note_adapter)

    def _note_adapter(self, request: Request, has_adapter: bool, is_rehashed: bool) -> None:
        self._adapters[request.request_id] = has_adapter
        if is_rehashed:
            self._rehashed[request.request_id] = None

    def watch_exchange(self, make_exchange: MakeExchange) -> MakeExchange:
        def make(manager: KVCacheManager) -> NoExchange:
            exchange = self._transfers = WatchedExchange(make_exchange(manager), manager, self._number_of)
            return exchange

        return make

    def _number_of(self, request: Request) -> int:
        return self._known[request.request_id].index

    def on_add(self, request: Request, is_accepted: bool, now: float) -> None:
        origin = request.origin
        if is_accepted:
            if request.request_id in self._known:
                self._replaced.append(self._known[request.request_id])
            self._known[request.request_id] = _Known(self._num_requests, request)
            self._num_requests += 1
        params = origin.sampling_params
        flags = (
            (SKIPS_CACHE if request.skip_reading_prefix_cache else 0)
            | (HAS_GRAMMAR if request.structured_output is not None else 0)
            | (IS_POOLING if params is None else 0)
        )
        prompt = origin.prompt_token_ids or []
        event = Add(
            at=self._passed(now),
            request_id=request.request_id,
            num_prompt_tokens=len(prompt),
            num_output_tokens=len(origin.output_token_ids),
            flags=flags,
            max_tokens=None if params is None else params.max_tokens,
            priority=request.priority,
            arrival_time=request.arrival_time,
            client_index=request.origin.client_index,
            is_accepted=is_accepted,
            prompt=prompt if self._with_prompts else None,
            adapter=None if request.lora_request is None else (request.lora_request.lora_name, request.lora_revision),
        )
        if is_accepted:
            event.hashes = self._take_hashes(self._known[request.request_id])
            event.end = _end_status(request)
        self._emit(event)

    def on_finish(
        self, request_ids: list[str] | None, status: RequestStatus, report: bool, ended: Sequence[str], now: float
    ) -> None:
        if request_ids is not None and not ended:
            return
        for request_id in ended:  # what the core has found of them between two steps is not found again by a replay
            self._adapters.pop(request_id, None)
            self._rehashed.pop(request_id, None)
        indices = None if request_ids is None else [self._known[request_id].index for request_id in ended]
        self._emit(End(self._passed(now), indices, int(status), report))

    def on_drafts(self, drafts: DraftTokenIds, now: float) -> None:
        found = [self._known[i] for i in dict.fromkeys(drafts.req_ids) if i in self._known]
        running = [one for one in found if one.request.status is RequestStatus.RUNNING]
        counts = [(one.index, len(one.request.spec_token_ids)) for one in running]
        if counts:
            self._emit(Drafts(self._passed(now), counts))

    def on_abandon(self, now: float) -> None:
        self._emit(Abandon(self._passed(now)))

    def on_reset(self, reset_running_requests: bool, done: bool, now: float) -> None:
        self._emit(Reset(self._passed(now), reset_running_requests, done))

    def on_pause(self, state: PauseState, now: float) -> None:
        self._emit(Pause(self._passed(now), int(state)))

    # -- steps ---------------------------------------------------------------------------------------------------

    def on_schedule(self, output: SchedulerOutput, start: float, end: float) -> None:
        cached = output.scheduled_cached_reqs
        tokens = output.num_scheduled_tokens
        rows = self._encoder.encode((tokens, cached.num_computed_tokens))
        step = Step(
            at=self._passed(start, end),
            took=round((end - start) * 1e6),
            digest=zlib.crc32(rows),
            num_rows=len(tokens),
            num_tokens=output.total_num_scheduled_tokens,
        )
        adapters = self._take_adapters() if self._adapters else []
        any_blocks = cached.new_block_ids.count(None) < len(cached.new_block_ids)
        if (
            step.num_tokens != step.num_rows
            or output.scheduled_new_reqs
            or any_blocks
            or output.finished_req_ids
            or output.preempted_req_ids
            or output.scheduled_spec_decode_tokens
            or self._ready
            or adapters
            or self._rehashed
        ):
            step.details = self._describe(output, adapters)
        self._emit(step)

    def _describe(self, output: SchedulerOutput, adapters: list[tuple[int, bool]]) -> StepDetails:
        known, cached = self._known, output.scheduled_cached_reqs
        # After abandoned steps the worker is sent again ends that the recording has.
        ended, self._replaced = self._replaced, []
        ended += [one for i in output.finished_req_ids if (one := known.get(i)) is not None and one.request.is_finished]
        ready, self._ready = self._ready, []
        details = StepDetails(
            chunks=[(known[i].index, count) for i, count in output.num_scheduled_tokens.items() if count != 1],
            new=[
                (known[new.req_id].index, new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs
            ],
            blocks=[
                (known[request_id].index, block_ids)
                for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True)
                if block_ids is not None
            ],
            finished=sorted(one.index for one in ended),
            preempted=sorted(known[i].index for i in output.preempted_req_ids if i in known),
            drafts=[(known[i].index, len(ids)) for i, ids in output.scheduled_spec_decode_tokens.items()],
            ready=ready,
            failed=sorted((one.index, _end_status(one.request)) for one in ended if _may_fail_to_start(one.request)),
            adapters=adapters,
            hashes=self._take_rehashed() if self._rehashed else [],
        )
        for one in ended:
            if known.get(one.request.request_id) is one:
                del known[one.request.request_id]
        return details

    def _take_adapters(self) -> list[tuple[int, bool]]:
        """Returns what has changed. Within a step an adapter may be found to have a place, and then to have lost it."""
        found, self._adapters = self._adapters, {}
        changed = []
        for request_id, has_adapter in found.items():
            known = self._known.get(request_id)
            if known is not None and known.has_adapter != has_adapter:
                known.has_adapter = has_adapter
                changed.append((known.index, has_adapter))
        return sorted(changed)

    def _take_rehashed(self) -> list[Hashes]:
        found, self._rehashed = [self._known[i] for i in self._rehashed if i in self._known], {}
        for known in found:
            known.num_hashes = 0
        return [hashes for known in found if (hashes := self._take_hashes(known)) is not None]

    def on_update(
        self,
        output: SchedulerOutput,
        model_output: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
        start: float,
        end: float,
    ) -> None:
        known = self._known
        update = Update(at=self._passed(start, end), took=round((end - start) * 1e6))
        sampled = model_output.sampled_token_ids
        num_sampled = dict(zip(model_output.req_ids, map(len, sampled), strict=True))
        if len(sampled) != len(output.num_scheduled_tokens) or any(len(ids) != 1 for ids in sampled):
            counts = dict.fromkeys(output.num_scheduled_tokens, 0)
            counts.update(num_sampled)
            update.counts = [(known[i].index, count) for i, count in counts.items() if count != 1 and i in known]
        if model_output.pooler_output:
            update.pooled = [
                known[request_id].index for request_id in model_output.pooler_output if request_id in known
            ]
        for batch in outputs.values():
            for one in batch.outputs:
                found = known.get(one.request_id)
                if found is None:
                    continue
                if found.request.structured_output is not None:
                    num_forced = len(one.new_token_ids) - num_sampled.get(one.request_id, 0)
                    if num_forced > 0:
                        update.jumps.append((found.index, num_forced))
                if one.finish_reason is not None:
                    update.ends.append((found.index, int(one.finish_reason), len(one.new_token_ids)))
                if len(found.request.block_hashes) != found.num_hashes:
                    hashes = self._take_hashes(found)
                    if hashes is not None:
                        update.hashes.append(hashes)
        self._emit(update)

    # -- blocks and time -----------------------------------------------------------------------------------------

    def _take_hashes(self, known: _Known) -> Hashes | None:
        """Returns the hashes that the recording does not have, or None."""
        now, start = known.request.block_hashes, known.num_hashes
        if len(now) == start:
            return None
        known.num_hashes = len(now)
        return known.index, start, b"".join(map(self._digest, now[start:]))

    def _passed(self, start: float, end: float | None = None) -> int:
        """Returns the microseconds from the last event to this one, which is over at `end`."""
        now = round(start * 1e6)
        passed, self._clock = now - self._clock, now if end is None else now + round((end - start) * 1e6)
        return passed


class _WatchedAdapters(AdmissionGate):
    """Forwards to the gate of adapters, and notes what the scheduler finds."""

    def __init__(self, gate: AdmissionGate, note: Callable[[Request, bool, bool], None]) -> None:
        self._note = note
        self._is_ready = gate.is_ready
        self.get_error = gate.get_error  # type: ignore[method-assign]
        self.note_admitted = gate.note_admitted  # type: ignore[method-assign]
        self.note_left = gate.note_left  # type: ignore[method-assign]
        self.add_stats = gate.add_stats  # type: ignore[method-assign]

    def is_ready(self, request: Request) -> bool:
        hashes = request.block_hashes
        is_ready = self._is_ready(request)
        if request.adapter is not None:
            self._note(request, is_ready, request.block_hashes is not hashes and bool(request.block_hashes))
        return is_ready


class _WatchedGrammars(AdmissionGate):
    """Forwards to a structured-output manager, and notes when the scheduler first finds a grammar to be ready."""

    def __init__(self, manager: StructuredOutputManager, note_ready: Callable[[Request], None]) -> None:
        self._manager = manager
        self._note_ready = note_ready

    def is_ready(self, request: Request) -> bool:
        is_ready = self._manager.is_ready(request)
        if is_ready and request.structured_output is not None:
            self._note_ready(request)
        return is_ready

    def grammar_bitmask(self, requests: Sequence[Request], scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        return self._manager.grammar_bitmask(requests, scheduler_output)


def _end_status(request: Request) -> int:
    """Returns the status of a request that has ended; 0 while it lives."""
    return int(request.status) if request.is_finished else 0


def _may_fail_to_start(request: Request) -> bool:
    """Returns whether the request may have ended because of its grammar, or of a cache that is too small for it."""
    return request.is_finished and (
        request.structured_output is not None or request.status is RequestStatus.FINISHED_ERROR
    )

"""The exchange of a recorded engine, with the stores absent: it does again what the recording says, call by call.

The scheduler and the KV cache are real. They ask as often as they did, and the loads get real blocks of this cache: the
replayed recorder compares all of it with the recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.engine.kv_cache.block import KVCacheBlocks
from quire.engine.kv_cache.manager import KVCacheManager, LoadingBlocks
from quire.engine.recording.format import ACCEPTED, LEASED, LOADING, PINNED, ExchangeCall, Transfers
from quire.engine.request import Request
from quire.engine.sched.interface import AdmissionGate, NoExchange
from quire.errors import GenerationError, QuireError
from quire.wire.execution import SchedulerOutput

_NO_CALL = ExchangeCall(-1)


class ReplayedExchange(NoExchange, AdmissionGate):
    """Plays the recorded calls back. What differs from the recording is found by those who compare."""

    def __init__(self, manager: KVCacheManager, live: Mapping[int, Request]) -> None:
        """`live` are the requests by number."""
        self.gates = (self,)
        self._manager, self._live = manager, live
        self._calls: dict[int, ExchangeCall] = {}
        self._num_calls = 0
        self._errors: set[Request] = set()
        self._blocked: set[Request] = set()
        self._loading: dict[int, tuple[Request, LoadingBlocks]] = {}
        """Loads by holder."""

    def expect(self, transfers: Transfers) -> None:
        """Sets what happens while the next event is applied."""
        self._calls = {call.number: call for call in transfers.calls}
        self._num_calls = 0
        self._errors = {self._live[index] for index in transfers.errors}

    def _play(self) -> ExchangeCall:
        """Returns the next call, after it has had its effects, but for the beginning of a load."""
        call = self._calls.get(self._num_calls, _NO_CALL)
        self._num_calls += 1
        held, blocks = self._manager.held, self._manager.block_pool.blocks
        for kind, holder, values in call.changes:
            if kind == PINNED:
                held.pin(holder, [blocks[i] for i in values])
            elif kind == LEASED:
                held.lease(holder, [[blocks[i] for i in values]])
            elif kind == ACCEPTED:
                request, loading = self._loading.pop(holder)
                self._manager.accept_loaded(holder, request, loading, values[0])
            elif kind != LOADING:
                self._loading.pop(holder, None)
                held.release(holder)
        for index, outcome, num_tokens in call.loaded:
            request = self._live[index]
            request.end_load()
            held.observer.on_loaded(request, num_tokens, outcome)
        self._blocked -= {self._live[index] for index in call.ready}
        return call

    def begins_load(
        self, request: Request, hits: KVCacheBlocks, num_hits: int, running: Sequence[Request], reserved_blocks: int
    ) -> bool:
        call = self._play()
        if call.match is not None:
            index, source, num_tokens = call.match
            (holder,) = [holder for kind, holder, _ in call.changes if kind == LOADING]
            num_blocks = num_tokens // self._manager.block_size
            loading = self._manager.allocate_loading(holder, request, hits, num_blocks)
            if loading is None or self._live.get(index) is not request:
                raise RuntimeError(
                    f"request {request.request_id} cannot load {num_tokens} tokens as request {index} did"
                )
            self._loading[holder] = request, loading
            self._manager.held.observer.on_match(request, source, num_tokens)
            request.await_load()
        if call.is_unusual:
            self._blocked.add(request)
        return call.is_unusual

    def make_room(self, request: Request) -> bool:
        return self._play().is_unusual

    def await_room(self, request: Request) -> bool:
        is_blocked = self._play().is_unusual
        if is_blocked:
            self._blocked.add(request)
        return is_blocked

    def let_go(self, *, loads_too: bool) -> bool:
        return not self._play().is_unusual

    def begin_round(self) -> None:
        self._play()

    def note_started(self, request: Request, num_hits: int, num_external: int) -> None:
        self._play()

    def on_sent(self, output: SchedulerOutput) -> None:
        self._play()

    def on_received(self, output: SchedulerOutput) -> None:
        self._play()

    def on_abandoned(self) -> None:
        self._play()

    # -- the gate ----------------------------------------------------------------------------------------------

    def is_ready(self, request: Request) -> bool:
        return request not in self._blocked

    def get_error(self, request: Request) -> QuireError | None:
        return GenerationError("as recorded") if request in self._errors else None

    def note_left(self, request: Request) -> None:
        self._play()
        self._blocked.discard(request)

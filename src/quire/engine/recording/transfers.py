"""Records what the exchange with stores does to the scheduler: its answers, and blocks that it takes and gives back.

What it decides follows from times and from what stores have, which a replay does not have: so its effects are recorded,
call by call. A call without any is left out, which are nearly all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from quire.engine.kv_cache.block import KVCacheBlock, KVCacheBlocks
from quire.engine.kv_cache.held import HeldState, TransferObserver
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.recording.format import ACCEPTED, LEASED, LOADING, PINNED, RELEASED, ExchangeCall, Transfers
from quire.engine.request import Request
from quire.engine.sched.interface import AdmissionGate, NoExchange
from quire.errors import QuireError
from quire.wire.execution import SchedulerOutput

_KINDS: dict[HeldState, int] = {"loading": LOADING, "pinned": PINNED, "leased": LEASED}


class WatchedExchange(NoExchange, AdmissionGate, TransferObserver):
    """Forwards to an exchange, and notes the effects of each call.

    `take` returns them. Calls that only ask, and those of the core, are not counted.
    """

    def __init__(self, exchange: NoExchange, manager: KVCacheManager, number_of: Callable[[Request], int]) -> None:
        """`number_of` returns the number of a request in the recording."""
        self.watched = exchange
        self.gates = (self,)
        self._gates = exchange.gates
        self._number_of = number_of
        self._taken = Transfers(0)
        self._call = ExchangeCall(0)
        self._blocked: dict[Request, None] = {}
        """Requests that wait at the exchange."""
        self._holders: dict[Hashable, int] = {}
        self._num_holders = 0
        manager.held.observer = self
        self.on_new_request = exchange.on_new_request  # type: ignore[method-assign]
        self.count_external = exchange.count_external  # type: ignore[method-assign]
        self.set_weights = exchange.set_weights  # type: ignore[method-assign]
        self.reset_store = exchange.reset_store  # type: ignore[method-assign]
        self.shutdown = exchange.shutdown  # type: ignore[method-assign]

    @property
    def connector(self) -> Any:
        """Returns the connector, where others look for it."""
        return getattr(self.watched, "connector", None)

    @property
    def has_news(self) -> bool:
        return self.watched.has_news

    def take(self) -> Transfers | None:
        """Returns what has happened since the last call; None: nothing."""
        taken, self._call.number = self._taken, 0
        if not (taken.calls or taken.errors or taken.unfit):
            return None
        self._taken = Transfers(0)
        return taken

    def _end_call(self, is_unusual: bool = False) -> None:
        call = self._call
        if self._blocked:
            ready = [request for request in self._blocked if request.is_finished or self.is_ready(request)]
            for request in ready:
                del self._blocked[request]
            call.ready = [self._number_of(request) for request in ready if not request.is_finished]
        if is_unusual or call.match or call.changes or call.loaded or call.ready:
            call.is_unusual = is_unusual
            self._taken.calls.append(call)
            self._call = ExchangeCall(call.number + 1)
        else:
            call.number += 1

    # -- what transfers do -------------------------------------------------------------------------------------

    def on_match(self, request: Request, source: str, num_tokens: int) -> None:
        self._call.match = self._number_of(request), source, num_tokens

    def on_loaded(self, request: Request, num_tokens: int, outcome: str) -> None:
        self._call.loaded.append((self._number_of(request), outcome, num_tokens))

    def on_held(self, holder: Hashable, state: HeldState, blocks: Sequence[KVCacheBlock]) -> None:
        number = self._holders[holder] = self._num_holders
        self._num_holders += 1
        self._call.changes.append((_KINDS[state], number, [block.block_id for block in blocks]))

    def on_accepted(self, holder: Hashable, num_blocks: int) -> None:
        self._call.changes.append((ACCEPTED, self._holders[holder], [num_blocks]))

    def on_released(self, holder: Hashable) -> None:
        self._call.changes.append((RELEASED, self._holders.pop(holder), []))

    # -- the scheduler's calls ---------------------------------------------------------------------------------

    def begin_round(self) -> None:
        self.watched.begin_round()
        self._end_call()

    def begins_load(
        self, request: Request, hits: KVCacheBlocks, num_hits: int, running: Sequence[Request], reserved_blocks: int
    ) -> bool:
        is_blocked = self.watched.begins_load(request, hits, num_hits, running, reserved_blocks)
        if is_blocked:
            self._blocked[request] = None
        self._end_call(is_blocked)
        return is_blocked

    def make_room(self, request: Request) -> bool:
        has_room = self.watched.make_room(request)
        self._end_call(has_room)
        return has_room

    def await_room(self, request: Request) -> bool:
        is_blocked = self.watched.await_room(request)
        if is_blocked:
            self._blocked[request] = None
        else:
            self._taken.unfit.append(self._number_of(request))
        self._end_call(is_blocked)
        return is_blocked

    def note_started(self, request: Request, num_hits: int, num_external: int) -> None:
        self.watched.note_started(request, num_hits, num_external)
        self._end_call()

    def on_sent(self, output: SchedulerOutput) -> None:
        self.watched.on_sent(output)
        self._end_call()

    def on_received(self, output: SchedulerOutput) -> None:
        self.watched.on_received(output)
        self._end_call()

    def on_abandoned(self) -> None:
        self.watched.on_abandoned()
        self._end_call()

    def let_go(self, *, loads_too: bool) -> bool:
        is_done = self.watched.let_go(loads_too=loads_too)
        self._end_call(not is_done)
        return is_done

    # -- the gate ----------------------------------------------------------------------------------------------

    def is_ready(self, request: Request) -> bool:
        return all(gate.is_ready(request) for gate in self._gates)

    def get_error(self, request: Request) -> QuireError | None:
        error = next(filter(None, (gate.get_error(request) for gate in self._gates)), None)
        if error is not None:
            self._taken.errors.append(self._number_of(request))
        return error

    def note_left(self, request: Request) -> None:
        for gate in self._gates:
            gate.note_left(request)
        self._end_call()

    def add_stats(self, stats: Any) -> None:
        for gate in self._gates:
            gate.add_stats(stats)

"""The adapters of an engine: which are known, which are in memory, and which requests wait for them.

An adapter is known by its id. What is loaded under it is a `Revision`; another load of the id makes another one. A
request is bound to the newest when it arrives, and ends on it, whatever is loaded meanwhile.

::

    COLD ──asked for──▶ LOADING ──▶ READY ──evicted, asleep──▶ COLD
                           │
                           └──▶ FAILED ──FAILURE_S later, or another add_lora──▶ COLD

* A revision that is pinned, or that a request has begun with, is never evicted. One that requests wait for is evicted
  only for another that has waited `MAX_WAIT_S`: else two adapters could evict each other for ever.
* A revision that is not the newest leaves memory, and is forgotten, with its last request.
* Numbers of revisions are never given again for other files under the same name and path: they are in the keys of the
  prefix cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from quire.config.lora import LoRAConfig
from quire.engine.executor.abstract import Executor
from quire.engine.lora.memory import AdapterMemory, AdapterPlaces, LoadQueue
from quire.engine.lora.registry import AdapterRegistry, AdapterState, Revision, removed
from quire.engine.request import Request
from quire.engine.sched.interface import AdmissionGate
from quire.errors import AdapterError, ClientError, GenerationError, QuireError, ValidationError
from quire.logger import init_logger
from quire.lora_request import LoRARequest
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad, RegisteredAdapter
from quire.wire.stats import AdapterStats, SchedulerStats

logger = init_logger(__name__)

MAX_LOADING = 2
"""Most loads that the executor has at once. The others wait here, where those that requests wait for come first."""
UNKNOWN = -1
"""Start of the adapter in a request before the adapter's first load."""
PINNED_DELAY_S = 0.25
"""Seconds after a restart before pinned adapters are loaded: those of the requests that go on come first."""


class AdapterManager(AdmissionGate):
    """Owns the registry of adapters, their memory budget and their places. Has no tensor and waits for nothing.

    `bind` and `unbind` may be called from any thread, everything else from the core's. The executor completes its
    Futures on threads of its own: those put the result into a queue and call `wake`, and `take_results` takes it in.
    """

    def __init__(
        self,
        config: LoRAConfig,
        executor: Executor,
        memory_bytes: int,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.memory = AdapterMemory(memory_bytes, config.max_cpu_loras)
        self.places = AdapterPlaces(config.max_loras, self._is_loaded)
        self.is_enabled = config.enable_lora
        self._executor = executor
        self._wake = wake
        self._lock = threading.RLock()
        self.registry = AdapterRegistry(lambda: self.clock(), self._give_up)
        self._queue = LoadQueue()
        self._blocked: dict[Request, float] = {}
        """Requests that wait for their adapter, and since when."""
        self._is_asleep = False
        self._stats = AdapterStats()

    # -- verbs -------------------------------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> Future[AdapterInfo]:
        """Loads an adapter. The Future ends when it is in memory; at once if it is already.

        With `load_inplace` its files are read again, as a new revision that replaces the present one when it is loaded.
        Raises ValidationError for an id that belongs to another name or path; the Future, what the load raises.
        """
        self._require_enabled()
        if self._is_asleep:
            raise ClientError("the engine sleeps without its weights and loads no adapter; call wake_up() first")
        future: Future[AdapterInfo] = Future()
        with self._lock:
            newest = self.registry.find_newest(lora_request, is_add=True)
            if newest is None:
                newest = self.registry.register(lora_request)
            elif lora_request.load_inplace:
                newest = self.registry.add(lora_request)
                newest.is_candidate = True
            if newest.state is AdapterState.READY:
                self.memory.touch(newest)
                future.set_result(newest.info)
            else:
                newest.waiters.append(future)
                self._ask_for(newest)
        return future

    def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter; requests that use it end on it. Returns False for an unknown id."""
        self._require_enabled()
        with self._lock:
            newest = self.registry.newest.pop(lora_id, None)
            if newest is None:
                return False
            for revision in [one for key, one in self.registry.revisions.items() if key[0] == lora_id]:
                revision.end_waiters(removed(revision))
                revision.is_candidate = False
                self.registry.retire(revision)
            self._start_loads()
            return True

    def pin_lora(self, lora_id: int) -> bool:
        """Loads an adapter, unless it is in memory, and keeps it there. Raises ValidationError for an unknown id."""
        self._require_enabled()
        with self._lock:
            newest = self.registry.newest.get(lora_id)
            if newest is None:
                raise ValidationError(f"no adapter has the id {lora_id}; add it first", param="lora_id", value=lora_id)
            newest.is_pinned = True
            self._ask_for(newest)
            return True

    def list_loras(self) -> set[int]:
        """Returns the ids of all known adapters, in memory or not."""
        self._require_enabled()
        with self._lock:
            return {i for i, newest in self.registry.newest.items() if newest.state is not AdapterState.FAILED}

    def register_loras(self, adapters: list[RegisteredAdapter]) -> None:
        """Makes the adapters of a core that has died known to this one. Reads nothing: pinned ones are loaded soon, the
        others when a request asks for them."""
        self._require_enabled()
        with self._lock:
            for adapter in adapters:
                if adapter.lora_request.lora_int_id in self.registry.newest:
                    continue
                revision = self.registry.register(adapter.lora_request, adapter.revision, adapter.digest)
                revision.is_pinned = adapter.is_pinned
            pinned = [one for one in self.registry.newest.values() if one.is_pinned]
            self._queue.add_later(pinned, self.clock() + PINNED_DELAY_S)

    def _require_enabled(self) -> None:
        if not self.is_enabled:
            raise ClientError("this engine serves no LoRA adapters; start it with --enable-lora", param="lora_request")

    def sleep(self) -> None:
        """Makes all adapters COLD: their memory is given back."""
        with self._lock:
            self._is_asleep = True
            for revision in self.memory:
                if revision.state is AdapterState.READY:
                    self._drop(revision)

    def wake_up(self) -> None:
        """Loads adapters again, when they are asked for. Idempotent."""
        if not self._is_asleep:
            return
        with self._lock:
            self._is_asleep = False
            self._queue.add_later([one for one in self.registry.newest.values() if one.is_pinned], self.clock())
            self._start_loads()

    # -- requests ----------------------------------------------------------------------------------------------

    def bind(self, origin: EngineCoreRequest) -> AdapterKey | None:
        """Returns the revision that a new request uses, and begins to load it; None: it has no adapter.

        A resumed request gets the revision that it began with. Raises ClientError where adapters are off, what the last
        load raised while a failure is remembered, and ValidationError for an id of another name or path.
        """
        lora = origin.lora_request
        if lora is None:
            return None
        self._require_enabled()
        with self._lock:
            revision = (
                self.registry.find_begun(lora, origin.adapter)
                or self.registry.find_newest(lora)
                or self.registry.register(lora)
            )
            if revision.state is AdapterState.FAILED and revision.error is not None:
                raise revision.error
            revision.num_bound += 1
            self._ask_for(revision, may_evict=False)
            return revision.key

    def find_start(self, origin: EngineCoreRequest, key: AdapterKey | None) -> int:
        """Returns the position of the first token that the bound revision applies to; `UNKNOWN` before its first load,
        after which `is_ready` finds it."""
        if key is None:
            return 0
        with self._lock:
            revision = self.registry.revisions[key]
            if origin.adapter is not None and origin.adapter.digest == revision.digest:
                return origin.adapter.find_start(origin.prompt_token_ids or [])
            return revision.info.find_start(origin.prompt_token_ids or []) if revision.info.rank else UNKNOWN

    def unbind(self, key: AdapterKey | None) -> None:
        """Undoes `bind` for a request that was refused afterwards."""
        if key is None:
            return
        with self._lock:
            revision = self.registry.revisions[key]
            revision.num_bound -= 1
            self.registry.forget_unused(revision)
            self._start_loads(may_evict=False)

    # -- loading -----------------------------------------------------------------------------------------------

    def _ask_for(self, revision: Revision, *, may_evict: bool = True) -> None:
        """Loads a cold revision as soon as there is room. Marks another as used."""
        if revision.state is AdapterState.COLD:
            self.registry.set_state(revision, AdapterState.LOADING)
            self._queue.add(revision)
            self._start_loads(may_evict=may_evict)
        self.memory.touch(revision)

    def take_results(self) -> None:
        """Takes in what the executor has done, and gives it the next loads. Cheap if there is nothing to do."""
        if not self.registry.revisions:
            return
        with self._lock:
            while True:
                for revision, future in self._queue.take_results():
                    self._take_result(revision, future)
                    self.registry.forget_unused(revision)
                self._start_loads()
                if self._queue.results.empty():
                    return

    def _take_result(self, revision: Revision, future: Future[int] | Future[AdapterInfo]) -> None:
        error = future.exception()
        if error is not None:
            self._fail(revision, error)
        elif isinstance(result := future.result(), int):
            revision.num_bytes = max(result, 1)
        else:
            self._take_loaded(revision, result)

    def _is_loaded(self, key: AdapterKey) -> bool:
        return self.registry.revisions[key].state is AdapterState.READY

    def _start_loads(self, *, may_evict: bool = True) -> None:
        """Gives the executor what there is room for, in the order in which it was asked for. One that has to wait for
        memory keeps those behind it waiting."""
        if self._is_asleep:
            return
        now = self.clock()
        later = self._queue.take_later(now)
        if later is not None and later.state is AdapterState.COLD:
            self.registry.set_state(later, AdapterState.LOADING)
            self._queue.add(later)
        while self._start_first(now, may_evict):
            pass

    def _start_first(self, now: float, may_evict: bool) -> bool:
        """Starts with the first ones. Returns whether one has failed, so that another is the first now."""
        is_next = True
        for revision in self._queue.first(MAX_LOADING):
            if self._queue.num_busy >= MAX_LOADING:
                break
            if revision.is_busy:
                is_next = False
            elif not revision.num_bytes:
                self._hand_over(revision, self._executor.measure_adapter(revision.request))
                is_next = False
            elif is_next:
                try:
                    self.memory.validate(revision)
                except AdapterError as e:
                    self._fail(revision, e)
                    self.registry.forget_unused(revision)
                    return True
                is_next = self._make_room(revision, now, may_evict)
                if is_next:
                    self._load(revision, now)
        return False

    def _load(self, revision: Revision, now: float) -> None:
        self._queue.remove(revision)
        self.memory.put(revision)
        revision.loading_since = now
        self._hand_over(revision, self._executor.load_adapter(AdapterLoad(revision.request, revision.key[1])))

    def _hand_over(self, revision: Revision, future: Future[int] | Future[AdapterInfo]) -> None:
        self._queue.begin(revision)

        def note_result(future: Future[int] | Future[AdapterInfo]) -> None:
            self._queue.results.put((revision, future))
            self._wake()

        future.add_done_callback(note_result)

    def _make_room(self, revision: Revision, now: float, may_evict: bool) -> bool:
        """Evicts what must go before a revision is loaded. Returns False if it has to wait for that."""
        is_urgent = self._queue.waits_too_long(now)

        def may_go(held: Revision) -> bool:
            is_used = held.num_begun or (held.num_bound and not is_urgent)
            return held.state is AdapterState.READY and not held.is_pinned and not is_used

        victims = self.memory.choose_victims(revision.num_bytes, may_go)
        if victims is None:
            self._queue.note_waiting(now)
        if victims is None or (victims and not may_evict):
            return False
        for victim in victims:
            self._stats.num_evictions += 1
            self._drop(victim)
            self.registry.forget_unused(victim)
        return True

    def _give_up(self, revision: Revision) -> None:
        """Frees a revision that will be forgotten."""
        self._queue.remove(revision)
        if revision in self.memory:
            self._drop(revision)

    def _drop(self, revision: Revision) -> None:
        """Takes a loaded revision out of memory."""
        self._executor.drop_adapter(revision.key)
        self.memory.remove(revision)
        self.registry.set_state(revision, AdapterState.COLD)

    def _take_loaded(self, revision: Revision, info: AdapterInfo) -> None:
        self._count("loaded")
        self._stats.load_seconds.append(self.clock() - revision.loading_since)
        self.memory.resize(revision, info.num_bytes)
        self.registry.set_state(revision, AdapterState.READY)
        if revision.digest not in ("", info.digest):
            self._drop(revision)
            self._note_changed(revision, info)
            return
        revision.info = info
        try:
            self.memory.validate(revision)  # it may take more than was estimated
        except AdapterError as e:
            self._drop(revision)
            self._fail(revision, e)
            return
        if revision.is_candidate:
            revision = self.registry.replace_newest(revision)
        waiters, revision.waiters = revision.waiters, []
        for waiter in waiters:
            waiter.set_result(revision.info)
        if self._is_asleep and revision.state is AdapterState.READY:
            self._drop(revision)

    def _note_changed(self, revision: Revision, info: AdapterInfo) -> None:
        """Handles files that were others when the revision was loaded before: they are another revision."""
        revision.has_changed = True
        if revision.is_newest:
            successor = self.registry.add_successor(revision, info.digest)
            successor.num_bytes = info.num_bytes
            self._ask_for(successor)
        self._fail(revision, _changed(revision.request, revision.digest, info.digest))

    def _fail(self, revision: Revision, error: BaseException) -> None:
        """Ends those who wait for a revision with an error."""
        name = revision.request.lora_name
        if not isinstance(error, QuireError):
            error = GenerationError(f"adapter {name!r} could not be loaded: {type(error).__name__}: {error}")
        logger.warning("adapter %s of %s is not loaded: %s", name, revision.request.lora_path, error)
        self._count("failed")
        self._queue.remove(revision)
        if revision in self.memory:
            self.memory.remove(revision)
        revision.is_candidate = False
        self.registry.set_state(revision, AdapterState.FAILED, error)
        revision.end_waiters(error)
        self.registry.forget_failures(revision)

    def _count(self, outcome: str) -> None:
        self._stats.num_loads[outcome] = self._stats.num_loads.get(outcome, 0) + 1

    # -- the gate ----------------------------------------------------------------------------------------------

    def is_ready(self, request: Request) -> bool:
        """Returns whether the request's adapter is in memory and has a place, or cannot be had."""
        if request.adapter is None:
            return True
        revision = self.registry.revisions[request.adapter]
        now = self.clock()
        match revision.state:
            case AdapterState.READY:
                if request.lora_start == UNKNOWN:
                    self._settle_start(request)
                request.report.adapter_digest = revision.digest
                if _error_of_resumed(request, revision) is not None or self._may_start(request, revision, now):
                    return True
            case AdapterState.FAILED:
                return not self._rebind(request, revision) or self.is_ready(request)
            case AdapterState.COLD:
                with self._lock:
                    self._ask_for(revision)
            case AdapterState.LOADING:
                pass
        self._blocked.setdefault(request, now)
        return False

    def _settle_start(self, request: Request) -> None:
        """Sets where the adapter of a request begins that came before the adapter's first load."""
        start = self.find_start(request.origin, request.adapter)
        if start:
            request.bind_adapter(request.adapter, start)  # hashes its blocks again
        else:
            request.report.lora_start = start

    def _may_start(self, request: Request, revision: Revision, now: float) -> bool:
        has_begun = request.report.adapter is not None
        if not has_begun and self._queue.waits_too_long(now):
            with self._lock:
                self._start_loads()  # adapters that requests only wait for may go now
            if revision.state is not AdapterState.READY or self._queue.waits_too_long(now):
                return False  # what runs ends, and makes room for the adapter that waits
        return self.places.may_start(revision.key, now, has_begun=has_begun)

    def get_error(self, request: Request) -> QuireError | None:
        if request.adapter is None:
            return None
        revision = self.registry.revisions[request.adapter]
        return revision.error or _error_of_resumed(request, revision)

    def _rebind(self, request: Request, revision: Revision) -> bool:
        """Binds a request to the newest revision if the files of its own have changed, and it has no output yet."""
        with self._lock:
            newest = self.registry.newest.get(revision.key[0])
            if not revision.has_changed or request.num_output_tokens or newest is None:
                return False
            if newest.state is AdapterState.FAILED:
                return False
            self._release(request, revision)
            request.report.adapter = None
            request.bind_adapter(newest.key, self.find_start(request.origin, newest.key))
            newest.num_bound += 1
            self._ask_for(newest)
            self.registry.forget_unused(revision)
            return True

    def note_admitted(self, request: Request) -> None:
        if request.adapter is None:
            return
        with self._lock:
            revision = self.registry.revisions[request.adapter]
            if request.report.adapter is None:
                revision.num_begun += 1
                request.report.adapter = revision.info
            self.places.enter(revision.key, request)
            self.memory.touch(revision)
            since = self._blocked.pop(request, None)
            if since is not None:
                self._stats.wait_seconds.append(self.clock() - since)

    def note_left(self, request: Request) -> None:
        if request.adapter is None:
            return
        with self._lock:
            revision = self.registry.revisions[request.adapter]
            self.places.leave(revision.key, request)
            if request.is_finished:
                self._release(request, revision)
                self._blocked.pop(request, None)
                self.memory.touch(revision)
                self.registry.forget_unused(revision)
                self._start_loads()

    def _release(self, request: Request, revision: Revision) -> None:
        revision.num_bound -= 1
        revision.num_begun -= request.report.adapter is not None
        if revision.num_bound == self.places.count_running(revision.key):
            self.places.forget(revision.key)  # no request of it waits any more

    def add_stats(self, stats: SchedulerStats) -> None:
        if not self.registry.revisions and not self._stats.num_loads:
            return
        with self._lock:
            stats.adapters, self._stats = self._stats, AdapterStats()
            stats.adapters.resident_bytes = self.memory.num_bytes
            stats.adapters.num_adapters = self.registry.count()


def _error_of_resumed(request: Request, revision: Revision) -> QuireError | None:
    """Returns the error of a request that began, before a restart, with other files than those of this revision."""
    began = request.origin.adapter
    if began is None or revision.digest in ("", began.digest):
        return None
    return _changed(revision.request, began.digest, revision.digest)


def _changed(lora: LoRARequest, before: str, now: str) -> GenerationError:
    return GenerationError(
        f"the files of adapter {lora.lora_name!r} in {lora.lora_path!r} have changed since the request began (SHA-256 "
        f"{before[:12]}..., now {now[:12]}...), and it cannot go on with others: send it again"
    )

"""The things that adapters compete for: the executor, memory, and places among the running requests.

Nothing here loads, waits or knows a thread: `AdapterMemory` counts bytes, `AdapterPlaces` counts distinct adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import islice, takewhile
from queue import SimpleQueue

from quire.engine.lora.registry import Revision
from quire.engine.request import Request
from quire.errors import AdapterError
from quire.wire.lora import AdapterInfo, AdapterKey

MAX_WAIT_S = 2.0
"""Seconds that an adapter waits for a place or for memory before no new request of others is admitted."""


class LoadQueue:
    """Revisions to be loaded, in the order in which they were asked for, and those that the executor has.

    One that is being measured stays in its place of the queue. The executor's threads use `results` only.
    """

    def __init__(self) -> None:
        self.results: SimpleQueue[tuple[Revision, Future[int] | Future[AdapterInfo]]] = SimpleQueue()
        self._waiting: dict[AdapterKey, Revision] = {}
        self._later: dict[AdapterKey, Revision] = {}
        """To be asked for when nothing else waits, from `_later_at` on."""
        self._later_at = 0.0
        self.num_busy = 0
        """Number of revisions that the executor measures or loads."""
        self._waiting_since: float | None = None
        """Time since when the first one waits for memory."""

    def add(self, revision: Revision) -> None:
        """Adds one at the end."""
        self._waiting[revision.key] = revision

    def add_later(self, revisions: Iterable[Revision], at: float) -> None:
        """Adds cold revisions that are loaded from the time `at` on, when no others wait."""
        self._later.update((revision.key, revision) for revision in revisions)
        self._later_at = at

    def take_later(self, now: float) -> Revision | None:
        """Returns one of those if it is its turn."""
        if self._waiting or self.num_busy or not self._later or now < self._later_at:
            return None
        return self._later.pop(next(iter(self._later)))

    def first(self, count: int) -> list[Revision]:
        """Returns the first ones."""
        return list(islice(self._waiting.values(), count))

    def remove(self, revision: Revision) -> None:
        """Removes one, if it waits here."""
        self._later.pop(revision.key, None)
        if revision.key in self._waiting:
            if next(iter(self._waiting)) == revision.key:
                self._waiting_since = None
            del self._waiting[revision.key]

    def begin(self, revision: Revision) -> None:
        """Notes that the executor has it."""
        revision.is_busy = True
        self.num_busy += 1

    def take_results(self) -> Iterator[tuple[Revision, Future[int] | Future[AdapterInfo]]]:
        """Yields what the executor has done, with the Future that has ended."""
        while not self.results.empty():
            revision, future = self.results.get_nowait()
            revision.is_busy = False
            self.num_busy -= 1
            yield revision, future

    def note_waiting(self, now: float) -> None:
        """Notes that the first one waits for memory."""
        if self._waiting_since is None:
            self._waiting_since = now

    def waits_too_long(self, now: float) -> bool:
        """Returns whether the first one has waited `MAX_WAIT_S` for memory."""
        return self._waiting_since is not None and now - self._waiting_since >= MAX_WAIT_S


class AdapterMemory:
    """Bytes and number of the adapters in memory, those being loaded included, least recently used first."""

    def __init__(self, max_bytes: int, max_adapters: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.max_adapters = max_adapters
        """None: as many as `max_bytes` holds."""
        self.num_bytes = 0
        self._held: dict[AdapterKey, Revision] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Revision]:
        return iter(list(self._held.values()))

    def __contains__(self, revision: Revision) -> bool:
        return revision.key in self._held

    def put(self, revision: Revision) -> None:
        """Adds `revision.num_bytes`, as the most recently used."""
        self._held[revision.key] = revision
        self.num_bytes += revision.num_bytes

    def remove(self, revision: Revision) -> None:
        """Gives the bytes back."""
        del self._held[revision.key]
        self.num_bytes -= revision.num_bytes

    def resize(self, revision: Revision, num_bytes: int) -> None:
        """Replaces the estimate by what the loaded adapter takes."""
        self.num_bytes += num_bytes - revision.num_bytes
        revision.num_bytes = num_bytes

    def touch(self, revision: Revision) -> None:
        """Makes it the most recently used, if it is here."""
        if revision.key in self._held:
            self._held[revision.key] = self._held.pop(revision.key)

    def fits(self, num_bytes: int, num_adapters: int = 1) -> bool:
        """Returns whether there is room for so much more."""
        has_place = self.max_adapters is None or len(self._held) + num_adapters <= self.max_adapters
        return has_place and self.num_bytes + num_bytes <= self.max_bytes

    def choose_victims(self, num_bytes: int, may_go: Callable[[Revision], bool]) -> list[Revision] | None:
        """Returns the adapters to evict so that one of `num_bytes` fits, the least recently used first.

        Returns None if there is no room even without all those that `may_go` allows.
        """
        victims: list[Revision] = []
        freed = 0
        for revision in self._held.values():
            if self.fits(num_bytes - freed, 1 - len(victims)):
                break
            if may_go(revision):
                victims.append(revision)
                freed += revision.num_bytes
        return victims if self.fits(num_bytes - freed, 1 - len(victims)) else None

    def validate(self, revision: Revision) -> None:
        """Raises AdapterError if there never will be room: it is too large, or what is pinned leaves too little."""
        name, size = revision.request.lora_name, revision.num_bytes
        if size > self.max_bytes:
            raise AdapterError(
                f"adapter {name!r} takes {size} bytes; all adapters together have {self.max_bytes}: raise "
                "--lora-memory-bytes"
            )
        pinned = [held for held in self._held.values() if held.is_pinned and held is not revision]
        num_pinned_bytes = sum(held.num_bytes for held in pinned)
        if num_pinned_bytes + size > self.max_bytes:
            raise AdapterError(
                f"adapter {name!r} takes {size} bytes, and {num_pinned_bytes} of {self.max_bytes} are held by pinned "
                "adapters: remove one, or raise --lora-memory-bytes"
            )
        if self.max_adapters is not None and len(pinned) >= self.max_adapters:
            raise AdapterError(
                f"adapter {name!r} has no place in memory: {len(pinned)} adapters are pinned, and --max-cpu-loras is "
                f"{self.max_adapters}; remove one, or raise it"
            )


class AdapterPlaces:
    """Distinct adapters among the running requests, at most `max_loras`; None: unlimited.

    Of the adapters in memory, the one that has waited longest gets the next free place. Once it has waited
    `MAX_WAIT_S`, no new request of an adapter that has a place is admitted before it. Requests that have begun go
    before all others: each of them ends.
    """

    def __init__(self, max_loras: int | None, is_loaded: Callable[[AdapterKey], bool] = lambda key: True) -> None:
        self.max_loras = max_loras
        self._is_loaded = is_loaded
        self._running: dict[AdapterKey, set[Request]] = {}
        self._waiting: dict[AdapterKey, float] = {}
        """Adapters that found no place, and since when they wait, the first one first."""

    @property
    def running(self) -> list[AdapterKey]:
        """The adapters that have a place."""
        return list(self._running)

    def count_running(self, key: AdapterKey) -> int:
        """Returns the number of running requests of an adapter."""
        return len(self._running.get(key, ()))

    def may_start(self, key: AdapterKey, now: float, *, has_begun: bool) -> bool:
        """Returns whether a request of this adapter may run. If not, the adapter waits from now on."""
        if self.max_loras is None:
            return True
        num_free = self.max_loras - len(self._running)
        if has_begun:
            return key in self._running or num_free > 0
        if key in self._running:
            return all(now - self._waiting[other] < MAX_WAIT_S for other in self._before(None))
        if num_free > sum(1 for _ in self._before(key)):
            return True
        self._waiting.setdefault(key, now)
        return False

    def _before(self, key: AdapterKey | None) -> Iterator[AdapterKey]:
        """Yields the adapters in memory that have waited longer; None: that wait."""
        return filter(self._is_loaded, takewhile(lambda other: other != key, self._waiting))

    def enter(self, key: AdapterKey, request: Request) -> None:
        """Counts a request that runs from now on."""
        self._running.setdefault(key, set()).add(request)
        self._waiting.pop(key, None)

    def leave(self, key: AdapterKey, request: Request) -> None:
        """Counts a request that runs no more, if it did."""
        requests = self._running.get(key, set())
        requests.discard(request)
        if not requests:
            self._running.pop(key, None)

    def forget(self, key: AdapterKey) -> None:
        """Notes that no request of this adapter waits."""
        self._waiting.pop(key, None)

"""The adapters that an engine knows: their names, ids and revisions. Nothing here loads, evicts or knows a thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum

from quire.errors import ClientError, QuireError, ValidationError
from quire.lora_request import LoRARequest
from quire.wire.lora import AdapterInfo, AdapterKey

FAILURE_S = 30.0
"""Seconds for which new requests of an adapter that could not be loaded get the same error."""
MAX_PLACES = 100_000
"""Most names and paths that are remembered; then every new revision has a number of its own."""


class AdapterState(Enum):
    """State of a revision. The values are labels of a metric."""

    COLD = "cold"
    """Not in memory; loaded when a request asks for it."""
    LOADING = "loading"
    """Waits for memory, or is being read."""
    READY = "ready"
    FAILED = "failed"
    """Could not be loaded, or is not to be had any more."""


class Revision:
    """The files of an adapter as they were at one time. Those of a cold one cost less than 2 KiB."""

    __slots__ = (
        *("changed_at", "error", "has_changed", "info", "is_busy", "is_candidate", "is_newest", "is_pinned", "key"),
        *("loading_since", "num_begun", "num_bound", "num_bytes", "request", "state", "waiters"),
    )

    def __init__(self, request: LoRARequest, number: int, digest: str = "") -> None:
        self.request = request
        self.key: AdapterKey = (request.lora_int_id, number)
        self.info = AdapterInfo(*self.key, digest, 0, 0)
        """Description for clients. Before the first load, only the digest may be known."""
        self.num_bytes = 0
        """Memory that it takes or will take; 0 before it is measured."""
        self.state = AdapterState.COLD
        self.error: QuireError | None = None
        """Reason of the state FAILED."""
        self.changed_at = 0.0
        """Time of the last change of `state`."""
        self.has_changed = False
        """True if the files have other contents now: it will never be loaded again."""
        self.is_busy = False
        """True while the executor measures or loads it."""
        self.is_newest = False
        """True if new requests of the adapter use it."""
        self.is_candidate = False
        """True if it will be the newest once it is loaded."""
        self.loading_since = 0.0
        self.is_pinned = False
        """True if it stays in memory."""
        self.num_bound = 0
        """Unfinished requests that use it."""
        self.num_begun = 0
        """Number of those that have been admitted: they end on it."""
        self.waiters: list[Future[AdapterInfo]] = []
        """Callers of add_lora."""

    @property
    def digest(self) -> str:
        """SHA-256 of its contents; empty if it was never loaded."""
        return self.info.digest

    @property
    def is_used(self) -> bool:
        """Returns whether anything refers to it, so that it must stay known."""
        return self.is_newest or self.is_candidate or self.is_busy or self.num_bound > 0

    def end_waiters(self, error: QuireError) -> None:
        """Ends the calls of add_lora that wait for it."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.set_exception(error)


class AdapterRegistry:
    """Finds the revision that a request gets, and gives new ones their numbers."""

    def __init__(self, clock: Callable[[], float], on_forgotten: Callable[[Revision], None]) -> None:
        """`on_forgotten` is called with a revision that nothing refers to, before it is forgotten."""
        self.newest: dict[int, Revision] = {}
        """The revisions that new requests get, by id of the adapter."""
        self.revisions: dict[AdapterKey, Revision] = {}
        """All revisions that are known: the newest, those that requests use, and those being loaded."""
        self._clock, self._on_forgotten = clock, on_forgotten
        self._last_number = 0
        """Largest number of a revision."""
        self._used_places: set[int] = set()
        """Hashes of the names and paths that have had a revision."""
        self._states: Counter[AdapterState] = Counter()

    def count(self) -> dict[str, int]:
        """Returns the number of revisions in each state."""
        return {state.value: self._states[state] for state in AdapterState}

    def set_state(self, revision: Revision, state: AdapterState, error: QuireError | None = None) -> None:
        """Changes the state of a revision that is known."""
        self._states[revision.state] -= 1
        self._states[state] += 1
        revision.state, revision.error, revision.changed_at = state, error, self._clock()

    # -- finding -----------------------------------------------------------------------------------------------

    def find_newest(self, lora: LoRARequest, *, is_add: bool = False) -> Revision | None:
        """Returns the revision that a request of `lora` gets; None if the adapter is not known, or not any more.

        Raises ValidationError for an id that belongs to another name or path.
        """
        newest = self.newest.get(lora.lora_int_id)
        if newest is None:
            return None
        held = newest.request
        is_same = (held.lora_name, held.lora_path) == (lora.lora_name, lora.lora_path)
        if newest.state is AdapterState.FAILED and not newest.digest and not is_same:
            self.retire(self.newest.pop(lora.lora_int_id))  # it never was an adapter
            return None
        if held.lora_name != lora.lora_name or not (is_same or (is_add and lora.load_inplace)):
            raise ValidationError(
                f"adapter id {lora.lora_int_id} is {held.lora_name!r} of {held.lora_path!r}, not {lora.lora_name!r} of "
                f"{lora.lora_path!r}; use another id, or load it with load_inplace under the same name",
                param="lora_int_id",
                value=lora.lora_int_id,
            )
        is_over = self._clock() - newest.changed_at >= FAILURE_S and not newest.num_bound
        if newest.state is AdapterState.FAILED and (is_add or is_over):
            self.set_state(newest, AdapterState.COLD)
        return newest

    def find_begun(self, lora: LoRARequest, began: AdapterInfo | None) -> Revision | None:
        """Returns the revision that a resumed request began with; None if that is, or may be, the newest."""
        newest = self.newest.get(lora.lora_int_id)
        if began is None or newest is None or newest.digest in ("", began.digest):
            return None
        for revision in self.revisions.values():
            if (revision.key[0], revision.digest) == (lora.lora_int_id, began.digest):
                return revision
        return self.add(lora, began.revision, began.digest)

    # -- coming and going --------------------------------------------------------------------------------------

    def register(self, lora: LoRARequest, number: int = 1, digest: str = "") -> Revision:
        """Makes an adapter known whose id is new."""
        revision = self.newest[lora.lora_int_id] = self.add(lora, number, digest)
        revision.is_newest = True
        return revision

    def add(self, lora: LoRARequest, number: int = 1, digest: str = "") -> Revision:
        """Makes a revision known, with a number of its own where `number` could name other files already."""
        place = hash((lora.lora_name, lora.lora_path))
        is_used = place in self._used_places or len(self._used_places) >= MAX_PLACES
        if (lora.lora_int_id, number) in self.revisions or (is_used and not digest):
            number = self._last_number + 1
        self._used_places.add(place)
        self._last_number = max(self._last_number, number)
        revision = self.revisions[lora.lora_int_id, number] = Revision(lora, number, digest)
        self._states[revision.state] += 1
        return revision

    def replace_newest(self, revision: Revision) -> Revision:
        """Makes a reloaded revision the newest, unless its files are those of the newest. Returns the newest then."""
        revision.is_candidate = False
        newest = self.newest.get(revision.key[0])
        if newest is None:  # what it was to replace has failed and is forgotten
            self.newest[revision.key[0]] = revision
            revision.is_newest = True
            return revision
        if newest.request.lora_name != revision.request.lora_name:
            revision.end_waiters(removed(revision))
            return revision
        is_same = (newest.digest, newest.request.lora_path) == (revision.digest, revision.request.lora_path)
        is_older = newest.key[1] > revision.key[1] and bool(newest.digest)  # another reload was faster
        if is_older or (is_same and newest.state is AdapterState.READY):
            newest.waiters += revision.waiters
            revision.waiters = []
            return newest
        self.newest[revision.key[0]] = revision
        revision.is_newest, revision.is_pinned = True, newest.is_pinned
        revision.waiters += newest.waiters
        newest.waiters = []
        self.retire(newest)
        return revision

    def add_successor(self, revision: Revision, digest: str) -> Revision:
        """Returns a new newest revision in the place of one whose files have changed to those with `digest`."""
        successor = self.newest[revision.key[0]] = self.add(revision.request, digest=digest)
        successor.is_newest, successor.is_pinned = True, revision.is_pinned
        successor.waiters, revision.waiters = revision.waiters, []
        revision.is_newest = revision.is_pinned = False
        return successor

    def retire(self, revision: Revision) -> None:
        """Notes that a revision is not the newest any more."""
        revision.is_newest = revision.is_pinned = False
        self.forget_unused(revision)

    def forget_unused(self, revision: Revision) -> None:
        """Forgets a revision that no request uses and none will use."""
        if revision.is_used:
            return
        revision.end_waiters(removed(revision))
        self._on_forgotten(revision)
        self._states[revision.state] -= 1
        self.revisions.pop(revision.key, None)

    def forget_failures(self, failed: Revision) -> None:
        """Forgets adapters that never were any: `failed`, which just has failed, and those whose failure is no longer
        remembered."""
        for newest in list(self.newest.values()):
            is_over = newest is failed or self._clock() - newest.changed_at >= FAILURE_S
            if newest.state is AdapterState.FAILED and not newest.digest and not newest.num_bound and is_over:
                self.retire(self.newest.pop(newest.key[0]))


def removed(revision: Revision) -> ClientError:
    """Returns the error of those that wait for an adapter that was removed."""
    return ClientError(f"adapter {revision.request.lora_name!r} was removed while it was loading")

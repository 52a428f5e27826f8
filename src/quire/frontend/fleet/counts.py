"""Counts that the API processes of a server share, and their columns on the shared page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.frontend.admission import AdmissionControl, SharedQuota
from quire.wire.peers import SharedCount, SharedCounts

_QUEUE_ROOMS = 3
"""Number of limits of the queue: requests, their tokens, tokens promised (`AdmissionControl`)."""
_RESERVED_TOKENS = 2
"""Index of the tokens promised, which are above 0 as long as a request lives."""
_KEY_ROOMS = 2
"""Number of limits of each API key: requests and tokens under way (`Tenants`)."""


class FleetCounts:
    """Requests under way, and the taken part of every limit. All processes must have the same keys."""

    def __init__(self, page: SharedCounts, key_digests: Sequence[bytes]) -> None:
        self._page = page
        self.in_flight: SharedCount = page.column(0)
        rooms = [SharedQuota(page.column(1 + 2 * i), page.column(2 + 2 * i)) for i in range(_num_rooms(key_digests))]
        self._queue_rooms = rooms[:_QUEUE_ROOMS]
        of_keys = rooms[_QUEUE_ROOMS:]
        self.rooms_of_keys = dict(zip(key_digests, zip(of_keys[::2], of_keys[1::2], strict=True), strict=True))
        """Taken parts of a key's requests and tokens, by the key's digest."""

    @classmethod
    def create(cls, path: Path, num_processes: int, key_digests: Sequence[bytes]) -> FleetCounts:
        """Makes a page for `num_processes` and the process that starts them."""
        return cls(SharedCounts.create(path, 1 + num_processes, _num_columns(key_digests)), key_digests)

    @classmethod
    def attach(cls, path: Path, index: int, key_digests: Sequence[bytes]) -> FleetCounts:
        """Opens the page for process `index`. Raises OSError or ValueError if it is missing or of another kind."""
        return cls(SharedCounts.attach(path, _num_columns(key_digests), index), key_digests)

    def share_admission(self, admission: AdmissionControl) -> None:
        """Makes the limits of `admission` hold for all processes together."""
        admission.share(*self._queue_rooms)

    def are_others_busy(self) -> bool:
        """Returns whether other processes have live requests."""
        return self._queue_rooms[_RESERVED_TOKENS].taken_by_others() > 0

    def clear(self, index: int) -> None:
        """Clears the counts of process `index`, which has exited."""
        self._page.clear_row(index)


def _num_rooms(key_digests: Sequence[bytes]) -> int:
    return _QUEUE_ROOMS + _KEY_ROOMS * len(key_digests)


def _num_columns(key_digests: Sequence[bytes]) -> int:
    return 1 + 2 * _num_rooms(key_digests)

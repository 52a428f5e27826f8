"""What the API processes of a server count together, and in which column of the shared page it stands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.frontend.admission import AdmissionControl, SharedRoom
from quire.wire.peers import SharedCount, SharedCounts

_QUEUE_ROOMS = 3
"""Requests, their tokens, and tokens promised (`AdmissionControl`)."""
_RESERVED_TOKENS = 2
"""Which of them is the last: some as long as a request lives."""
_KEY_ROOMS = 2
"""Of each API key: requests and tokens under way (`Tenants`)."""


class FleetCounts:
    """Requests under way, and what is taken of every limit. All must know the same keys."""

    def __init__(self, page: SharedCounts, key_digests: Sequence[bytes]) -> None:
        self._page = page
        self.in_flight: SharedCount = page.column(0)
        rooms = [SharedRoom(page.column(1 + 2 * i), page.column(2 + 2 * i)) for i in range(_num_rooms(key_digests))]
        self._queue_rooms = rooms[:_QUEUE_ROOMS]
        of_keys = rooms[_QUEUE_ROOMS:]
        self.rooms_of_keys = dict(zip(key_digests, zip(of_keys[::2], of_keys[1::2], strict=True), strict=True))
        """By digest: what is taken of the key's requests, and of its tokens."""

    @classmethod
    def create(cls, path: Path, num_processes: int, key_digests: Sequence[bytes]) -> FleetCounts:
        """A new page, for `num_processes` and the process that starts them."""
        return cls(SharedCounts.create(path, 1 + num_processes, _num_columns(key_digests)), key_digests)

    @classmethod
    def attach(cls, path: Path, index: int, key_digests: Sequence[bytes]) -> FleetCounts:
        """The page, for process `index`. Raises OSError or ValueError where there is none of the kind."""
        return cls(SharedCounts.attach(path, _num_columns(key_digests), index), key_digests)

    def share_admission(self, admission: AdmissionControl) -> None:
        """Have the limits of `admission` hold for all processes together."""
        admission.share(*self._queue_rooms)

    def are_others_busy(self) -> bool:
        """Whether other processes have requests that live."""
        return self._queue_rooms[_RESERVED_TOKENS].taken_by_others() > 0

    def clear(self, index: int) -> None:
        """Process `index` is gone."""
        self._page.clear_row(index)


def _num_rooms(key_digests: Sequence[bytes]) -> int:
    return _QUEUE_ROOMS + _KEY_ROOMS * len(key_digests)


def _num_columns(key_digests: Sequence[bytes]) -> int:
    return 1 + 2 * _num_rooms(key_digests)

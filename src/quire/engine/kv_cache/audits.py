"""Audits: loads that are computed instead, so that the computed blocks can be compared with the stored ones.

On native kernels they must be the same to the bit. A share of the loads is chosen at random; the blocks of their
requests are ordered to be compared when they are full (`saver.py`), as others are ordered to be saved.
"""

from __future__ import annotations

import random

from quire.engine.kv_cache.connector import ExternalMatch
from quire.engine.request import Request

NONE = range(0)


class LoadAudits:
    """The requests whose blocks are compared."""

    def __init__(self, share: float, *sources: str) -> None:
        """`share`: of the loads from `sources`, which are named without what follows a colon."""
        self._share, self._sources = share, sources
        self._positions: dict[Request, range] = {}
        self._matches: dict[Request, ExternalMatch] = {}

    def begins(self, request: Request, match: ExternalMatch, first: int, num_blocks: int) -> bool:
        """Returns whether a load of `num_blocks` from block `first` on is computed instead."""
        if match.source.partition(":")[0] not in self._sources or random.random() >= self._share:
            return False
        self._positions[request], self._matches[request] = range(first, first + num_blocks), match
        return True

    def positions_of(self, request: Request) -> range:
        """Returns the positions of a request's blocks that are to be compared."""
        return self._positions.get(request, NONE)

    def match_of(self, request: Request) -> ExternalMatch:
        """Returns what would have been loaded of a request whose blocks are compared."""
        return self._matches[request]

    def end(self, request: Request) -> None:
        """Forgets a request."""
        self._positions.pop(request, None)
        self._matches.pop(request, None)

"""Audits: loads that are computed instead, so that the computed blocks can be compared with the stored ones.

On native kernels they must be the same to the bit. A share of the loads is chosen at random; the blocks of their
requests are ordered to be compared when they are full (`saver.py`), as others are ordered to be saved.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from quire.engine.kv_cache.connector import ExternalMatch
from quire.engine.request import Request


class Audited(NamedTuple):
    """Blocks of one request that are compared."""

    positions: range
    match: ExternalMatch
    """What would have been loaded."""


class LoadAudits:
    """The requests whose blocks are compared."""

    def __init__(self, share: float, *sources: str) -> None:
        """`share`: of the loads from `sources`, which are named without what follows a colon."""
        self._share, self._sources = share, sources
        self._audited: dict[Request, Audited] = {}

    def begins(self, request: Request, match: ExternalMatch, first: int, num_blocks: int) -> bool:
        """Returns whether a load of `num_blocks` from block `first` on is computed instead."""
        if match.source.partition(":")[0] not in self._sources or random.random() >= self._share:
            return False
        self._audited[request] = Audited(range(first, first + num_blocks), match)
        return True

    def find(self, request: Request) -> Audited | None:
        """Returns which blocks of a request are compared."""
        return self._audited.get(request)

    def end(self, request: Request) -> None:
        """Forgets a request."""
        self._audited.pop(request, None)

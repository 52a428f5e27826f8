"""Membership: the place of one process among those of its server, and calls to the others."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import NotFoundError
from quire.frontend.admission import SharedQuota
from quire.wire.peers import SharedCount


class Peers:
    """The other processes of a server. This base class has none: the process is the only one."""

    async def gather(self, method: str, *args: Any) -> list[Any]:
        """Returns the answers of all other processes, without those of processes that are gone or fail."""
        return []

    async def call(self, index: int, method: str, *args: Any) -> Any:
        """Returns the answer of process `index`. Raises what it raised, by class; OverloadedError while it is being
        started again, NotFoundError if there is no such process."""
        raise NotFoundError(f"this server has no process {index}")


@dataclass(frozen=True)
class Membership:
    """One process of a server; by default the only one."""

    index: int = 1
    num_processes: int = 1
    peers: Peers = field(default_factory=Peers)
    in_flight: SharedCount | None = None
    """Number of requests under way, counted by all processes together; None where there is one."""
    rooms_of_keys: Mapping[bytes, tuple[SharedQuota, SharedQuota]] = field(default_factory=dict)
    """Requests and tokens under way in all processes, by digest of an API key. Empty where there is one process."""
    salt_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Key of the cache salts, so that they cannot be guessed."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the server's start."""

    @property
    def is_alone(self) -> bool:
        """True if the server has no other process."""
        return self.num_processes == 1

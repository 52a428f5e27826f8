"""The other API processes of a server, as one of them sees them; and what a process is among them."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from quire.errors import NotFoundError
from quire.frontend.fleet.counts import FleetCounts
from quire.frontend.fleet.peer_link import PeerLink
from quire.wire.api_process import EVERYBODY


class Peers:
    """Nobody: the server is one process."""

    async def gather(self, method: str, *args: Any) -> list[Any]:
        """What all others answer. One that is gone, or fails, is left out."""
        return []

    async def call(self, index: int, method: str, *args: Any) -> Any:
        """What process `index` answers. Raises what it raised, by class; OverloadedError where it is being started
        again, NotFoundError where there is no such process."""
        raise NotFoundError(f"this server has no process {index}")


class FleetPeers(Peers):
    """Those behind a link to the parent, which passes calls on."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link

    async def gather(self, method: str, *args: Any) -> list[Any]:
        return list(await self._link.call(method, *args, target=EVERYBODY))

    async def call(self, index: int, method: str, *args: Any) -> Any:
        return await self._link.call(method, *args, target=index)


@dataclass(frozen=True)
class Membership:
    """What a server process is: by default the only one."""

    index: int = 1
    num_processes: int = 1
    peers: Peers = field(default_factory=Peers)
    counts: FleetCounts | None = None
    """What all count together."""
    salt_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """What cache salts are made with, so that they cannot be guessed."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When the server was started."""

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.num_processes == 1

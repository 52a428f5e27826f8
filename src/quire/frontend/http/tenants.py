"""What each API key may have under way. A key that has as much as it may is refused with 429; others are served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from quire.errors import QuotaExceededError
from quire.frontend.admission import Room, SharedRoom, refusal


class Tenants:
    """Counts requests under way by key, each of the n outputs of a prompt as one. `None` is no limit."""

    def __init__(
        self,
        max_num_reqs: int | None,
        max_num_tokens: int | None,
        rejections: Counter[str],
        shared: Mapping[bytes, tuple[SharedRoom, SharedRoom]] | None = None,
    ) -> None:
        """`rejections` is where refusals are counted, by the name of the limit. `shared` has what several processes
        keep together of each key's requests and tokens."""
        self._limits = (max_num_reqs, max_num_tokens)
        self._rejections = rejections
        self._shared = shared or {}
        self._rooms: dict[bytes, tuple[Room, Room]] = {}
        """As many as there are keys: nobody comes this far without one."""

    def take(self, owner: bytes, num_reqs: int, num_tokens: int) -> TenantPlace:
        """A place for so many requests of `owner` (`Gatekeeper.owner_of`), with so many tokens of prompts and outputs.

        Raises QuotaExceededError.
        """
        if self._limits == (None, None):
            return TenantPlace(())
        reqs, tokens = self._rooms.get(owner) or self._make_rooms(owner)
        self._check(reqs, num_reqs, "max_requests_per_key", "requests of this key are under way")
        self._check(tokens, num_tokens, "max_tokens_per_key", "tokens are promised to this key's requests")
        self._rooms[owner] = (reqs, tokens)
        return TenantPlace([(reqs, num_reqs), (tokens, num_tokens)])

    def _make_rooms(self, owner: bytes) -> tuple[Room, Room]:
        rooms = Room(self._limits[0]), Room(self._limits[1])
        for room, shared in zip(rooms, self._shared.get(owner, ()), strict=False):
            room.share(shared)
        return rooms

    def _check(self, room: Room, more: int, name: str, words: str) -> None:
        if room.shortage(more):
            self._rejections[name] += 1
            raise refusal(QuotaExceededError, room, more, name, words)


class TenantPlace:
    """What one request has of its key's share."""

    def __init__(self, taken: Sequence[tuple[Room, int]]) -> None:
        self._taken = taken
        for room, amount in taken:
            room.change(amount)

    def release(self) -> None:
        """The request is over. Idempotent."""
        for room, amount in self._taken:
            room.change(-amount)
        self._taken = ()

"""Admission of one HTTP request: room in the engine's queue, and a share of what its API key may have under way.

A key that has as much under way as it may is refused with 429; other keys are served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from quire.errors import QuotaExceededError
from quire.frontend.admission import Charge, Quota, QuotaRule, Reservation, SharedQuota

REQS_OF_KEY = QuotaRule("max_requests_per_key", "requests of this key are under way", QuotaExceededError)
TOKENS_OF_KEY = QuotaRule("max_tokens_per_key", "tokens are promised to this key's requests", QuotaExceededError)


class Tenants:
    """Counts requests under way by key, each of the n outputs of a prompt as one. A limit of None is none."""

    def __init__(
        self,
        max_num_reqs: int | None,
        max_num_tokens: int | None,
        shared: Mapping[bytes, tuple[SharedQuota, SharedQuota]] | None = None,
    ) -> None:
        """`shared` holds the requests and tokens of each key in all processes of the server."""
        self._limits = (max_num_reqs, max_num_tokens)
        self._shared = shared or {}
        self._rooms: dict[bytes, tuple[Quota, Quota]] = {}
        """Requests and tokens of each key. Bounded: only a request with a valid key comes this far."""

    def share_of(self, owner: bytes, num_reqs: int, num_tokens: int) -> TenantShare:
        """Returns the share of so many requests of `owner` (`Gatekeeper.owner_of`), with so many tokens of prompts and
        outputs. Nothing is checked or taken yet."""
        if self._limits == (None, None):
            return TenantShare(())
        if owner not in self._rooms:
            self._rooms[owner] = Quota(REQS_OF_KEY, self._limits[0]), Quota(TOKENS_OF_KEY, self._limits[1])
            for room, shared in zip(self._rooms[owner], self._shared.get(owner, ()), strict=False):
                room.share(shared)
        return TenantShare(list(zip(self._rooms[owner], (num_reqs, num_tokens), strict=True)))


class TenantShare:
    """The part of a key's limits that one HTTP request takes."""

    def __init__(self, charges: Sequence[Charge]) -> None:
        self.charges = charges

    def take(self) -> None:
        """Takes the share. `AdmissionControl.reserve_all` has checked it."""
        for room, amount in self.charges:
            room.change(amount)

    def release(self) -> None:
        """Gives the share back. Idempotent."""
        for room, amount in self.charges:
            room.change(-amount)
        self.charges = ()


class Admitted:
    """The room and the share of one HTTP request, taken before any work is done for it.

    A context manager around that work. At its end it gives back what has not been taken over by then, because of the
    error that ended it.
    """

    def __init__(self, rooms: Iterable[Reservation], share: TenantShare) -> None:
        """`rooms` are those of the prompts, in order."""
        self._rooms = deque(rooms)
        self._share: TenantShare | None = share

    def take_room(self) -> Reservation:
        """Returns the next prompt's room. Its taker gives it back."""
        return self._rooms.popleft()

    def take_share(self) -> TenantShare | None:
        """Returns the share of the key's limits. Its taker gives it back."""
        share, self._share = self._share, None
        return share

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        while self._rooms:
            self._rooms.popleft().release(error)
        if self._share is not None:
            self._share.release()

"""Blocks that stores outside the engine hold, as the workers report them: for KV cache events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.kv_cache.changes import Change, TierBlocks
from quire.wire.block_hash import BlockHash
from quire.wire.kv_events import LOCAL
from quire.wire.kv_peers import RecordName


class StoredBlocks:
    """The blocks of which each worker has a record, and how they have changed since the last `take`."""

    def __init__(self, num_workers: int, locality: str = LOCAL) -> None:
        self._by_rank: list[dict[RecordName, None]] = [{} for _ in range(num_workers)]
        self._locality = locality
        self._changes: list[Change] = []

    def update(
        self,
        rank: int,
        added: Iterable[Sequence[int | bytes]],
        removed: Iterable[Sequence[int | bytes]],
        is_new: bool = False,
    ) -> None:
        """Takes in a report of one worker; names are pairs. `is_new`: what it has reported before is not there."""
        own = self._by_rank[rank]
        for name in list(own) if is_new else ():
            self._remove(own, name)
        stored: list[RecordName] = []
        for name in map(_as_name, added):
            if name not in own:
                own[name] = None
                if self._is_stored(name):
                    stored.append(name)
        self._changes += self._describe(stored)
        for name in map(_as_name, removed):
            self._remove(own, name)

    def _remove(self, own: dict[RecordName, None], name: RecordName) -> None:
        if self._is_stored(name):
            self._changes.append(TierBlocks(name[0], [name[1]], is_stored=False, locality=self._locality))
        own.pop(name, None)

    def clear(self) -> None:
        """Notes that nothing is there any more: the namespace is another one."""
        for name in list(self._by_rank[0]):
            self._remove(self._by_rank[0], name)
        for names in self._by_rank:
            names.clear()

    def take(self, *, everything: bool) -> list[Change]:
        """Returns the changes, and forgets them; `everything`: those that lead to what is there from nothing."""
        changes, self._changes = self._changes, []
        return self._describe([name for name in self._by_rank[0] if self._is_stored(name)]) if everything else changes

    def _is_stored(self, name: RecordName) -> bool:
        return all(name in names for names in self._by_rank)

    def _describe(self, names: Iterable[RecordName]) -> list[Change]:
        by_group: dict[int, list[BlockHash]] = {}
        for group_id, digest in names:
            by_group.setdefault(group_id, []).append(digest)
        return [
            TierBlocks(group_id, hashes, is_stored=True, locality=self._locality)
            for group_id, hashes in by_group.items()
        ]


def _as_name(pair: Sequence[int | bytes]) -> RecordName:
    group_id, digest = pair
    assert isinstance(group_id, int)
    assert isinstance(digest, bytes)
    return group_id, digest

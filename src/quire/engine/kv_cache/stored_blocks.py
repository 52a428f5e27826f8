"""Blocks that a store outside the engine holds, as the workers report them: for KV cache events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.kv_cache.changes import Change, TierBlocks
from quire.wire.block_hash import BlockHash
from quire.wire.kv_peers import RecordName


class StoredBlocks:
    """The blocks of which each worker has a record, and how they have changed since the last `take`."""

    def __init__(self, num_workers: int) -> None:
        self._by_rank: list[dict[RecordName, None]] = [{} for _ in range(num_workers)]
        self._changes: list[Change] = []

    def update(
        self, rank: int, added: Iterable[Sequence[int | bytes]], removed: Iterable[Sequence[int | bytes]]
    ) -> None:
        """Takes in a report of one worker; names are pairs."""
        own = self._by_rank[rank]
        stored: list[RecordName] = []
        for name in map(_as_name, added):
            if name not in own:
                own[name] = None
                if self._is_stored(name):
                    stored.append(name)
        self._changes += _describe(stored)
        for name in map(_as_name, removed):
            if self._is_stored(name):
                self._changes.append(TierBlocks(name[0], [name[1]], is_stored=False))
            own.pop(name, None)

    def clear(self) -> None:
        """Notes that nothing is there any more: the namespace is another one."""
        first, *others = self._by_rank
        for name in first:
            if all(name in other for other in others):
                self._changes.append(TierBlocks(name[0], [name[1]], is_stored=False))
        for names in self._by_rank:
            names.clear()

    def take(self, *, everything: bool) -> list[Change]:
        """Returns the changes, and forgets them; `everything`: those that lead to what is there from nothing."""
        changes, self._changes = self._changes, []
        return _describe([name for name in self._by_rank[0] if self._is_stored(name)]) if everything else changes

    def _is_stored(self, name: RecordName) -> bool:
        return all(name in names for names in self._by_rank)


def _as_name(pair: Sequence[int | bytes]) -> RecordName:
    group_id, digest = pair
    assert isinstance(group_id, int)
    assert isinstance(digest, bytes)
    return group_id, digest


def _describe(names: Iterable[RecordName]) -> list[Change]:
    by_group: dict[int, list[BlockHash]] = {}
    for group_id, digest in names:
        by_group.setdefault(group_id, []).append(digest)
    return [TierBlocks(group_id, hashes, is_stored=True) for group_id, hashes in by_group.items()]

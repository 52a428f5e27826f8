"""Changes of what can be found in the prefix cache, in order: for KV cache events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple

from quire.engine.kv_cache.block import BlockContent, KVCacheBlock
from quire.engine.request import Request
from quire.wire.block_hash import BlockHash, ExtraKeys, hash_block
from quire.wire.kv_events import LOCAL


@dataclass(slots=True)
class StoredRun:
    """Blocks of one request and group that follow one another, and can be found from now on."""

    group_id: int
    parent: BlockHash | None
    """Hash of the block before the first; None: there is none."""
    request_id: str = ""
    lora_id: int | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    tokens: list[Sequence[int]] = field(default_factory=list)
    """Token ids of each block. They are joined where the run is read, which is not on the core's loop."""
    extra_keys: list[ExtraKeys | None] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Returns the token ids of all blocks."""
        return list(chain.from_iterable(self.tokens))

    def append(self, block_hash: BlockHash, token_ids: Sequence[int], extra_keys: ExtraKeys | None) -> None:
        """Adds the next block, whose token ids will not change."""
        self.hashes.append(block_hash)
        self.tokens.append(token_ids)
        self.extra_keys.append(extra_keys)


class RemovedBlock(NamedTuple):
    """A hash under which nothing can be found any more."""

    group_id: int
    block_hash: BlockHash


class Cleared(Enum):
    """Nothing can be found any more."""

    ALL = "all"


@dataclass(slots=True, frozen=True)
class TierBlocks:
    """Blocks that a store outside the engine holds from now on, or one that it does not hold any more."""

    group_id: int
    hashes: list[BlockHash]
    is_stored: bool
    locality: str = LOCAL


Change = StoredRun | RemovedBlock | TierBlocks | Cleared


class BlockChanges:
    """The changes since the last `take`. The pool adds one when a hash gets its first block or loses its last: copies
    of a block are no changes. So the changes, applied in order to a set of (hash, group), always give the pool's."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._open: dict[int, StoredRun] = {}
        """The run of each group that the next block may join: nothing was removed since."""
        self.num_dropped = 0
        """Batches of changes that could not be published, since the last statistics."""

    def on_stored(
        self, request: Request, index: int, group_id: int, token_ids: Sequence[int], extra_keys: ExtraKeys | None
    ) -> None:
        """Adds block `index` of a request. `token_ids` will not change."""
        hashes = request.block_hashes
        parent = hashes[index - 1] if index else None
        run = self._open.get(group_id)
        if run is None or run.request_id != request.request_id or run.hashes[-1] != parent:
            lora = request.lora_request
            run = StoredRun(group_id, parent, request.request_id, None if lora is None else lora.lora_int_id)
            self._open[group_id] = run
            self._changes.append(run)
        run.append(hashes[index], token_ids, extra_keys)

    def on_removed(self, group_id: int, block_hash: BlockHash) -> None:
        """Adds a hash that is gone."""
        self._open.clear()
        self._changes.append(RemovedBlock(group_id, block_hash))

    def on_cleared(self) -> None:
        """Adds that everything is gone: what changed before matters no more."""
        self._open.clear()
        self._changes = [Cleared.ALL]

    def take(self) -> list[Change]:
        """Returns the changes, and forgets them."""
        changes, self._changes = self._changes, []
        self._open.clear()
        return changes


def describe_cached_blocks(blocks: Iterable[KVCacheBlock], num_groups: int) -> list[Change]:
    """Returns changes that lead from nothing to what can be found now: a run for each chain. O(blocks).

    Even if hashes collide, and chains with them, every hash is there once.
    """
    digests: dict[int, BlockHash] = {}  # by id of the content
    found: list[dict[BlockHash, BlockContent]] = [{} for _ in range(num_groups)]
    for block in blocks:
        if block.block_hash is not None and block.content is not None:
            digest, group_id = block.block_hash[:-4], int.from_bytes(block.block_hash[-4:], "little")
            digests[id(block.content)] = digest
            found[group_id].setdefault(digest, block.content)
    changes: list[Change] = []
    for group_id, contents in enumerate(found):
        children: dict[BlockHash | None, list[BlockHash]] = {}
        parents = {d: None if c.parent is None else _digest(c.parent, digests) for d, c in contents.items()}
        for digest, parent in parents.items():
            children.setdefault(parent, []).append(digest)
        starts = [digest for digest, parent in parents.items() if parent is None or parent not in contents]
        pending = [*contents, *reversed(starts)]  # taken from the end; whole chains leave nothing of the first part
        done: set[BlockHash] = set()
        while pending:
            following: list[BlockHash] = [pending.pop()]
            if following[0] in done:
                continue
            run = StoredRun(group_id, parents[following[0]])
            while following and following[0] not in done:
                digest, *others = following
                pending += others
                done.add(digest)
                run.append(digest, contents[digest].token_ids, contents[digest].extra_keys)
                following = children.get(digest, [])
            changes.append(run)
    return changes


def _digest(content: BlockContent, digests: dict[int, BlockHash]) -> BlockHash:
    """Returns the hash of a content, computed with its parents' where no block has it any more. Adds them to
    `digests`."""
    line: list[BlockContent] = []
    node: BlockContent | None = content
    while node is not None and id(node) not in digests:
        line.append(node)
        node = node.parent
    parent = None if node is None else digests[id(node)]
    for each in reversed(line):
        parent = digests[id(each)] = hash_block(parent, each.token_ids, each.extra_keys)
    assert parent is not None
    return parent

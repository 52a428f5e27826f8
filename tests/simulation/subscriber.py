"""A subscriber of KV cache events, written from their description alone."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec


class Subscriber:
    """Knows which blocks an engine holds. An event that does not fit what it knows fails the test."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[Any, tuple[Any, tuple[int, ...]]]] = defaultdict(dict)
        """The parent's hash and the tokens, by group and hash."""

    def apply(self, payload: bytes) -> None:
        """Takes in one batch."""
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(timestamp, float)
        assert isinstance(rank, int)
        for event in events:
            getattr(self, "_" + event.pop("type"))(**event)

    def _BlockStored(self, block_hashes: Any, parent_block_hash: Any, token_ids: Any, **more: Any) -> None:
        size, group = more["block_size"], self.blocks[more["group_idx"]]
        assert len(token_ids) == size * len(block_hashes)
        assert more["medium"] == "GPU"
        for i, block_hash in enumerate(block_hashes):
            assert block_hash not in group, "a block was stored twice"
            group[block_hash] = parent_block_hash, tuple(token_ids[i * size : (i + 1) * size])
            parent_block_hash = block_hash

    def _BlockRemoved(self, block_hashes: Any, medium: Any, group_idx: int) -> None:
        (block_hash,) = block_hashes
        assert block_hash in self.blocks[group_idx], "a block was removed that had not been stored"
        del self.blocks[group_idx][block_hash]

    def _AllBlocksCleared(self) -> None:
        self.blocks.clear()

    def hashes(self) -> set[tuple[Any, int]]:
        """Returns what can be found: hash and group."""
        return {(block_hash, group) for group, blocks in self.blocks.items() for block_hash in blocks}

"""The units of the KV cache: a block, its content, and the queue of free blocks.

Nothing here holds keys or values: those live in the worker's tensors. A `KVCacheBlock` is the engine's record of one
slot of every such tensor. Block lifetimes are measured on a sample (`KVCacheMetricsCollector`).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quire.wire.block_hash import BlockHash, ExtraKeys
from quire.wire.execution import BlockIds
from quire.wire.stats import KVCacheEvictionEvent


class IntegrityError(AssertionError):
    """The bookkeeping of the KV cache contradicts itself: a bug here, or a broken contract of the caller.

    Never catch and ignore it: the next token could be read from another request's cache.
    """


@dataclass(slots=True, eq=False)
class BlockContent:
    """The tokens and extra keys that a full block was computed from.

    With its parents it is the exact prefix that a hash only stands for. Contents are compared on every hit, so that two
    prefixes with one hash never share a block (promise S8). A content outlives the eviction of its parent's block: a
    sliding window keeps the end of a prefix without its start.
    """

    parent: BlockContent | None
    token_ids: tuple[int, ...]
    extra_keys: ExtraKeys | None


class KVCacheBlock:
    """One block of the pool.

    It is in the free queue exactly while `ref_cnt` is 0; a free block may still hold a cached prefix. `block_hash` (the
    content's hash and the group id) and `content` are set together while the block can be hit. `num_holds` of its
    references are of no table. `forgotten_at` is the number of changes of the cache at which it last lost its content.
    """

    __slots__ = (
        "block_hash",
        "block_id",
        "content",
        "forgotten_at",
        "is_null",
        "next_free_block",
        "num_holds",
        "prev_free_block",
        "ref_cnt",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = self.num_holds = 0
        self.forgotten_at = 0
        self.block_hash: BlockHash | None = None
        self.content: BlockContent | None = None
        self.is_null = False
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash is not None else None
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={digest})"


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of a request, a list per KV cache group. The lists are never changed."""

    blocks: tuple[list[KVCacheBlock], ...]

    def get_block_ids(self) -> BlockIds:
        """Returns ids per group; 0, the null block, stands for tokens that a sliding window has left behind."""
        return tuple([block.block_id for block in group] for group in self.blocks)


class FreeKVCacheBlockQueue:
    """A doubly linked list through the blocks themselves, between two sentinels.

    A cache hit takes a block out of the middle in O(1), which a deque could not. The head is given out first. Links of
    a block outside of the queue are None.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self.head = KVCacheBlock(-1)
        self.tail = KVCacheBlock(-1)
        _link(self.head, self.tail)
        self.append_n(list(blocks))

    def popleft(self) -> KVCacheBlock:
        """Removes and returns the first block. Raises IntegrityError if there is none: the caller must have counted."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Removes and returns the first `n` blocks, in order."""
        if n > self.num_free_blocks:
            raise IntegrityError(f"{n} blocks were taken from a free queue of {self.num_free_blocks}")
        taken: list[KVCacheBlock] = []
        block = self.head.next_free_block
        for _ in range(n):
            assert block is not None
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            taken.append(block)
            block = following
        assert block is not None
        _link(self.head, block)
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Removes `block`, wherever it is. Raises IntegrityError if it is not in the queue."""
        previous, following = block.prev_free_block, block.next_free_block
        if previous is None or following is None:
            raise IntegrityError(f"{block} was removed from the free queue but is not in it")
        _link(previous, following)
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds `blocks` at the end, in their order."""
        before = self.tail.prev_free_block
        assert before is not None
        self._insert(before, blocks, self.tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds `blocks` at the beginning: blocks[0] becomes the head."""
        after = self.head.next_free_block
        assert after is not None
        self._insert(self.head, blocks, after)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Returns the queue from head to tail. O(n)."""
        blocks: list[KVCacheBlock] = []
        block = self.head.next_free_block
        while block is not None and block is not self.tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def check_integrity(self) -> None:
        """Raises IntegrityError if a link is broken, a block in use is queued or the count is wrong. O(n)."""
        previous, count = self.head, 0
        block = previous.next_free_block
        while block is not None and block is not self.tail:
            if block.prev_free_block is not previous:
                raise IntegrityError(f"the free queue is torn between {previous} and {block}")
            if block.ref_cnt:
                raise IntegrityError(f"{block} is in the free queue")
            previous = block
            block = block.next_free_block
            count += 1
        if block is None or block.prev_free_block is not previous:
            raise IntegrityError(f"the free queue does not end after {previous}")
        if count != self.num_free_blocks:
            raise IntegrityError(f"the free queue holds {count} blocks and counts {self.num_free_blocks}")

    def _insert(self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock) -> None:
        for block in blocks:
            if block.next_free_block is not None:
                raise IntegrityError(f"{block} was freed but is in the free queue already")
            _link(before, block)
            # set at once, so that a block given twice is noticed above
            block.next_free_block = after
            before = block
        _link(before, after)
        self.num_free_blocks += len(blocks)


def _link(left: KVCacheBlock, right: KVCacheBlock) -> None:
    left.next_free_block = right
    right.prev_free_block = left


NUM_ACCESSES_KEPT = 4


@dataclass(slots=True)
class _BlockLife:
    birth_ts: float
    access_ts: deque[float]
    """Times of its last few uses; the allocation is the first."""


class KVCacheMetricsCollector:
    """Observes a share of the allocated blocks from allocation to eviction.

    A block whose content was never cached, or was dropped by a reset, is reused rather than evicted and makes no event.
    The sample is drawn from a generator of its own, so that a seed replays a run.
    """

    def __init__(self, sample_rate: float, clock: Callable[[], float] = time.monotonic, seed: int = 0) -> None:
        self._sample_rate = sample_rate
        self._clock = clock
        self._random = random.Random(seed)
        self._lives: dict[int, _BlockLife] = {}
        self._events: list[KVCacheEvictionEvent] = []

    def on_block_allocated(self, block_id: int) -> None:
        """Records that a block was given to a request for new tokens."""
        self._lives.pop(block_id, None)
        if self._random.random() < self._sample_rate:
            now = self._clock()
            self._lives[block_id] = _BlockLife(now, deque([now], maxlen=NUM_ACCESSES_KEPT))

    def on_block_accessed(self, block_id: int) -> None:
        """Records that a request hit the block."""
        if life := self._lives.get(block_id):
            life.access_ts.append(self._clock())

    def on_block_evicted(self, block_id: int) -> None:
        """Records that the block's cached content is about to be overwritten."""
        if life := self._lives.pop(block_id, None):
            now = self._clock()
            gaps = tuple(after - before for before, after in pairwise(life.access_ts))
            self._events.append(KVCacheEvictionEvent(now - life.birth_ts, now - life.access_ts[-1], gaps))

    def reset(self) -> None:
        """Forgets the observed blocks: the cache was emptied on purpose, so none of them will be evicted."""
        self._lives.clear()

    def take_events(self) -> list[KVCacheEvictionEvent]:
        """Returns the evictions since the last call."""
        events, self._events = self._events, []
        return events

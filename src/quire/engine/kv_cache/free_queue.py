"""The order in which free blocks are given out (checklist S1-KV-011)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.kv_cache.block import IntegrityError, KVCacheBlock


class FreeKVCacheBlockQueue:
    """A doubly linked list through the blocks themselves, between two sentinels.

    A plain deque would not do: a cache hit takes a block out of the middle, and that has to be O(1). The head is given
    out first. Links of a block outside of the queue are None.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self.head = KVCacheBlock(-1)
        self.tail = KVCacheBlock(-1)
        _link(self.head, self.tail)
        self.append_n(list(blocks))

    def popleft(self) -> KVCacheBlock:
        """Take the first block. IntegrityError if there is none: the caller must have counted."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first `n` blocks, in order."""
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
        """Take `block` out, wherever it is. IntegrityError if it is not in the queue."""
        previous, following = block.prev_free_block, block.next_free_block
        if previous is None or following is None:
            raise IntegrityError(f"{block} was removed from the free queue but is not in it")
        _link(previous, following)
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put `block` last."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` last, in their order."""
        before = self.tail.prev_free_block
        assert before is not None
        self._insert(before, blocks, self.tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` first: blocks[0] becomes the head."""
        after = self.head.next_free_block
        assert after is not None
        self._insert(self.head, blocks, after)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """The queue from head to tail. O(n)."""
        blocks: list[KVCacheBlock] = []
        block = self.head.next_free_block
        while block is not None and block is not self.tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def check_integrity(self) -> None:
        """Raise IntegrityError if a link is broken, a block in use is queued or the count is off. O(n)."""
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
            # Set at once, so that a block given twice is noticed above.
            block.next_free_block = after
            before = block
        _link(before, after)
        self.num_free_blocks += len(blocks)


def _link(left: KVCacheBlock, right: KVCacheBlock) -> None:
    left.next_free_block = right
    right.prev_free_block = left

"""The KV cache of `FakeExecutor`: slots that hold digests, and a record of which live request holds which block."""

from __future__ import annotations

from collections.abc import Iterable

from quire.testing.fake_model import SLOT_BYTES

NULL_BLOCK_ID = 0


class ProtocolError(AssertionError):
    """The engine asked for something a real worker could only answer with wrong numbers."""


class KVMemory:
    """One pool of blocks for all groups, as in the real cache: tensor j is shared by the j-th layer of every group.

    Blocks are counted per live table that holds them. A block of more than one table is shared, hence read-only.
    Slots that were never written read as zeros, and freed ones keep what they held, as on a device.
    """

    def __init__(self, num_blocks: int, max_block_size: int) -> None:
        self.num_blocks = num_blocks
        self._bytes_per_block = max_block_size * SLOT_BYTES
        self._slots = bytearray(num_blocks * self._bytes_per_block)
        self._num_holders = [0] * num_blocks

    def hold(self, block_ids: Iterable[int]) -> None:
        """A table got these blocks; null blocks are not counted."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ProtocolError(f"block {block_id} does not exist: the pool has {self.num_blocks} blocks")
            if block_id != NULL_BLOCK_ID:
                self._num_holders[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """A table no longer reads these blocks."""
        for block_id in block_ids:
            if block_id != NULL_BLOCK_ID:
                self._num_holders[block_id] -= 1

    def read(self, table: BlockTable, start: int, end: int) -> bytes:
        """The slots of tokens [start, end) through `table`."""
        if start == end:
            return b""
        first, stride, memory = start // table.block_size, self._bytes_per_block, self._slots
        size = table.block_size * SLOT_BYTES
        block_ids = table.block_ids[first : -(-end // table.block_size)]
        if NULL_BLOCK_ID in block_ids:
            raise ProtocolError(f"tokens [{start}, {end}) are read through the null block: table {table.block_ids}")
        slots = b"".join([memory[i * stride : i * stride + size] for i in block_ids])
        offset = first * table.block_size
        return slots[(start - offset) * SLOT_BYTES : (end - offset) * SLOT_BYTES]

    def write(self, table: BlockTable, start: int, slots: bytes) -> None:
        """Fill the slots of the tokens from `start` on through `table`."""
        size = table.block_size * SLOT_BYTES
        offset = start * SLOT_BYTES
        done = 0
        while done < len(slots):
            index, inside = divmod(offset + done, size)
            block_id = table.block_ids[index]
            self._check_writable(block_id, table)
            part = slots[done : done + size - inside]
            at = block_id * self._bytes_per_block + inside
            self._slots[at : at + len(part)] = part
            done += len(part)

    def _check_writable(self, block_id: int, table: BlockTable) -> None:
        if block_id == NULL_BLOCK_ID:
            raise ProtocolError(f"the null block would be written: table {table.block_ids}")
        if self._num_holders[block_id] != 1:
            raise ProtocolError(
                f"block {block_id} would be written while {self._num_holders[block_id]} live tables hold it: "
                f"table {table.block_ids}"
            )


class BlockTable:
    """The blocks of one request in one group, in order of position; append-only, as the engine sends them."""

    def __init__(self, memory: KVMemory, block_size: int, window: int | None, block_ids: list[int]) -> None:
        self.block_size = block_size
        self.block_ids: list[int] = []
        self._memory = memory
        self._window = window
        self._num_released = 0
        """Leading blocks that have left the sliding window: the engine may give them to others, we no longer look."""
        self.append(block_ids)

    def append(self, block_ids: list[int]) -> None:
        """More blocks for more tokens."""
        self._memory.hold(block_ids)
        self.block_ids += block_ids

    def first_visible(self, position: int) -> int:
        """The first token that attention at `position` can see."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def slide(self, position: int) -> None:
        """Let go of blocks that nothing from `position` on can see."""
        gone = self.first_visible(position) // self.block_size
        if gone > self._num_released:
            self._memory.release(self.block_ids[self._num_released : gone])
            self._num_released = gone

    def drop(self) -> None:
        """The request is over, or preempted."""
        self._memory.release(self.block_ids[self._num_released :])

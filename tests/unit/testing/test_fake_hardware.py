"""Slots behave as device memory does: read and written through tables, never cleared."""

from __future__ import annotations

import pytest

from quire.testing.fake_hardware import BlockTable, KVMemory, ProtocolError
from quire.testing.fake_model import SLOT_BYTES


def slots(text: str) -> bytes:
    """One slot per letter."""
    return b"".join(letter.encode() * SLOT_BYTES for letter in text)


@pytest.fixture
def memory() -> KVMemory:
    return KVMemory(num_blocks=6, max_block_size=4)


def test_what_is_written_is_read_through_the_table(memory: KVMemory) -> None:
    table = BlockTable(memory, 4, None, [3, 1, 5])
    memory.write(table, 0, slots("abcdef"))
    memory.write(table, 6, slots("ghij"))
    assert memory.read(table, 0, 10) == slots("abcdefghij")
    assert memory.read(table, 3, 9) == slots("defghi")
    assert memory.read(table, 4, 4) == b""
    assert memory.read(BlockTable(memory, 4, None, [1]), 0, 4) == slots("efgh")


def test_smaller_blocks_of_another_group(memory: KVMemory) -> None:
    table = BlockTable(memory, 2, None, [2, 4])
    memory.write(table, 1, slots("bc"))
    assert memory.read(table, 0, 3) == bytes(SLOT_BYTES) + slots("bc")


def test_freed_slots_keep_what_they_held(memory: KVMemory) -> None:
    table = BlockTable(memory, 4, None, [2])
    memory.write(table, 0, slots("abcd"))
    table.drop()
    assert memory.read(BlockTable(memory, 4, None, [2]), 0, 4) == slots("abcd")


def test_only_a_sole_holder_may_write(memory: KVMemory) -> None:
    first, second = BlockTable(memory, 4, None, [1]), BlockTable(memory, 4, None, [1])
    with pytest.raises(ProtocolError, match="2 live tables"):
        memory.write(first, 0, slots("a"))
    second.drop()
    memory.write(first, 0, slots("a"))


def test_a_sliding_table_lets_go_of_what_it_cannot_see(memory: KVMemory) -> None:
    table = BlockTable(memory, 4, 3, [1, 2, 3])
    other = BlockTable(memory, 4, None, [1])
    assert [table.first_visible(position) for position in (0, 2, 3, 6)] == [0, 0, 1, 4]
    table.slide(5)
    with pytest.raises(ProtocolError, match="2 live tables"):
        memory.write(other, 0, slots("a"))
    table.slide(6)
    memory.write(other, 0, slots("a"))
    table.drop()
    memory.write(BlockTable(memory, 4, None, [2]), 0, slots("a"))


@pytest.mark.parametrize("block_id", [-1, 6])
def test_blocks_that_do_not_exist(memory: KVMemory, block_id: int) -> None:
    with pytest.raises(ProtocolError, match="does not exist"):
        BlockTable(memory, 4, None, [block_id])

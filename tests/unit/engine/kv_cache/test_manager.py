"""The manager on worked examples: what is reused, in what order blocks go, and what a refusal leaves behind."""

from __future__ import annotations

from tests.unit.engine.kv_cache.model import ModelRequest, admit, decode, free_ids, letters, make_manager, table


def test_worked_example_of_three_requests() -> None:
    """S1-KV-029 with Quire's rules: block 0 is the null block, un-hashed blocks are freed to the head."""
    manager = make_manager(11)  # ten blocks can be given out: 1...10
    first = ModelRequest("0", letters("ABCDEFGHIJKLMNO"))
    assert admit(manager, first) == 0
    assert table(manager, first) == [1, 2, 3, 4]
    decode(manager, first, letters("PQ"))  # P fills block 4, Q opens block 5
    assert table(manager, first) == [1, 2, 3, 4, 5]
    assert [block.block_hash is not None for block in manager.get_blocks("0").blocks[0]] == [True] * 4 + [False]

    second = ModelRequest("1", letters("ABCDEFGHIJklmn"))
    assert admit(manager, second) == 8
    assert table(manager, second) == [1, 2, 6, 7]
    assert [block.ref_cnt for block in manager.get_blocks("1").blocks[0]] == [2, 2, 1, 1]
    assert free_ids(manager) == [8, 9, 10]

    manager.free(
        first
    )  # 5 was never full: head. 4 and 3 are cached: tail, end of the prefix first. 2 and 1 are shared.
    assert free_ids(manager) == [5, 8, 9, 10, 4, 3]

    third = ModelRequest("2", letters("ABCDEFGHIJKLabcdefghijklmnopq"))
    assert admit(manager, third) == 12  # block 3 is hit while it is free
    assert table(manager, third) == [1, 2, 3, 5, 8, 9, 10, 4]  # and block 4, though cached, is evicted
    assert free_ids(manager) == []
    manager.check_integrity()

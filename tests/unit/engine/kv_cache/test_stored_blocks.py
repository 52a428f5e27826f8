"""Blocks of a store, for KV cache events: one is there if every worker has a record of it."""

from __future__ import annotations

from quire.engine.kv_cache.changes import TierBlocks
from quire.engine.kv_cache.stored_blocks import StoredBlocks
from quire.wire.kv_events import REMOTE

A, B, C = ((0, bytes([number]) * 32) for number in range(3))
D = (1, b"d" * 32)


def stored(*names: tuple[int, bytes]) -> TierBlocks:
    return TierBlocks(names[0][0], [digest for _, digest in names], is_stored=True)


def gone(name: tuple[int, bytes]) -> TierBlocks:
    return TierBlocks(name[0], [name[1]], is_stored=False)


def test_changes_are_taken_once() -> None:
    blocks = StoredBlocks(1)
    assert blocks.take(everything=False) == []
    blocks.update(0, [list(A), list(B), list(D)], [])
    blocks.update(0, [A], [])
    assert blocks.take(everything=False) == [stored(A, B), stored(D)], "it was there already"
    blocks.update(0, [C], [A])
    blocks.update(0, [], [A])
    assert blocks.take(everything=False) == [stored(C), gone(A)]
    assert blocks.take(everything=True) == [stored(B, C), stored(D)]


def test_subscribers_that_forget_everything_hear_what_is_there() -> None:
    blocks = StoredBlocks(1)
    blocks.update(0, [A, B], [])
    blocks.update(0, [], [A])
    assert blocks.take(everything=True) == [stored(B)]
    assert blocks.take(everything=False) == [], "what led there is of no use"


def test_all_workers_must_have_a_block() -> None:
    blocks = StoredBlocks(2)
    blocks.update(0, [A, B], [])
    assert blocks.take(everything=False) == []
    blocks.update(1, [B, C], [])
    assert blocks.take(everything=False) == [stored(B)]
    blocks.update(0, [], [A, B])
    blocks.update(1, [], [B])
    assert blocks.take(everything=False) == [gone(B)]
    assert blocks.take(everything=True) == []


def test_another_namespace_holds_nothing() -> None:
    blocks = StoredBlocks(2)
    blocks.update(0, [A, B], [])
    blocks.update(1, [A, C], [])
    blocks.clear()
    assert blocks.take(everything=False) == [stored(A), gone(A)]
    blocks.update(0, [A], [])
    blocks.update(1, [A], [])
    assert blocks.take(everything=False) == [stored(A)]


def test_a_report_that_begins_anew_is_all_that_is_there() -> None:
    blocks = StoredBlocks(1)
    blocks.update(0, [A, B], [])
    blocks.update(0, [B, C], [], True)
    assert blocks.take(everything=False) == [stored(A, B), gone(A), gone(B), stored(B, C)]
    blocks.update(0, [], [], True)
    assert blocks.take(everything=False) == [gone(B), gone(C)]


def test_blocks_of_a_server_are_elsewhere() -> None:
    there = StoredBlocks(1, REMOTE)
    there.update(0, [A, B], [A])
    at_server = [
        TierBlocks(0, [A[1], B[1]], is_stored=True, locality=REMOTE),
        TierBlocks(0, [A[1]], is_stored=False, locality=REMOTE),
    ]
    assert there.take(everything=False) == at_server
    assert there.take(everything=True) == [TierBlocks(0, [B[1]], is_stored=True, locality=REMOTE)]

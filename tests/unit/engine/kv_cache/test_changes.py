"""Changes of the prefix cache: copies are none, runs end where something else happens, hashes follow from them."""

from __future__ import annotations

from quire.engine.kv_cache.changes import BlockChanges, Change, Cleared, RemovedBlock, StoredRun, describe_cached_blocks
from quire.engine.kv_cache.manager import KVCacheManager
from quire.lora_request import LoRARequest
from quire.wire.block_hash import hash_block

from .model import ModelRequest, admit, decode, full, letters, make_manager, sliding


def recording(*args: object) -> tuple[KVCacheManager, BlockChanges]:
    manager = make_manager(*args)  # type: ignore[arg-type]
    manager.block_pool.changes = changes = BlockChanges()
    return manager, changes


def describe(changes: list[Change]) -> list[str]:
    """Returns a word for each change: the letters of stored blocks, - for a removal."""
    words = []
    for change in changes:
        if isinstance(change, StoredRun):
            words.append("".join(map(chr, change.token_ids)))
            parent = change.parent
            for i, block_hash in enumerate(change.hashes):
                size = len(change.token_ids) // len(change.hashes)
                parent = hash_block(parent, change.token_ids[i * size : (i + 1) * size], change.extra_keys[i])
                assert parent == block_hash
        else:
            words.append("-" if isinstance(change, RemovedBlock) else "cleared")
    return words


def test_blocks_of_a_request_are_one_run() -> None:
    manager, changes = recording(11)
    first = ModelRequest("0", letters("ABCDEFGHIJKLMNO"))
    admit(manager, first)
    assert describe(changes.take()) == ["ABCDEFGHIJKL"]
    decode(manager, first, letters("PQ"))
    (run,) = changes.take()
    assert describe([run]) == ["MNOP"]
    assert isinstance(run, StoredRun)
    assert run.parent == first.block_hashes[2]


def test_a_copy_is_no_change() -> None:
    manager, changes = recording(11)
    first = ModelRequest("0", letters("ABCDEFGH"))
    admit(manager, first)
    second = ModelRequest("1", letters("ABCDEFGH"))  # the block with its last token is computed again
    assert admit(manager, second) == 4
    assert describe(changes.take()) == ["ABCDEFGH"]
    manager.free(first)
    manager.free(second)
    assert changes.take() == []
    admit(manager, ModelRequest("2", letters("abcdefghijklmnopqrstuvwxyzabcdefghijklmn")))  # all ten blocks
    assert describe(changes.take())[:2] == ["-", "-"]


def test_a_removal_ends_a_run() -> None:
    changes = BlockChanges()
    request = ModelRequest("0", letters("ABCDEFGH"))
    changes.on_stored(request, 0, 0, letters("ABCD"), None)
    changes.on_removed(0, b"x" * 32)
    changes.on_stored(request, 1, 0, letters("EFGH"), None)
    assert len(changes.take()) == 3


def test_a_reset_is_one_change_and_hides_those_before() -> None:
    manager, changes = recording(11)
    request = ModelRequest("0", letters("ABCDEFGH"))
    admit(manager, request)
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert changes.take() == [Cleared.ALL]


def test_adapters_are_named() -> None:
    manager, changes = recording(11)
    admit(manager, ModelRequest("0", letters("ABCDEFGH"), lora_request=LoRARequest("sql", 3, "/sql")))
    (run,) = changes.take()
    assert isinstance(run, StoredRun)
    assert run.lora_id == 3
    assert run.extra_keys == [(("lora", "sql", "/sql"),)] * 2


def test_chains_are_described_with_parents_that_are_gone() -> None:
    """A window drops the start of a prefix: what is left of it still has its parent's hash."""
    manager, changes = recording(30, full(), sliding(4))
    for name, text in (("0", "ABCDEFGHIJKLMNOP"), ("1", "ABCDEFGHijklmnop")):
        request = ModelRequest(name, letters(text))
        admit(manager, request)
        decode(manager, request, letters("QRSTUVWX"))
        manager.free(request)
    admit(manager, ModelRequest("2", letters("0123456789" * 4)))
    described = describe_cached_blocks(manager.block_pool.blocks, 2)
    assert changes.take()
    describe(described)  # every hash follows from its parent's
    assert len(described) > 2

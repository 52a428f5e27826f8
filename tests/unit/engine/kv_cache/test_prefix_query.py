"""Contents are equal when every token and key from the first block on is."""

from __future__ import annotations

import pytest

from quire.engine.kv_cache.block import BlockContent
from quire.engine.kv_cache.hashing import PrefixQuery
from quire.wire.block_hash import ExtraKeys
from tests.unit.engine.kv_cache.model import BLOCK_SIZE, ModelRequest, letters


def _chain(*blocks: str, salt: str | None = None) -> BlockContent:
    content: BlockContent | None = None
    for block in blocks:
        keys: ExtraKeys | None = (("cache_salt", salt),) if content is None and salt is not None else None
        content = BlockContent(content, tuple(letters(block)), keys)
    assert content is not None
    return content


def _query(text: str, salt: str | None = None) -> PrefixQuery:
    return PrefixQuery(ModelRequest("r", letters(text), cache_salt=salt), BLOCK_SIZE)


def test_an_equal_chain_is_a_prefix() -> None:
    query = _query("ABCDEFGHIJ")
    assert query.is_prefix(_chain("ABCD"), 0)
    assert query.is_prefix(_chain("ABCD", "EFGH"), 1)


@pytest.mark.parametrize(
    ("content", "index"),
    [
        (_chain("ABCE"), 0),
        (_chain("ABCD", "EFGX"), 1),
        (_chain("XBCD", "EFGH"), 1),  # the same block after another prefix
        (_chain("EFGH"), 1),  # the same block as the first of a prompt
        (_chain("EFGH", "ABCD"), 0),  # the same first block, but second
        (_chain("ABCD", "EFGH"), 0),
        (_chain("ABCD", salt=""), 0),
        (_chain("ABCD", "EFGH", salt="x"), 1),
    ],
)
def test_an_unequal_chain_is_no_prefix(content: BlockContent, index: int) -> None:
    assert not _query("ABCDEFGHIJ").is_prefix(content, index)


def test_another_salt_is_no_prefix() -> None:
    assert _query("ABCDE", salt="").is_prefix(_chain("ABCD", salt=""), 0)
    assert not _query("ABCDE", salt="").is_prefix(_chain("ABCD"), 0)


def test_right_to_left_as_windows_look_up() -> None:
    query, content = _query("ABCDEFGHIJKLM"), _chain("ABCD", "EFGH", "IJKL")
    assert query.is_prefix(content, 2)
    assert content.parent is not None
    assert query.is_prefix(content.parent, 1)


def test_a_proven_parent_is_not_compared_again() -> None:
    query, parent = _query("ABCDEFGHIJKLM"), _chain("ABCD", "EFGH")
    assert query.is_prefix(parent, 1)
    parent.token_ids = ()  # would be noticed
    assert query.is_prefix(BlockContent(parent, tuple(letters("IJKL")), None), 2)


def test_a_wrong_child_of_a_proven_parent() -> None:
    query, parent = _query("ABCDEFGHIJKLM"), _chain("ABCD", "EFGH")
    assert query.is_prefix(parent, 1)
    assert not query.is_prefix(BlockContent(parent, tuple(letters("IJKX")), None), 2)
    # proven as block 1, it proves nothing about a shorter or longer chain
    assert not query.is_prefix(BlockContent(BlockContent(parent, (), None), tuple(letters("IJKL")), None), 2)


def test_long_chains_need_no_recursion() -> None:
    """Neither to be compared nor to be thrown away: 50,000 blocks of one token."""
    request = ModelRequest("r", [1] * 50_000, block_size=1)
    content: BlockContent | None = None
    for _ in range(50_000):
        content = BlockContent(content, (1,), None)
    assert content is not None
    assert PrefixQuery(request, 1).is_prefix(content, 49_999)
    del content

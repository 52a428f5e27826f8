"""Comparing a request with what cached blocks really hold."""

from __future__ import annotations

from quire.engine.kv_cache.block import BlockContent, CacheableRequest
from quire.engine.kv_cache.hashing import block_extra_keys

_UNPROVEN = object()


class PrefixQuery:
    """What is known of one request's prefix: which contents proved equal to it, so that a chain is walked only once."""

    def __init__(self, request: CacheableRequest, block_size: int) -> None:
        self.block_hashes = request.block_hashes
        self.request = request
        self._block_size = block_size
        self._proven: dict[int, BlockContent | None] = {-1: None}  # before the first block there is nothing

    def is_prefix(self, content: BlockContent, index: int) -> bool:
        """Whether `content` and its parents are, token for token, blocks 0...index of the request."""
        walked: list[BlockContent] = []
        node: BlockContent | None = content
        position = index
        while self._proven.get(position, _UNPROVEN) is not node:
            if node is None or position < 0 or not self._equals_block(node, position):
                return False
            walked.append(node)
            node = node.parent
            position -= 1
        while walked:
            position += 1
            self._proven[position] = walked.pop()
        return True

    def _equals_block(self, content: BlockContent, index: int) -> bool:
        start = index * self._block_size
        token_ids = tuple(self.request.all_token_ids[start : start + self._block_size])
        return content.token_ids == token_ids and content.extra_keys == block_extra_keys(self.request, index)

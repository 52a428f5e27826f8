"""The hashes of a request's blocks, and the proof that cached blocks hold its prefix. `wire/block_hash.py` has the
hash chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np

from quire.engine.kv_cache.block import BlockContent
from quire.engine.request import BlockHasher, Request
from quire.wire.block_hash import BlockHash, ExtraKeys, hash_block
from quire.wire.engine_core import EngineCoreRequest

HashFunction = Callable[[BlockHash | None, Sequence[int], ExtraKeys | None], BlockHash]


def block_extra_keys(request: Request, block_index: int, block_size: int) -> ExtraKeys | None:
    """Returns what besides tokens and parent distinguishes block `block_index` of `request`; None: nothing.

    An adapter enters every block from the one in which it begins on; its revision, too, unless it is the first one
    under that name and path. Where it begins inside a block, the place enters that block. The salt enters the first
    block only: through the chain it reaches all. Whatever else decides keys and values is added here: an image adds
    ("mm", its hash, its offset in the block) to each block it covers.
    """
    keys: ExtraKeys = ()
    lora, lora_start = request.lora_request, request.lora_start - block_index * block_size
    if lora is not None and lora_start < block_size:
        keys += (("lora", lora.lora_name, lora.lora_path),)
        if request.lora_revision > 1:
            keys += (("lora_revision", request.lora_revision),)
        if lora_start > 0:
            keys += (("lora_start", lora_start),)
    if request.prompt_embeds is not None:
        digest = _hash_embeds(request.origin, block_index * block_size, (block_index + 1) * block_size)
        keys += (("prompt_embeds", digest),) if digest else ()
    if request.cache_salt is not None and block_index == 0:
        keys += (("cache_salt", request.cache_salt),)
    return keys or None


def stored_extra_keys(extra_keys: ExtraKeys | None, adapter_digest: str) -> ExtraKeys | None:
    """Returns the extra keys of a block for a store outside the engine: an adapter counts by the digest of its files,
    not by its name, path and revision."""
    if extra_keys is None or not adapter_digest:
        return extra_keys
    named = [("adapter", adapter_digest) if key[0] == "lora" else key for key in extra_keys]
    return tuple(key for key in named if key[0] != "lora_revision")


def stored_hashes(request: Request, block_size: int) -> list[BlockHash]:
    """Returns the hashes by which a store outside the engine knows a request's blocks: its `block_hashes`, or those
    with `stored_extra_keys`; none before its adapter was loaded. They must not be changed."""
    if request.lora_request is None:
        return request.block_hashes
    digest, known = request.report.adapter_digest, request.report.stored_hashes
    for index in range(len(known), len(request.block_hashes) if digest else 0):
        token_ids = request.all_token_ids[index * block_size : (index + 1) * block_size]
        keys = stored_extra_keys(block_extra_keys(request, index, block_size), digest)
        known.append(hash_block(known[-1] if known else None, token_ids, keys))
    return known


def _hash_embeds(origin: EngineCoreRequest, start: int, stop: int) -> bytes | None:
    """Returns the digest of the positions from `start` to `stop` of a prompt of embeddings: which are embeddings, and
    their rows. None: none is."""
    embeds, is_token_ids = origin.prompt_embeds, origin.prompt_is_token_ids
    assert embeds is not None
    rows = embeds[start:stop]
    are_embeds = np.ones(len(rows), bool) if is_token_ids is None else ~np.array(is_token_ids[start:stop], bool)
    if not are_embeds.any():
        return None
    digest = sha256(are_embeds.tobytes())
    digest.update(np.ascontiguousarray(rows[are_embeds]).data)
    return digest.digest()


def make_block_hasher(block_size: int, hash_function: HashFunction = hash_block) -> BlockHasher:
    """Returns a function that computes the hashes a request still lacks: one per full block beyond its
    `block_hashes`."""

    def hash_new_blocks(request: Request) -> list[BlockHash]:
        known = request.block_hashes
        first, stop = len(known), request.num_tokens // block_size
        if first >= stop:
            return []  # most calls
        new: list[BlockHash] = []
        parent = known[-1] if known else None
        for index in range(first, stop):
            token_ids = request.all_token_ids[index * block_size : (index + 1) * block_size]
            parent = hash_function(parent, token_ids, block_extra_keys(request, index, block_size))
            new.append(parent)
        return new

    return hash_new_blocks


_UNPROVEN = object()


class PrefixQuery:
    """Compares one request with the contents of cached blocks. Remembers what proved equal, so a chain is walked
    once."""

    def __init__(self, request: Request, block_size: int) -> None:
        self.block_hashes = request.block_hashes
        self.request = request
        self._block_size = block_size
        self._proven: dict[int, BlockContent | None] = {-1: None}  # before the first block there is nothing

    def is_prefix(self, content: BlockContent, index: int) -> bool:
        """Returns whether `content` and its parents are, token for token, blocks 0...index of the request."""
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
        extra_keys = block_extra_keys(self.request, index, self._block_size)
        return content.token_ids == token_ids and content.extra_keys == extra_keys

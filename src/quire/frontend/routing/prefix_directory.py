"""Which engine probably holds which prefix in its cache: exact hashes of the prompts that were sent to it.

Per engine the hashes of its blocks, as many as it has blocks, the least recently used forgotten first: what an engine's
own cache does. What an engine evicted otherwise is not known here; an error costs time, never a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.wire.block_hash import BlockHash, ExtraKeys, hash_block
from quire.wire.engine_core import EngineCoreRequest

MAX_HASHED_TOKENS = 1 << 16
"""Tokens of a prompt that are hashed; longer prompts differ long before."""
DEFAULT_NUM_BLOCKS = 1 << 16


def hash_prompt(request: EngineCoreRequest, block_size: int) -> list[BlockHash]:
    """Returns the hashes of the full blocks of a prompt, as the engine computes them; of a prompt of embeddings none.

    A later revision of an adapter has other hashes in the engine: its prompts are found only among themselves.
    """
    token_ids = request.prompt_token_ids
    if not token_ids or request.prompt_embeds is not None:
        return []
    lora = request.lora_request
    every: ExtraKeys = () if lora is None else (("lora", lora.lora_name, lora.lora_path),)
    first: ExtraKeys = every if request.cache_salt is None else (*every, ("cache_salt", request.cache_salt))
    hashes: list[BlockHash] = []
    parent: BlockHash | None = None
    num_tokens = min(len(token_ids), MAX_HASHED_TOKENS)
    for start in range(0, num_tokens - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size], (every if start else first) or None)
        hashes.append(parent)
    return hashes


class PrefixDirectory:
    """The prefixes of each engine. Single-threaded."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[BlockHash, None]] = {}
        self._limits: dict[int, int] = {}

    def open(self, engine: int, num_blocks: int | None = None) -> None:
        """Begins with an empty cache of an engine that has so many blocks: it is new, or was started again."""
        self._blocks[engine] = {}
        self._limits[engine] = num_blocks or DEFAULT_NUM_BLOCKS

    def close(self, engine: int) -> None:
        """Forgets an engine, or what it had cached."""
        self._blocks.pop(engine, None)

    def count_cached(self, engine: int, hashes: Sequence[BlockHash]) -> int:
        """Returns how many blocks at the start of a prompt the engine has."""
        known = self._blocks.get(engine)
        if not known:
            return 0
        count = 0
        for block in hashes:
            if block not in known:
                break
            count += 1
        return count

    def note_sent(self, engine: int, hashes: Iterable[BlockHash]) -> None:
        """Records that an engine computes a prompt."""
        known = self._blocks.get(engine)
        if known is None:
            return
        for block in hashes:
            known.pop(block, None)
            known[block] = None
        for block in list(known)[: max(0, len(known) - self._limits[engine])]:
            del known[block]

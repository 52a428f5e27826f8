"""The drafters, by the method's name in `--speculative-config`."""

from __future__ import annotations

from typing import NamedTuple


class DrafterSpec(NamedTuple):
    """A row of `DRAFTERS`."""

    factory: str
    """package.module:Class, called with a `DrafterContext`; imported when the method is chosen."""
    reads_hidden: bool = False
    """True if it needs the target's hidden states of every step."""
    has_kv: bool = False
    """True if it has layers in the KV cache."""


DRAFTERS: dict[str, DrafterSpec] = {}

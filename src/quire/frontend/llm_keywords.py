"""Keyword arguments of vLLM's `LLM` that Quire has no counterpart for: as `quire serve` does with vLLM's flags, what
only tunes something is taken with a warning, and what would change the engine is refused by name."""

from __future__ import annotations

from typing import Any

from quire.config.engine_args import FLAGS
from quire.config.vllm_flags import settle_vllm_flags, vllm_flags


def check_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords that are flags, or are no known ones. Raises ConfigError for one that would have to be ignored."""
    flags = {name: value for name, value in keywords.items() if name in FLAGS}
    others = {name: value for name, value in keywords.items() if name not in FLAGS}
    if others.get("trust_remote_code") is False:  # `LLM` passes it always, and the table is a file
        del others["trust_remote_code"]
    if not others:
        return flags
    known = {name for name, flag in vllm_flags().items() if flag.ignored or flag.refused}
    ours = settle_vllm_flags({name: value for name, value in others.items() if name in known}, as_keywords=True)
    unknown = {name: value for name, value in others.items() if name not in known}
    return {**{name: value for name, value in ours.items() if name in FLAGS}, **flags, **unknown}

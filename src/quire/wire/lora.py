"""Adapters between engine and worker, and between engine and frontend.

An adapter that is loaded is a *revision*: the files of a name as they were when it was read. A request is bound to one
when it arrives, and ends on it, whatever is loaded under that name meanwhile.
"""

from __future__ import annotations

import msgspec

from quire.lora_request import LoRARequest

NEVER = 1 << 62
"""Position behind all tokens."""
AdapterKey = tuple[int, int]
"""(lora_int_id, revision): one set of weights in the worker's memory."""


class AdapterLoad(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Asks the workers to read one revision of an adapter. `digest`: what its files must have; None: any."""

    lora_request: LoRARequest
    revision: int
    digest: str | None = None

    @property
    def key(self) -> AdapterKey:
        """The key that the loaded adapter gets."""
        return self.lora_request.lora_int_id, self.revision


class AdapterInfo(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A loaded revision of an adapter."""

    lora_int_id: int
    revision: int
    digest: str
    """SHA-256 of its config and tensors, hexadecimal."""
    num_bytes: int
    """Memory of its packed weights."""
    rank: int
    """The largest rank of its sites."""
    invocation_token_ids: list[int] = []
    """Tokens at whose last occurrence in a prompt it begins; empty: it applies to all tokens."""

    def find_start(self, prompt_token_ids: list[int]) -> int:
        """Returns the position of the first token of a request that it applies to; `NEVER` if it applies to none."""
        wanted = self.invocation_token_ids
        if not wanted:
            return 0
        for start in range(len(prompt_token_ids) - len(wanted), -1, -1):
            if prompt_token_ids[start] == wanted[0] and prompt_token_ids[start : start + len(wanted)] == wanted:
                return start
        return NEVER


class RegisteredAdapter(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An adapter that is registered again with a restarted engine core, which reads it when a request asks for it."""

    lora_request: LoRARequest
    revision: int
    digest: str
    is_pinned: bool = False

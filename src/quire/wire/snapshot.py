"""What an engine core looks like at one moment, for people who watch it: its blocks and its requests.

Made on demand, between two steps, and bounded in size whatever the core holds. No token and no text is in it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

RequestPlace = Literal["running", "waiting", "preempted", "blocked"]
"""waiting: for capacity. preempted: the same, after its blocks were taken. blocked: for a grammar, the end of a pause
or a step in flight."""
MAX_REFERENCES = 255
"""What is shown of a block that is held more often."""


class BlockMap(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The blocks of the KV cache. The counts are exact; a large cache is listed by every `stride`-th block.

    Listed are the blocks 0, stride, 2 * stride, … below `num_touched`, a byte each. Block 0 is the null block.
    """

    num_blocks: int
    """In the pool, the null block included."""
    num_free: int
    """Can be given out; those that hold a cached prefix are among them."""
    num_cached: int
    """Hold a prefix that a request can find, whether in use or free."""
    num_touched: int
    """Blocks from this one on have never been given out."""
    stride: int = 1
    references: bytes = b""
    """How many block tables hold it, up to `MAX_REFERENCES`."""
    is_cached: bytes = b""
    """1 if it holds a prefix that a request can find."""


class RequestSnapshot(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One unfinished request, as the scheduler sees it."""

    request_id: str
    """The internal id."""
    external_req_id: str
    """The user's."""
    place: RequestPlace
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output."""
    num_computed_tokens: int
    num_cached_tokens: int = -1
    """Of the prompt, found in the prefix cache when it was admitted; -1 before that."""
    max_tokens: int | None = None
    num_preemptions: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    """Wall clock."""
    num_blocks: int = 0
    """It holds in all tables, the null block left out."""
    block_ids: bytes = b""
    """Their ids, unsigned 32-bit little-endian; of many, those of its beginning."""


class EngineSnapshot(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The core between two steps. `timestamp` and `time` are one moment on its monotonic and on the wall clock."""

    timestamp: float
    time: float
    pause_state: int
    """0 unpaused, 1 only new requests wait, 2 nothing is scheduled."""
    num_running: int
    num_waiting: int
    """For whatever."""
    max_num_seqs: int
    max_num_scheduled_tokens: int
    blocks: BlockMap
    requests: list[RequestSnapshot] = []
    """Running ones in order of admission, then waiting ones from the head of the queue; of many, the first."""
    num_left_out: int = 0
    """Requests that are not in the list."""

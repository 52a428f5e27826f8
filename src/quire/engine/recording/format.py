"""The contents of a recording, as structs and as bytes. Knows nothing of schedulers or files.

A recording is MAGIC, then frames. A frame is the length and the CRC-32 of a payload (little-endian, 4 bytes each), and
the payload: of the first frame a `Header`, of the others a msgpack array of events. Only whole frames are appended, so
that a file may end at any byte and all frames before it are good.

Requests are identified by the number of their arrival. No event holds a prompt or an output: block hashes show which
prefixes are shared. They are made under a key that is thrown away, so that prompts cannot be tried against them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import msgspec

from quire.config.engine import SchedulerConfig
from quire.errors import ConfigError
from quire.wire.execution import BlockIds
from quire.wire.kv_cache import KVCacheConfig

MAGIC = b"quire recording\n"
FORMAT = 1
"""Version of everything after MAGIC."""
FORMAT_WITH_TRANSFERS = 2
"""The version of recordings of engines with a connector: they have `Transfers`, too."""
MAX_FRAME_BYTES = 1 << 28
HASH_BYTES = 16

Hashes = tuple[int, int, bytes]
"""(request, index of the first block, digests one after another): the request's blocks from there on."""


class Header(msgspec.Struct, kw_only=True):
    """The recorded engine. A map, so that fields may be added without another format."""

    format: int = FORMAT
    quire: str
    created_at: float
    """Wall clock."""
    clock: float
    """The core's monotonic clock at the same time; events count from here."""
    model: str
    scheduler: SchedulerConfig
    kv_cache: KVCacheConfig
    max_model_len: int
    enable_caching: bool
    num_spec_tokens: int = 0
    num_lookahead_tokens: int = 0
    max_concurrent_steps: int = 1
    incarnation: int = 0
    """Number of starts of the core before this one: each start makes a recording of its own."""
    has_prompts: bool = False
    """True if prompt token ids are recorded."""
    connector: str = ""
    """Name of the connector by which blocks are loaded and saved; empty: there is none."""


class Event(msgspec.Struct, array_like=True, tag_field="kind", gc=False):
    """Base of events. `at` is in microseconds after the event before it (a step's: its beginning; `took` is until its
    end)."""

    at: int


class Add(Event, tag=1):
    """A request was given to the scheduler: it gets the next number, unless it was refused."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens generated before a restart."""
    flags: int
    max_tokens: int | None
    priority: int
    arrival_time: float
    client_index: int
    is_accepted: bool
    end: int = 0
    """The `RequestStatus` of a request that had ended before a restart."""
    hashes: Hashes | None = None
    prompt: list[int] | None = None
    adapter: tuple[str, int] | None = None
    """Name and revision of its adapter."""


SKIPS_CACHE, HAS_GRAMMAR, IS_POOLING = 4, 8, 16
"""The bits of `Add.flags`."""


class End(Event, tag=2):
    """Requests were ended by `finish_requests`. `requests` None: all live ones. Unknown ones are left out."""

    requests: list[int] | None
    status: int
    report: bool


class StepDetails(msgspec.Struct, array_like=True, gc=False):
    """Differences of a step from one that only decodes."""

    chunks: list[tuple[int, int]] = []
    """(request, tokens) where it is not one token."""
    new: list[tuple[int, int, BlockIds]] = []
    """(request, computed tokens, blocks) of requests that the worker does not know."""
    blocks: list[tuple[int, BlockIds]] = []
    """(request, new blocks) of the other requests."""
    finished: list[int] = []
    preempted: list[int] = []
    drafts: list[tuple[int, int]] = []
    ready: list[int] = []
    """Requests whose grammar was first found to be ready."""
    failed: list[tuple[int, int]] = []
    """(request, `RequestStatus`) of requests that ended in an error, or with a grammar: perhaps while the step was
    scheduled."""
    adapters: list[tuple[int, bool]] = []
    """(request, whether its adapter was found to be in memory, with a place for it) where that has changed."""
    hashes: list[Hashes] = []
    """Hashes of requests that got others, because of what was loaded as their adapter."""


class Step(Event, tag=3):
    """A step was scheduled."""

    took: int
    digest: int
    """CRC-32 of its rows: ids in their order, tokens of each, tokens computed before."""
    num_rows: int
    num_tokens: int
    details: StepDetails | None = None


class Update(Event, tag=4):
    """The result of the oldest step in flight was taken in."""

    took: int
    counts: list[tuple[int, int]] = []
    """(request, new tokens) where it is not one."""
    ends: list[tuple[int, int, int]] = []
    """(request, `FinishReason`, tokens kept)."""
    hashes: list[Hashes] = []
    pooled: list[int] = []
    jumps: list[tuple[int, int]] = []
    """(request, tokens that its grammar forced after those)."""


class Drafts(Event, tag=5):
    """Draft tokens were set: (request, how many of the proposed ones it can use)."""

    counts: list[tuple[int, int]]


class Abandon(Event, tag=6):
    """The steps in flight were given up."""


class Reset(Event, tag=7):
    """The prefix cache was to be dropped."""

    reset_running_requests: bool
    done: bool


class Pause(Event, tag=8):
    """Scheduling was paused or resumed: a `PauseState`."""

    state: int


LOADING, PINNED, LEASED, ACCEPTED, RELEASED = range(5)
"""Kinds of changes: the state of blocks that a holder got, or what was done with a holder."""


class ExchangeCall(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A call of the scheduler to its exchange with stores that has changed something, or that was not answered as
    where there is no store."""

    number: int
    """Number of calls before it since the last event; those that only ask do not count."""
    is_unusual: bool = False
    """True: the answer is the opposite of that of `NoExchange`."""
    match: tuple[int, str, int] | None = None
    """(request, source, tokens) of a load that was ordered."""
    changes: list[tuple[int, int, list[int]]] = []
    """(kind, holder, blocks) in order; of ACCEPTED the number of positions. Holders count from 0."""
    loaded: list[tuple[int, str, int]] = []
    """(request, outcome, verified tokens) of loads that were waited for no longer."""
    ready: list[int] = []
    """Requests that need not wait any longer: for loads, or for blocks of transfers."""


class Transfers(Event, tag=9):
    """Calls to the exchange with stores while the next event happened."""

    calls: list[ExchangeCall] = []
    errors: list[int] = []
    """Requests that end with an error because of their load."""
    unfit: list[int] = []
    """Requests that no transfer will give enough blocks to."""


AnyEvent = Add | End | Step | Update | Drafts | Abandon | Reset | Pause | Transfers
Emit = Callable[[AnyEvent], None]


def encode_frame(payload: bytes | bytearray) -> bytes:
    """Returns length, checksum and payload."""
    return len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload


def encode_header(header: Header) -> bytes:
    """Returns the first bytes of a recording."""
    return MAGIC + encode_frame(msgspec.msgpack.encode(header))


def encode_events(count: int, encoded: bytes | bytearray) -> bytes:
    """Returns a frame of `count` events that are encoded already."""
    return encode_frame(b"\xdd" + count.to_bytes(4, "big") + encoded)


class RecordingReader:
    """Reads a recording from a file, in bounded memory.

    `header` is available at once; `events()` may be called once. `torn_bytes`, after it, is the length of an incomplete
    frame at the end of the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Raises ConfigError if the file is not a recording that this version can read."""
        self._file = file
        self.torn_bytes = 0
        if file.read(len(MAGIC)) != MAGIC:
            raise ConfigError("this is no recording of quire (--record)")
        payload = self._read_frame()
        if payload is None:
            raise ConfigError("the recording ends before its header is complete")
        try:
            found = msgspec.msgpack.decode(payload, type=dict).get("format")
            if found not in (FORMAT, FORMAT_WITH_TRANSFERS):
                known = f"formats {FORMAT} and {FORMAT_WITH_TRANSFERS}"
                raise ConfigError(f"the recording has format {found}; this version of Quire reads {known}")
            self.header = msgspec.msgpack.decode(payload, type=Header)
        except (msgspec.MsgspecError, TypeError) as e:
            raise ConfigError(f"the header of the recording cannot be read: {e}") from None

    def events(self) -> Iterator[AnyEvent]:
        """Yields the events. Raises ConfigError where a frame in the middle is damaged."""
        decoder = msgspec.msgpack.Decoder(list[AnyEvent])
        while (payload := self._read_frame()) is not None:
            try:
                events: Sequence[AnyEvent] = decoder.decode(payload)
            except msgspec.MsgspecError as e:
                raise ConfigError(f"{self._where()}: {e}") from None
            yield from events

    def _read_frame(self) -> bytes | None:
        """Returns the next payload; None at the end, or where only a part of a frame is left."""
        head = self._file.read(8)
        size = int.from_bytes(head[:4], "little")
        payload = self._file.read(min(size, MAX_FRAME_BYTES)) if len(head) == 8 else b""
        if len(head) < 8 or len(payload) < size:
            self.torn_bytes = len(head) + len(payload)
            if size > MAX_FRAME_BYTES:
                raise ConfigError(f"{self._where()}: a frame of {size} bytes is longer than {MAX_FRAME_BYTES}")
            return None
        if zlib.crc32(payload) != int.from_bytes(head[4:], "little"):
            if not self._file.read(1):
                self.torn_bytes = len(head) + len(payload)
                return None
            raise ConfigError(f"{self._where()}: the checksum of a frame is wrong")
        return payload

    def _where(self) -> str:
        return f"the recording is damaged before byte {self._file.tell()}"

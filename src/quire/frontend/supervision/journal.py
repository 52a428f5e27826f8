"""The live requests of a frontend, as a restarted engine core needs them to go on.

Per request: what was sent, and the output tokens that came back. Stop rules, penalties, random numbers, text and
log-probabilities all follow from these, so nothing else is kept: 4 bytes per output token of a request, until it ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntEnum

import msgspec

from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest


class Standing(IntEnum):
    """State of a request with respect to the connected core."""

    SENT = 0
    """With the core; its outputs are taken as they are."""
    WATCHED = 1
    """With the core, and sent again, perhaps under another id: its outputs are inspected."""
    HELD = 2
    """Not with the core: there is none, or another request is tried."""


class JournalEntry:
    """One live request."""

    __slots__ = (
        "adapter",
        "has_moved",
        "num_acquittals",
        "num_deaths",
        "num_sends",
        "output_token_ids",
        "request",
        "standing",
        "wire_id",
    )

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.output_token_ids = array("i")
        """Tokens the core has generated."""
        self.adapter = request.adapter
        """The revision of its adapter that its outputs come from; None before the first."""
        self.standing = Standing.HELD
        self.wire_id = request.request_id
        """Id of the request at the core: its own, with a number after it if this core was sent it more than once."""
        self.num_sends = 0
        """Number of times it was sent to the core that is connected now; of one that has moved, to all since."""
        self.has_moved = False
        """True once it was with another core than the one it began with: then no id of it is used twice."""
        self.num_deaths = 0
        """Number of killed cores whose last step it was in, since its last token."""
        self.num_acquittals = 0
        """Number of trials in quarantine that cleared it."""

    @property
    def request_id(self) -> str:
        """The internal id."""
        return self.request.request_id

    @property
    def has_output(self) -> bool:
        """True once its user has seen tokens of it."""
        return bool(self.output_token_ids)

    def note_released(self) -> None:
        """Records that its core, which may go on sending outputs of it, is no longer its core."""
        self.standing = Standing.HELD
        self.has_moved = True

    def take_in(self, output: EngineCoreOutput) -> None:
        """Takes in an output that does not end the request. Raises OverflowError for a number that is no token id."""
        self.output_token_ids.fromlist(output.new_token_ids)
        if output.adapter is not None:
            self.adapter = output.adapter

    def make_request(self) -> EngineCoreRequest:
        """Returns the request to send to a core that knows nothing of it."""
        if not self.output_token_ids and self.wire_id == self.request_id:
            return self.request
        output_token_ids = [*self.request.output_token_ids, *self.output_token_ids]
        return msgspec.structs.replace(
            self.request, request_id=self.wire_id, output_token_ids=output_token_ids, adapter=self.adapter
        )


def num_tokens_of(request: EngineCoreRequest) -> int:
    """Returns the number of tokens a core without a KV cache computes first: prompt and outputs."""
    return len(request.prompt_token_ids or ()) + len(request.output_token_ids)


class Journal:
    """The live requests of one client, in the order in which they came. Single-threaded.

    `on_core` finds an entry by the id an output of the connected core carries.
    """

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}
        self.on_core: dict[str, JournalEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> JournalEntry | None:
        """Returns the entry of a live request, by internal id; None for any other."""
        return self._entries.get(request_id)

    def add(self, request: EngineCoreRequest) -> JournalEntry:
        """Adds a request. Raises ValueError for an id in use."""
        if request.request_id in self._entries:
            raise ValueError(f"request id {request.request_id} is in use; ids of live requests are unique")
        entry = self._entries[request.request_id] = JournalEntry(request)
        return entry

    def insert(self, entry: JournalEntry) -> None:
        """Adds a request that another journal has removed."""
        assert entry.request_id not in self._entries  # ids of live requests are unique
        self._entries[entry.request_id] = entry

    def remove(self, entry: JournalEntry) -> None:
        """Forgets a request that has ended."""
        del self._entries[entry.request_id]
        self.on_core.pop(entry.wire_id, None)

    def note_sent(self, entry: JournalEntry, *, first_time: bool) -> None:
        """Records that it goes to the connected core now; sets the id to use there."""
        entry.wire_id = f"{entry.request_id}~{entry.num_sends}" if entry.num_sends else entry.request_id
        entry.num_sends += 1
        entry.standing = Standing.SENT if first_time else Standing.WATCHED
        self.on_core[entry.wire_id] = entry

    def note_withdrawn(self, entry: JournalEntry) -> str:
        """Returns the id to abort at the connected core. What that still sends of the request is dropped."""
        del self.on_core[entry.wire_id]
        entry.standing = Standing.HELD
        return entry.wire_id

    def note_new_core(self) -> None:
        """Resets the standing of all entries: another core is connected."""
        self.on_core.clear()
        for entry in self._entries.values():
            entry.standing = Standing.HELD
            if not entry.has_moved:
                entry.num_sends = 0

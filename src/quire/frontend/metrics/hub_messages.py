"""What a process of a server and its `MetricsHub` say to each other: msgpack behind its length, on a Unix socket."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from quire.frontend.metrics.collect.facts import Load
from quire.frontend.metrics.publish.snapshot import ProcessReport
from quire.wire.serial import WireError

MAX_MESSAGE_BYTES = 16 << 20
"""A report has some tens of kilobytes. A longer message ends its connection before it is read."""
_LENGTH_BYTES = 4


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the hub, first: who speaks."""

    process: str


class Report(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the hub: an answer to its question of this number, or unasked (0)."""

    question: int
    report: ProcessReport | None
    """None if there is none, because of `error`."""
    error: str = ""
    is_final: bool = False
    """The process ends in good order: nothing will follow."""


class Ask(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the hub: somebody wants to know of all processes. `number` is for the answer."""

    number: int


class Question(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the hub: a report of this moment, please."""

    number: int


class Answer(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the hub, to an `Ask`."""

    number: int
    report: ProcessReport | None
    error: str = ""


class LoadNotice(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the hub, after a report that it had not asked for: how busy the engine is."""

    load: Load


M = TypeVar("M")
ToHub = Hello | Report | Ask
FromHub = Question | Answer | LoadNotice

_encoder = msgspec.msgpack.Encoder()
TO_HUB: msgspec.msgpack.Decoder[ToHub] = msgspec.msgpack.Decoder(ToHub)
FROM_HUB: msgspec.msgpack.Decoder[FromHub] = msgspec.msgpack.Decoder(FromHub)


def encode_message(message: ToHub | FromHub) -> bytes:
    """With its length in front."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_message(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """The next message; None at the end of the connection, however it came. Raises WireError for what is none."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {length} bytes; {MAX_MESSAGE_BYTES} are the most")
        return decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except msgspec.MsgspecError as e:
        raise WireError(f"this is no message of a metrics hub: {e}") from e

"""Calls of workers in processes of their own: the verbs, and the types of their arguments and results.

A call is decoded by the types of its verb, and nothing else is run. Methods that a worker class adds to these are
called by `call_method`, with plain values; a function by `call_function`, by its dotted name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.lora_request import LoRARequest
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad
from quire.wire.serial import Frame, MsgpackDecoder, MsgpackEncoder


class Verb(NamedTuple):
    """A row of `WORKER_VERBS`."""

    arguments: tuple[Any, ...] = ()
    result: Any = None
    is_step: bool = False
    """All workers compute it together: the error of one is an error of all. The output rank alone answers."""
    is_late: bool = False
    """Workers begin it at once, and answer by a `LateAnswer` when it is done, beside the steps."""
    is_silent: bool = False
    """Workers do not answer."""


WORKER_VERBS: Mapping[str, Verb] = {
    "init_device": Verb(),
    "load_model": Verb(),
    "get_kv_cache_spec": Verb((), dict[str, AnyKVCacheSpec]),
    "get_draft_kv_cache_spec": Verb((), dict[str, AnyKVCacheSpec]),
    "determine_available_memory": Verb((), int),
    "update_max_model_len": Verb((int,)),
    "initialize_from_config": Verb((list[KVCacheConfig],)),
    "compile_or_warm_up_model": Verb((), None, is_step=True),
    "execute_model": Verb((SchedulerOutput,), ModelRunnerOutput | None, is_step=True),
    "sample_tokens": Verb((GrammarOutput | None,), ModelRunnerOutput, is_step=True),
    "execute_dummy_batch": Verb((), None, is_step=True),
    "take_draft_token_ids": Verb((), DraftTokenIds | None),
    "reset_drafter": Verb(),
    "sleep": Verb((int,)),
    "wake_up": Verb((list[str],)),
    "release_kv_cache_memory": Verb(),
    "check_weights": Verb((str,)),
    "load_weights": Verb((str | None,)),
    "undo_weights": Verb(),
    "reload_weights": Verb(),
    "measure_adapter": Verb((LoRARequest,), int, is_late=True),
    "load_adapter": Verb((AdapterLoad,), AdapterInfo, is_late=True),
    "drop_adapter": Verb((AdapterKey,), None, is_silent=True),
    "start_transfers": Verb((KVConnectorMetadata,), None, is_silent=True),
    "profile": Verb((bool, str | None, int | None, int | None)),
    "get_supported_tasks": Verb((), tuple[str, ...]),
    "get_numerics_id": Verb((), str),
    "check_health": Verb(),
    "call_method": Verb((str, list[Any], dict[str, Any]), Any),
    "call_function": Verb((str, list[Any], dict[str, Any]), Any),
    "shutdown": Verb(),
}
"""Verbs by name. Where optional arguments are left out, they are None."""


class WorkerCall(msgspec.Struct, array_like=True, gc=False):
    """First part of a call; the arguments follow."""

    call_id: int
    verb: str


class WorkerReply(msgspec.Struct, array_like=True, gc=False):
    """First part of an answer; the result follows unless `error` is set."""

    call_id: int
    error_type: str = ""
    """Name of a class of `quire.errors`; empty for another."""
    error: str | None = None
    is_fatal: bool = False
    """True: the error was in a step, which all workers have lost."""
    is_echo: bool = False
    """True: the error is that another worker has failed."""


class LateAnswer(msgspec.Struct, array_like=True, gc=False, tag="answer"):
    """A datagram: the frames of a worker's answer."""

    rank: int
    frames: list[bytes]


class TransferReport(msgspec.Struct, array_like=True, gc=False, tag="transfers"):
    """A datagram: what a worker reports of its transfers of blocks."""

    rank: int
    output: KVConnectorOutput


_calls, _replies = msgspec.msgpack.Decoder(WorkerCall), msgspec.msgpack.Decoder(WorkerReply)
_late: msgspec.msgpack.Decoder[LateAnswer | TransferReport] = msgspec.msgpack.Decoder(LateAnswer | TransferReport)
_decoders: dict[tuple[str, bool], MsgpackDecoder[Any]] = {}
"""Decoders by verb, of its arguments (False) and of its result (True)."""


def encode_call(call: WorkerCall, arguments: Sequence[Any], encoder: MsgpackEncoder) -> list[Frame]:
    """Returns the frames of a call."""
    wanted = len(WORKER_VERBS[call.verb].arguments)
    padded = [*arguments, *[None] * (wanted - len(arguments))]
    return [msgspec.msgpack.encode(call), *encoder.encode(padded)]


def decode_call(frames: Sequence[Frame]) -> tuple[WorkerCall, tuple[Any, ...]]:
    """Returns a call and its arguments. Raises WireError, msgspec's errors, or KeyError for an unknown verb."""
    call = _calls.decode(frames[0])
    decoder = _decoders.get((call.verb, False))
    if decoder is None:
        kind: Any = tuple.__class_getitem__(WORKER_VERBS[call.verb].arguments)
        decoder = _decoders[call.verb, False] = MsgpackDecoder(kind)
    return call, decoder.decode(frames[1:])


def encode_reply(reply: WorkerReply, result: Any, encoder: MsgpackEncoder) -> list[Frame]:
    """Returns the frames of an answer."""
    return [msgspec.msgpack.encode(reply), *encoder.encode(result)]


def encode_late_answer(rank: int, reply: WorkerReply, result: Any) -> bytes:
    """Returns the datagram of an answer."""
    return msgspec.msgpack.encode(LateAnswer(rank, [bytes(f) for f in encode_reply(reply, result, MsgpackEncoder())]))


def encode_transfer_report(rank: int, output: KVConnectorOutput) -> bytes:
    """Returns the datagram of a report."""
    return msgspec.msgpack.encode(TransferReport(rank, output))


def decode_late(data: bytes) -> LateAnswer | TransferReport:
    """Returns a report, or an answer whose frames `decode_reply` and `decode_result` take."""
    return _late.decode(data)


def decode_reply(frames: Sequence[Frame]) -> WorkerReply:
    """Returns an answer."""
    return _replies.decode(frames[0])


def decode_result(frames: Sequence[Frame], verb: str) -> Any:
    """Returns the result in the frames of an answer to a call of `verb`."""
    decoder = _decoders.get((verb, True))
    if decoder is None:
        decoder = _decoders[verb, True] = MsgpackDecoder(WORKER_VERBS[verb].result)
    return decoder.decode(frames[1:])

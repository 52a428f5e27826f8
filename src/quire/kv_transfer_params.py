"""`kv_transfer_params`: messages of one engine to another, by way of a proxy, about the blocks of a request.

A proxy sends a prompt to one engine with `do_remote_decode`, and the same prompt to another with the dict that the
first has answered. The dict comes from an HTTP body: nothing in it is trusted. It has the keys of vLLM's NIXL
connector, which proxies pass on unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from quire.errors import ValidationError

FIELD = "kv_transfer_params"
MAX_PARAMS_BYTES = 1 << 16
MAX_PARAMS_DEPTH = 4
MAX_NAME_CHARS = 512


class TransferParams(Struct, omit_defaults=True):
    """The keys that mean something. Others are accepted, and ignored."""

    do_remote_decode: bool = False
    """Another engine decodes: the blocks of the prompt are held for it."""
    do_remote_prefill: bool = False
    """Another engine has computed the prompt: its blocks can be taken from there."""
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    """Name of the lease that holds the blocks."""
    remote_host: str | None = None
    remote_port: int | str | None = None
    remote_num_tokens: int | None = None
    """Tokens whose blocks are held: whole blocks."""
    remote_block_ids: list[Any] | None = None
    """Not used: blocks are asked for by their hashes."""
    remote_incarnation: str | None = None
    """Name of the start of the server that holds them."""
    remote_ranks: list[tuple[str, int | None, str]] = []
    """Host, port and incarnation of the servers of further workers, each of which holds its part of the blocks."""
    seed: int | None = None
    """Seed of the request at the first engine."""

    @property
    def port(self) -> int | None:
        """The port as a number; None if it is none."""
        port = self.remote_port
        if isinstance(port, str):
            return int(port) if port.isdecimal() and len(port) < 6 else None
        return port


def parse_transfer_params(value: Any) -> TransferParams:
    """Returns the keys that mean something. Raises ValidationError for a dict that is too large, nested too deeply or
    has a value of another type."""
    if not isinstance(value, Mapping):
        raise ValidationError(f"{FIELD} must be an object, got {type(value).__name__}", param=FIELD)
    depth = _measure_depth(value)
    if depth > MAX_PARAMS_DEPTH:
        raise ValidationError(
            f"{FIELD} is nested {depth} deep or more; at most {MAX_PARAMS_DEPTH} is allowed", param=FIELD
        )
    try:
        size = len(msgspec.msgpack.encode(value))  # as it crosses to the engine
        params = msgspec.convert(value, TransferParams)
    except OverflowError:
        raise ValidationError(f"{FIELD} has an integer of more than 64 bits, which no key takes", param=FIELD) from None
    except (msgspec.MsgspecError, TypeError, ValueError) as e:
        raise ValidationError(f"{FIELD}: {str(e)[:MAX_NAME_CHARS]}", param=FIELD) from None
    if size > MAX_PARAMS_BYTES:
        raise ValidationError(f"{FIELD} has {size} bytes; at most {MAX_PARAMS_BYTES} are allowed", param=FIELD)
    longest = max((len(text) for host, _, name in params.remote_ranks for text in (host, name)), default=0)
    if longest > MAX_NAME_CHARS:
        raise ValidationError(
            f"{FIELD}.remote_ranks has a name of {longest} characters; at most {MAX_NAME_CHARS}", param=FIELD
        )
    for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_incarnation", "remote_port"):
        text = getattr(params, name)
        if isinstance(text, str) and len(text) > MAX_NAME_CHARS:
            raise ValidationError(f"{FIELD}.{name} has {len(text)} characters; at most {MAX_NAME_CHARS}", param=FIELD)
    return params


def _measure_depth(value: Any) -> int:
    """Returns the depth of an object, of which no more than one beyond the limit is looked at."""
    level: list[Any] = [value]
    for depth in range(1, MAX_PARAMS_DEPTH + 2):
        inner = [list(v.values()) if isinstance(v, Mapping) else v for v in level]
        level = [item for items in inner for item in items if isinstance(item, Mapping | list | tuple)]
        if not level:
            return depth
    return MAX_PARAMS_DEPTH + 1

"""The configuration on its way to another process: msgpack, typed, no pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.config.engine import EngineConfig
from quire.config.server import ServerConfig
from quire.errors import ConfigError

Config = TypeVar("Config", EngineConfig, ServerConfig)


def encode_config(config: EngineConfig | ServerConfig) -> bytes:
    """The bytes of a configuration."""
    return msgspec.msgpack.encode(config, enc_hook=_encode_path)


def decode_config(data: bytes) -> EngineConfig:
    """The configuration of an engine back. Raises ConfigError for anything else."""
    return _decode(data, EngineConfig, "engine")


def decode_server_config(data: bytes) -> ServerConfig:
    """That of a server. Raises ConfigError for anything else."""
    return _decode(data, ServerConfig, "server")


def _decode(data: bytes, kind: type[Config], name: str) -> Config:
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_path)
    except (msgspec.MsgspecError, TypeError, ValueError) as e:
        raise ConfigError(f"the {name} configuration sent by the frontend cannot be read: {e}") from e


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a configuration holds a {type(value).__name__}, which cannot cross a process boundary")


def _decode_path(declared: Any, value: Any) -> Path:
    if declared is Path:
        return Path(value)
    raise TypeError(f"a configuration field is declared as {declared!r}, which cannot cross a process boundary")

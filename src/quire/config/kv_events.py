"""The configuration of KV cache events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.flags import bounds_by_name, check_keys
from quire.errors import ConfigError
from quire.field_bounds import FieldBound

FLAG = "--kv-events-config"
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
PUBLISHERS = ("zmq", "null")
EVENT_FORMATS = ("map", "array")

_BOUNDS = bounds_by_name(
    FieldBound("enable_kv_cache_events", "bool"),
    FieldBound("publisher", "str"),
    FieldBound("endpoint", "str"),
    FieldBound("replay_endpoint", "str"),
    FieldBound("buffer_steps", "int", 0, 10_000_000),
    FieldBound("hwm", "int", 0, 100_000_000),
    FieldBound("max_queue_size", "int", 1, 100_000_000),
    FieldBound("topic", "str"),
    FieldBound("event_format", "str"),
)
_NULLABLE = ("publisher", "endpoint", "replay_endpoint")
"""Keys that may be null."""


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """The keys of --kv-events-config: vLLM's, and `event_format`."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """zmq or null; None: zmq if events are enabled."""
    endpoint: str | None = None
    """Address of the publishing socket: bound if it contains `*` or `::` or is ipc:// or inproc://, otherwise
    connected. None: this host's port 5557 is bound. The data-parallel rank is added to a tcp port."""
    replay_endpoint: str | None = None
    """Address that answers requests for past batches; None: there is none. Always bound."""
    buffer_steps: int = 10_000
    """Batches that can be replayed."""
    hwm: int = 100_000
    """Batches that zmq holds for a subscriber that reads slowly; it loses those beyond."""
    max_queue_size: int = 100_000
    """Batches that wait to be sent; with more the next one replaces them all."""
    topic: str = ""
    event_format: str = "map"
    """map, or array for subscribers of older versions of vLLM."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> KVEventsConfig:
        """Parses the JSON object. Raises ConfigError for an unknown key, or a value out of its bounds."""
        given = {name: value for name, value in values.items() if value is not None or name not in _NULLABLE}
        check_keys(given, _BOUNDS, FLAG)
        config = KVEventsConfig(**values)
        _check_choice("publisher", config.publisher, (None, *PUBLISHERS))
        _check_choice("event_format", config.event_format, EVENT_FORMATS)
        for name in ("endpoint", "replay_endpoint"):
            _check_address(name, getattr(config, name))
        if config.replay_endpoint == (config.endpoint or DEFAULT_ENDPOINT):
            raise ConfigError(
                f"{FLAG}: replay_endpoint {config.replay_endpoint} is also endpoint; give it another port"
            )
        return config

    @property
    def is_enabled(self) -> bool:
        """Returns whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def endpoint_of(self, rank: int) -> str:
        """Returns the address of the publishing socket of a data-parallel rank."""
        return _of_rank(self.endpoint or DEFAULT_ENDPOINT, rank)

    def replay_endpoint_of(self, rank: int) -> str | None:
        """Returns the address of the replay socket of a data-parallel rank; None: there is none."""
        return None if self.replay_endpoint is None else _of_rank(self.replay_endpoint, rank)

    @property
    def is_bound(self) -> bool:
        """Returns whether the publishing socket is bound, not connected."""
        address = self.endpoint
        return address is None or "*" in address or "::" in address or address.startswith(("ipc:", "inproc:"))


def _check_choice(name: str, value: str | None, known: tuple[str | None, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{FLAG}: {name} {value!r} is not one of {', '.join(filter(None, known))}")


def _check_address(name: str, address: str | None) -> None:
    """Raises ConfigError for an address that is none of zmq's, or a tcp address without a port."""
    if address is None:
        return
    scheme, _, rest = address.partition("://")
    if scheme not in ("tcp", "ipc", "inproc") or not rest:
        raise ConfigError(f"{FLAG}: {name} {address!r} is no address such as tcp://127.0.0.1:5557 or ipc:///run/events")
    port = rest.rpartition(":")[2]
    if scheme == "tcp" and not (port.isdecimal() and int(port) <= 0xFFFF):
        raise ConfigError(f"{FLAG}: {name} {address!r} has no port up to 65535; give one, as in tcp://127.0.0.1:5557")


def _of_rank(address: str, rank: int) -> str:
    """Returns the address of a rank: its tcp port is `rank` above the first one's; other addresses get its number."""
    if not rank:
        return address
    if not address.startswith("tcp://"):
        return f"{address}_dp{rank}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"

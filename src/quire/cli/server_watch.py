"""A running server read over HTTP: /metrics and /debug/state, in one value."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from quire.cli.prometheus_text import Metrics
from quire.errors import ConfigError

MAX_ANSWER_BYTES = 16 << 20
TIMEOUT_S = 15.0
T = TypeVar("T")


class BlocksView(msgspec.Struct):
    """Of /debug/state. `runs` are (listed blocks, references, 1 if they can be hit)."""

    total: int
    free: int
    touched: int
    stride: int
    runs: list[tuple[int, int, int]]


class RequestView(msgspec.Struct):
    """Of /debug/state. `blocks` are (first id, number of ids that follow one another)."""

    id: str
    key: str
    place: str
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    arrival_time: float
    num_blocks: int
    preemptions: int = 0
    max_tokens: int | None = None
    blocks: list[tuple[int, int]] = []


class StateView(msgspec.Struct):
    """What is read of /debug/state."""

    version: str
    model: str
    time: float
    paused: str
    running: int
    waiting: int
    max_num_seqs: int
    kv_cache: BlocksView
    requests: list[RequestView]
    requests_left_out: int = 0


@dataclass(frozen=True)
class Reading:
    """One look at a server. `time_s` is this process's monotonic clock."""

    time_s: float
    state: StateView
    metrics: Metrics | None
    """None where it was started with --disable-log-stats."""


class ServerWatch:
    """Reads one server. `url` may end in a path, should a proxy show it under one."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--url {url!r} is not the address of a server; write http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def read(self) -> Reading:
        """Raises ConfigError, in words, if nobody answers there, a key is missing, or what answers is not Quire."""
        state = self._read("/debug/state", lambda content: msgspec.json.decode(content, type=StateView))
        if state is None:
            raise ConfigError(
                f"{self.url} has no /debug/state: it was started with --disable-ui, or is another program; its "
                "/metrics may tell more"
            )
        metrics = self._read("/metrics", lambda content: Metrics(content.decode("utf-8", errors="replace")))
        return Reading(time.monotonic(), state, metrics)

    def _read(self, path: str, decode: Callable[[bytes], T]) -> T | None:
        """None for 404."""
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return decode(response.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as e:
            e.close()
            if e.code == 404:
                return None
            if e.code in (401, 403):
                raise ConfigError(f"{self.url} asks for a key; give it with --api-key or QUIRE_API_KEY") from None
            raise ConfigError(
                f"{self.url}{path} answered {e.code}; the engine may be in a long step, or restart"
            ) from None
        except (urllib.error.URLError, OSError, ValueError) as e:
            reason = getattr(e, "reason", None) or e
            if isinstance(e, ValueError):
                raise ConfigError(f"{self.url}{path} answered what is not Quire's: {reason}") from None
            raise ConfigError(
                f"no server answers at {self.url} ({reason}); is quire serve running there? --url names another one"
            ) from None

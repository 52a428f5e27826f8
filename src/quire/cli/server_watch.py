"""Reads /metrics and /debug/state of a running server as one value; rates and percentiles need two of them."""

from __future__ import annotations

import math
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from quire.errors import ConfigError

_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')

Buckets = list[tuple[float, float]]
"""Pairs of upper bound and the count of values that are not above it, sorted."""


class Metrics:
    """One reading of Prometheus' text format, summed over all labels except a histogram's bounds or one that is asked
    for."""

    def __init__(self, text: str) -> None:
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._samples: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
        """Labels as they are written, with their values."""
        self._buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
        for line in text.splitlines():
            found = _LINE.match(line)
            if found is None or line.startswith("#"):
                continue
            name, labels, value = found[1], found[2] or "", _number(found[3])
            self._totals[name] += value
            self._samples[name].append((labels, value))
            if name.endswith("_bucket"):
                bound = dict(_LABEL.findall(labels)).get("le", "+Inf")
                self._buckets[name.removesuffix("_bucket")][_number(bound)] += value

    def total(self, name: str) -> float | None:
        """Returns a gauge or counter; None if there is none of this name."""
        return self._totals.get(name)

    def totals_by(self, name: str, label: str) -> dict[str, float]:
        """Returns a gauge or counter by the values of one label."""
        totals: defaultdict[str, float] = defaultdict(float)
        for labels, value in self._samples.get(name, ()):
            totals[dict(_LABEL.findall(labels)).get(label, "")] += value
        return dict(totals)

    def buckets(self, name: str) -> Buckets:
        """Returns the buckets of a histogram; empty if there is none of this name."""
        return sorted(self._buckets.get(name, {}).items())


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def growth(before: Metrics, after: Metrics, name: str) -> float | None:
    """Returns the growth of a counter: its whole value after a restart, None if it is missing."""
    end = after.total(name)
    if end is None:
        return None
    start = before.total(name) or 0.0
    return end - start if end >= start else end


def quantile_between(before: Metrics, after: Metrics, name: str, share: float) -> float | None:
    """Returns the value below which `share` of a histogram's values between two readings lie."""
    earlier = dict(before.buckets(name))
    end = after.buckets(name)
    new = [(bound, count - earlier.get(bound, 0.0)) for bound, count in end]
    return quantile(end if any(count < 0 for _, count in new) else new, share)


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """Returns the same for buckets; None if they are empty."""
    total = buckets[-1][1] if buckets else 0.0
    if not total > 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return low if bound == math.inf else low + (bound - low) * (rank - below) / (count - below)
        if bound != math.inf:
            low, below = bound, count
    return low


MAX_ANSWER_BYTES = 16 << 20
TIMEOUT_S = 15.0
T = TypeVar("T")


class BlocksView(msgspec.Struct):
    """The blocks in /debug/state. `runs` are (listed blocks, references, 1 if they can be hit)."""

    total: int
    free: int
    touched: int
    stride: int
    runs: list[tuple[int, int, int]]


class RequestView(msgspec.Struct):
    """A request in /debug/state. `blocks` are (first id, number of consecutive ids)."""

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
    """The fields of /debug/state that are read."""

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
    """None for a server with --disable-log-stats."""


class NotReadyError(ConfigError):
    """The server answers, and cannot report its state yet."""


class ServerWatch:
    """Reads one server. `url` may end in a path, for a server under a proxy's prefix."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--url {url!r} is not the address of a server; write http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def read(self) -> Reading:
        """Returns a reading.

        Raises NotReadyError for a server that loads, and ConfigError if none answers, a key is missing, or it is not
        Quire.
        """
        state = self._read("/debug/state", lambda content: msgspec.json.decode(content, type=StateView))
        if state is None:
            raise ConfigError(
                f"{self.url} has no /debug/state: it was started with --disable-ui, or is another program; its "
                "/metrics may tell more"
            )
        metrics = self._read("/metrics", lambda content: Metrics(content.decode("utf-8", errors="replace")))
        return Reading(time.monotonic(), state, metrics)

    def _read(self, path: str, decode: Callable[[bytes], T]) -> T | None:
        """Returns None for 404."""
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
            if e.code == 503:
                raise NotReadyError(
                    f"{self.url} is not ready (503): it loads its model, or its engine restarts"
                ) from None
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

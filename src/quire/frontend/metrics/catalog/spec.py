"""The form of a catalog row, and the bucket bounds that rows choose from by family."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from quire.errors import ConfigError
from quire.frontend.metrics.collect.events import FinishedRequestStats, HttpExchange, IterationStats
from quire.frontend.metrics.collect.facts import FrontendFacts
from quire.wire.stats import (
    AdapterStats,
    KVCacheEvictionEvent,
    KVTransferStats,
    PrefillStats,
    SchedulerStats,
    SpecDecodingStats,
)

Kind = Literal["counter", "gauge", "histogram", "summary"]
VLLM = "vllm:"
QUIRE = "quire_"
ENGINE_LABELS = ("model_name", "engine")
MODEL_LABEL = ("model_name",)

Sample = tuple[tuple[str, ...], float]
"""Values of the row's own labels, and the number to set, add or observe."""
Condition = str
"""Feature that a row needs; without the feature the row is not exported. Empty: always exported."""
SPEC_DECODE, LORA = "speculation", "--enable-lora"
KV_TRANSFER = "a KV connector"
KV_SAMPLING = "--kv-cache-metrics"
NANS = "QUIRE_COMPUTE_NANS_IN_LOGITS=1"
LEGACY_NAMES = "--show-hidden-metrics-for-version"
LAZY = frozenset({SPEC_DECODE})
"""Features whose rows are also exported as soon as they count something."""


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """A row. `source` is the struct it reads, in one of four ways; a row without any is always 0.

    A counter adds the value and a histogram observes it, once per event. A gauge, and a counter with `is_total`, takes
    the value of the last event. `SchedulerStats` come once per step and `IterationStats` once per batch of outputs; the
    structs inside them (`PrefillStats`, `FinishedRequestStats`) are events of their own. `FrontendFacts` are made for
    each snapshot, and merged over all processes (`facts.merge_facts`). A gauge of any other source must describe the
    engine core, which all processes share.
    """

    name: str
    kind: Kind
    help: str
    source: type
    value: Callable[[Any], float | None] | None = None
    """Reads one number or None."""
    values: Callable[[Any], Sequence[float]] | None = None
    """Reads any number of values."""
    counted: Callable[[Any], Mapping[float, int]] | None = None
    """Reads values with their number of occurrences."""
    samples: Callable[[Any], Iterable[Sample]] | None = None
    """Reads values with labels."""
    prefix: str = VLLM
    base_labels: tuple[str, ...] = ENGINE_LABELS
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()
    """Label values whose series exist from the start."""
    family: str = ""
    """Family of its buckets (`FAMILIES`)."""
    has_owners: bool = False
    """The events have an `owner`, which becomes the exemplar."""
    is_total: bool = False
    condition: Condition = ""

    @property
    def is_zero(self) -> bool:
        """Returns whether the row reads nothing."""
        return self.value is None and self.values is None and self.counted is None and self.samples is None

    @property
    def full_name(self) -> str:
        """Returns the name with its prefix, without `_total`."""
        return self.prefix + self.name


@dataclass(frozen=True, kw_only=True)
class InfoSpec:
    """A gauge of 1 whose labels are constant facts."""

    name: str
    help: str
    prefix: str = VLLM

    @property
    def full_name(self) -> str:
        """Returns the name with its prefix."""
        return self.prefix + self.name


of_step = partial(MetricSpec, source=SchedulerStats)
of_outputs = partial(MetricSpec, source=IterationStats)
of_prefills = partial(MetricSpec, source=PrefillStats)
of_drafts = partial(MetricSpec, source=SpecDecodingStats)
of_adapters = partial(MetricSpec, source=AdapterStats, prefix=QUIRE, condition=LORA)
of_transfers = partial(MetricSpec, source=KVTransferStats, prefix=QUIRE, condition=KV_TRANSFER)
of_evictions = partial(MetricSpec, source=KVCacheEvictionEvent)
of_finished = partial(MetricSpec, source=FinishedRequestStats, kind="histogram", has_owners=True)
of_facts = partial(MetricSpec, source=FrontendFacts)
of_ledger = partial(
    MetricSpec, source=FrontendFacts, kind="counter", prefix=QUIRE, base_labels=MODEL_LABEL, is_total=True
)
of_exchange = partial(MetricSpec, source=HttpExchange, prefix="", base_labels=())


def each(values: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


def labelled(counts: Mapping[str, float]) -> list[Sample]:
    return [((label,), value) for label, value in counts.items()]


Bounds = tuple[float, ...]

_OPERATION = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
FAMILIES: dict[str, Bounds] = {
    "request_latency": (
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
        1920.0, 7680.0,
    ),
    "time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0,
    ),
    "inter_token_latency": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    ),
    "iteration_tokens": (
        1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
    ),
    "num_outputs": (1.0, 2.0, 5.0, 10.0, 20.0),
    "num_preemptions": (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
    "kv_residency": (
        0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
        600.0, 1200.0, 1800.0,
    ),
    "operation": _OPERATION,
    "adapter": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    "http": (0.1, 0.5, 1.0),
    "http_highr": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0,
        60.0,
    ),
}  # fmt: skip
TOKENS = "request_tokens"
"""Family whose bounds depend on the model: the 1-2-5 series up to the model's context."""
FAMILY_NAMES = (*FAMILIES, TOKENS)


def token_bounds(max_model_len: int) -> Bounds:
    """Returns 1, 2, 5, 10, 20, 50 … up to `max_model_len`; at least 1."""
    bounds = (factor * 10**exponent for exponent in range(len(str(max_model_len))) for factor in (1, 2, 5))
    return tuple(float(bound) for bound in bounds if bound <= max(1, max_model_len))


def make_bounds(max_model_len: int, custom: Mapping[str, Any] | None = None) -> dict[str, Bounds]:
    """Returns the bounds of every family; --custom-histogram-buckets replaces the usual ones. Raises ConfigError."""
    return {**FAMILIES, TOKENS: token_bounds(max_model_len), **parse_custom_bounds(custom or {})}


def parse_custom_bounds(custom: Mapping[str, Any]) -> dict[str, Bounds]:
    """Parses --custom-histogram-buckets. Raises ConfigError for an unknown family or bounds that do not rise."""
    parsed = {}
    for family, bounds in custom.items():
        if family not in FAMILY_NAMES:
            raise ConfigError(f"--custom-histogram-buckets: there is no {family!r}; there is {', '.join(FAMILY_NAMES)}")
        if not _rises(bounds):
            raise ConfigError(
                f"--custom-histogram-buckets: {family} is {bounds!r}; it must be a list of 1 to 100 finite numbers, "
                "each greater than the one before"
            )
        parsed[family] = tuple(map(float, bounds))
    return parsed


def _rises(bounds: object) -> bool:
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or not 1 <= len(bounds) <= 100:
        return False
    if not all(isinstance(b, int | float) and not isinstance(b, bool) and math.isfinite(b) for b in bounds):
        return False
    return all(before < after for before, after in itertools.pairwise(bounds))

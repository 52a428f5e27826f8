"""What a row of the catalog is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from quire.frontend.metrics.collect.events import FinishedRequestStats, IterationStats
from quire.frontend.metrics.collect.exchange import HttpExchange
from quire.frontend.metrics.collect.facts import FrontendFacts
from quire.wire.stats import KVCacheEvictionEvent, PrefillStats, SchedulerStats, SpecDecodingStats

Kind = Literal["counter", "gauge", "histogram", "summary"]
VLLM = "vllm:"
QUIRE = "quire_"
ENGINE_LABELS = ("model_name", "engine")
MODEL_LABEL = ("model_name",)

Sample = tuple[tuple[str, ...], float]
"""Values of the row's own labels, and what to set, add or observe."""
Condition = str
"""Why a row is left out of a server: a feature that is off. Empty: never."""
SPEC_DECODE, LORA = "speculation", "LoRA"
KV_SAMPLING = "--kv-cache-metrics"
NANS = "QUIRE_COMPUTE_NANS_IN_LOGITS=1"
LEGACY_NAMES = "--show-hidden-metrics-for-version"
LAZY = frozenset({SPEC_DECODE, LORA})
"""Features whose rows show themselves as soon as they have something to say, too."""


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """A row. `source` is the event it is read from, in one of four ways; a row that has none is always 0.

    A counter adds what is read and a histogram observes it, at each event. A gauge, and a counter with `is_total`, is
    what the last event says. `SchedulerStats` come once per step; `IterationStats` for each batch of outputs; what they
    hold of its own kind (`PrefillStats`, `FinishedRequestStats`) is an event, too, if there is any. `FrontendFacts` are
    made for each snapshot, of several processes together (`facts.merge_facts`). A gauge of another source must speak
    of the engine core, which all processes share.
    """

    name: str
    kind: Kind
    help: str
    source: type
    value: Callable[[Any], float | None] | None = None
    """One, or none."""
    values: Callable[[Any], Sequence[float]] | None = None
    """Any number."""
    counted: Callable[[Any], Mapping[float, int]] | None = None
    """Any number, with how often each is there."""
    samples: Callable[[Any], Iterable[Sample]] | None = None
    """Any number, with labels."""
    prefix: str = VLLM
    base_labels: tuple[str, ...] = ENGINE_LABELS
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()
    """Label values whose series are there from the start."""
    family: str = ""
    """Of its buckets (`buckets.FAMILIES`)."""
    has_owners: bool = False
    """Events have an `owner`, whose the value is: for exemplars."""
    is_total: bool = False
    condition: Condition = ""

    @property
    def is_zero(self) -> bool:
        """There is nothing to be read."""
        return self.value is None and self.values is None and self.counted is None and self.samples is None

    @property
    def full_name(self) -> str:
        """With its prefix, without `_total`."""
        return self.prefix + self.name


@dataclass(frozen=True, kw_only=True)
class InfoSpec:
    """A gauge of 1 whose labels say something that does not change."""

    name: str
    help: str
    prefix: str = VLLM

    @property
    def full_name(self) -> str:
        """With its prefix."""
        return self.prefix + self.name


of_step = partial(MetricSpec, source=SchedulerStats)
of_outputs = partial(MetricSpec, source=IterationStats)
of_prefills = partial(MetricSpec, source=PrefillStats)
of_drafts = partial(MetricSpec, source=SpecDecodingStats)
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

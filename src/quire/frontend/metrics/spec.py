"""What a row of the catalog is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.frontend.metrics.exchange import HttpExchange
from quire.frontend.metrics.facts import FrontendFacts
from quire.frontend.metrics.snapshot import Kind
from quire.frontend.metrics.stats import FinishedRequestStats, IterationStats, RequestOwner
from quire.wire.stats import SchedulerStats

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
    """A row. `source` is the event its value is read from, by `values` or, where it has labels, by `samples`.

    A counter adds what is read and a histogram observes it, at each event. A gauge, and a counter with `is_total`, is
    what the last event says. `SchedulerStats` come once per step; `IterationStats` for each batch of outputs;
    `FrontendFacts` are made for each snapshot, of several processes together (`facts.merge_facts`). A gauge of another
    source must speak of the engine core, which all processes share.
    """

    name: str
    kind: Kind
    help: str
    source: type
    values: Callable[[Any], Sequence[float]] | None = None
    samples: Callable[[Any], Iterable[Sample]] | None = None
    prefix: str = VLLM
    base_labels: tuple[str, ...] = ENGINE_LABELS
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()
    """Label values whose series are there from the start."""
    family: str = ""
    """Of its buckets (`buckets.FAMILIES`)."""
    owners: Callable[[Any], Iterable[RequestOwner | None]] | None = None
    """Whose the values are, for exemplars."""
    is_total: bool = False
    condition: Condition = ""

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
of_finished = partial(MetricSpec, source=FinishedRequestStats, kind="histogram", owners=lambda f: (f.owner,))
of_facts = partial(MetricSpec, source=FrontendFacts)
of_ledger = partial(
    MetricSpec, source=FrontendFacts, kind="counter", prefix=QUIRE, base_labels=MODEL_LABEL, is_total=True
)
of_exchange = partial(MetricSpec, source=HttpExchange, prefix="", base_labels=())


def each(values: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


def labelled(counts: Mapping[str, float]) -> list[Sample]:
    return [((label,), value) for label, value in counts.items()]


def some(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)

"""Predicts a recorded load under other settings: the real scheduler and KV cache on a virtual clock.

Requests reach the core at their recorded times, whatever happens to those before them, and get as many tokens as they
got; the time between a request's arrival at the frontend and its arrival at the core stays as it was. Steps take what a
fitted `StepTimes` predicts. A request that was aborted after some tokens ends after as many, like one whose client
found a stop string; one that was aborted before its first is aborted at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.config.engine import SchedulerConfig
from quire.engine.recording.format import Header
from quire.errors import ConfigError
from quire.replay.figures import Figures
from quire.replay.fleet import Fleet
from quire.replay.step_times import StepTimes
from quire.replay.study import Study


@dataclass(frozen=True)
class Changes:
    """Settings that differ from the recorded ones; None leaves one as it was."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    num_gpu_blocks: int | None = None
    scheduling_policy: str | None = None
    long_prefill_token_threshold: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    watermark: float | None = None

    def apply(self, header: Header) -> Header:
        """Returns the changed engine. Raises ConfigError for a question that a recording cannot answer."""
        names = ("max_num_batched_tokens", "max_num_seqs", "scheduling_policy", "long_prefill_token_threshold",
                 "enable_chunked_prefill", "watermark")  # fmt: skip
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.max_num_batched_tokens is not None:
            given["max_num_scheduled_tokens"] = self.max_num_batched_tokens
        scheduler: SchedulerConfig = replace(header.scheduler, **given)
        kv_cache, caching = header.kv_cache, header.enable_caching
        if self.num_gpu_blocks is not None:
            kv_cache = msgspec.structs.replace(kv_cache, num_blocks=self.num_gpu_blocks)
        if self.enable_prefix_caching is not None:
            if self.enable_prefix_caching and not caching:
                raise ConfigError(
                    "--enable-prefix-caching: the recording was made without, and so knows no prefixes; record once "
                    "with prefix caching"
                )
            caching = self.enable_prefix_caching
        return msgspec.structs.replace(header, scheduler=scheduler, kv_cache=kv_cache, enable_caching=caching)

    @property
    def any(self) -> bool:
        """True if there is any change."""
        return self != Changes()


def predict(study: Study, times: StepTimes, changes: Changes | None = None) -> Figures:
    """Returns how the recorded load would be served. Raises ConfigError for changes that make no engine."""
    header = study.header if changes is None else changes.apply(study.header)
    return Fleet(study, header, times).run()

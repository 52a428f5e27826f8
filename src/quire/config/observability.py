"""Statistics, logs, traces and recordings of the engine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.flags import flag, parse_human_int, parse_json_object
from quire.config.kv_events import KVEventsConfig
from quire.errors import ConfigError

_VERSION = re.compile(r"\d+\.\d+(\.\d+)*")


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """The keys of --profiler-config: what `start_profile` records, and the directory of its traces."""

    profiler: str = "torch"
    """Profiler; torch is the only one."""
    torch_profiler_dir: str = "."
    """Directory of the traces, created if it does not exist; relative to the engine's working directory."""
    torch_profiler_with_stack: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    delay_iterations: int = 0
    """Steps to skip after the start."""
    max_iterations: int = 0
    """Steps to record; 0 for all until the stop."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> ProfilerConfig:
        """Parses the JSON object. Raises ConfigError for an unknown key, or a value of another type."""
        for name, value in values.items():
            field = next((f for f in dataclasses.fields(ProfilerConfig) if f.name == name), None)
            if field is None:
                names = ", ".join(f.name for f in dataclasses.fields(ProfilerConfig))
                raise ConfigError(f"--profiler-config has an unknown key {name!r}; it may have {names}")
            if type(value) is not type(field.default) or (name == "profiler" and value != "torch"):
                wanted = repr(field.default) if name == "profiler" else f"a value such as {field.default!r}"
                raise ConfigError(f"--profiler-config: {name} is {value!r}; it must be {wanted}")
            if isinstance(value, int) and value < 0:
                raise ConfigError(f"--profiler-config: {name} is {value}; it must not be negative")
        return ProfilerConfig(**values)


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Statistics and their cost."""

    disable_log_stats: bool = flag(False, "Compute no statistics.")
    enable_logging_iteration_details: bool = flag(False, "Log what every step computed and how long it took.")
    custom_histogram_buckets: dict[str, Any] | None = flag(
        None,
        'JSON object: bounds of histograms by what they measure, e.g. {"time_to_first_token": [0.1, 1, 10]} '
        "(docs/metrics.md).",
        parse=parse_json_object,
        metavar="JSON",
    )
    show_hidden_metrics_for_version: str | None = flag(
        None,
        "Export metrics that vLLM of this version (e.g. 0.7) had and later ones have not, too.",
        metavar="VERSION",
    )
    stat_loggers: str | None = flag(
        None,
        "Classes that take the statistics, too, as package.module:Class, separated by commas (docs/metrics.md).",
        metavar="CLASSES",
    )
    record: str | None = flag(
        None,
        "Write arrivals, lengths and every scheduling decision to this new file, for `quire replay`. No prompts.",
        metavar="FILE",
    )
    record_prompts: bool = flag(False, "With --record: write the token ids of prompts, too.")
    otlp_traces_endpoint: str | None = flag(
        None,
        "Send spans of requests and of the start to this OpenTelemetry collector, e.g. http://localhost:4318/v1/traces "
        "or grpc://localhost:4317 (extra otel).",
        metavar="URL",
    )
    collect_detailed_traces: str | None = flag(
        None,
        "With --otlp-traces-endpoint: spans of a request's queue, prefill and decoding, too: all (or model, worker).",
        metavar="MODULES",
    )
    trace_file: str | None = flag(
        None,
        "Write a trace of every step and request to this new file, for Perfetto (ui.perfetto.dev).",
        metavar="FILE",
    )
    trace_events: int = flag(
        0,
        "Steps and turns of requests to keep in memory for /debug/trace; `quire serve --enable-admin` keeps 50,000.",
        parse=parse_human_int,
        minimum=0,
        maximum=10_000_000,
    )
    profiler_config: dict[str, Any] | None = flag(
        None,
        'JSON object: what start_profile records and where the trace goes, e.g. {"torch_profiler_dir": "traces"}.',
        parse=parse_json_object,
        metavar="JSON",
    )

    kv_events_config: dict[str, Any] | None = flag(
        None,
        "JSON object: publishes which prefixes are cached, for routers, e.g. "
        '{"enable_kv_cache_events": true} (docs/kv_events.md).',
        parse=parse_json_object,
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        ProfilerConfig.from_json(self.profiler_config or {})
        KVEventsConfig.from_json(self.kv_events_config or {})
        modules = (self.collect_detailed_traces or "all").split(",")
        if not set(modules) <= {"all", "model", "worker"}:
            raise ConfigError(
                f"--collect-detailed-traces {self.collect_detailed_traces!r} is none of all, model, worker"
            )
        if self.collect_detailed_traces is not None and self.otlp_traces_endpoint is None:
            raise ConfigError("--collect-detailed-traces needs --otlp-traces-endpoint: where the traces go")
        version = self.show_hidden_metrics_for_version
        if version is not None and not _VERSION.fullmatch(version):
            raise ConfigError(f"--show-hidden-metrics-for-version {version!r} is no version such as 0.7")

    @property
    def kv_events(self) -> KVEventsConfig:
        """`kv_events_config`, with its defaults."""
        return KVEventsConfig.from_json(self.kv_events_config or {})

    @property
    def profiler(self) -> ProfilerConfig:
        """`profiler_config`, with its defaults."""
        return ProfilerConfig.from_json(self.profiler_config or {})

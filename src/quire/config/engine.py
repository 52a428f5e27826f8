"""The whole configuration of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.config.cache import CacheConfig
from quire.config.frontend import FrontendConfig
from quire.config.lifecycle import LifecycleConfig
from quire.config.load import DeviceConfig, LoadConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.parallel import ParallelConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.structured_outputs import StructuredOutputsConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Held by composition roots only (LLMEngine, EngineCore, Worker); below them classes take what they need."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    lifecycle_config: LifecycleConfig = field(default_factory=LifecycleConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    structured_outputs_config: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    frontend_config: FrontendConfig = field(default_factory=FrontendConfig)

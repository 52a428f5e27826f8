"""The configuration of one engine: a frozen dataclass per subject, and `EngineConfig`, which holds them all."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from dataclasses import dataclass, field

from quire.config.flags import flag, parse_human_int
from quire.config.kv_transfer import PARTS, KVTransferConfig
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.parallel import ParallelConfig
from quire.config.speculative import SpeculativeConfig
from quire.errors import ConfigError

FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Names of --kv-cache-dtype that no attention backend has kernels for yet."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Size, blocks and type of the KV cache."""

    block_size: int = flag(16, "Tokens per KV cache block.", parse=int, minimum=1, maximum=1024)
    gpu_memory_utilization: float = flag(
        0.92, "Share of the device's memory the engine may use (accelerators).", parse=float, minimum=0.01, maximum=1
    )
    kv_cache_memory_bytes: int | None = flag(
        None, "Size of the KV cache in bytes (4G, 512M); unset sizes it from free memory.", parse=parse_human_int
    )
    cache_dtype: str = flag(
        "auto",
        "Type of the cached keys and values; auto follows the model. The fp8 types are known, and refused for now.",
        choices=("auto", "bfloat16", "float16", "float32", *FP8_CACHE_DTYPES),
        name="kv_cache_dtype",
    )
    num_gpu_blocks_override: int | None = flag(
        None, "Use exactly this many blocks (null block included) whatever the memory; for tests.", parse=int, minimum=2
    )
    enable_prefix_caching: bool = flag(True, "Reuse the KV blocks of equal prompt prefixes.")
    prefix_caching_hash_algo: str = flag(
        "sha256", "Hash of the block chain. Equal on every process and host.", choices=("sha256",)
    )
    kv_cache_metrics: bool = flag(False, "Sample how long blocks live and idle before they are evicted.")
    kv_cache_metrics_sample: float = flag(
        0.01, "Share of blocks followed by --kv-cache-metrics.", parse=float, minimum=0, maximum=1
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Budgets and order of the scheduler. After `EngineArgs.create_engine_config` no budget is None."""

    max_num_batched_tokens: int | None = flag(
        None, "Token budget of one step; default 4096 offline, 2048 serving.", parse=parse_human_int, minimum=1
    )
    max_num_seqs: int | None = flag(
        None, "Requests running at once; default 256 offline, 128 serving.", parse=int, minimum=1
    )
    max_num_queued_reqs: int | None = flag(
        None,
        "Requests that may wait for their first token; more are refused at once (503). Default: no limit; 16384 in "
        "quire serve.",
        parse=int,
        minimum=1,
    )
    max_num_queued_tokens: int | None = flag(
        None,
        "Prompt tokens that may wait for a first token; more are refused at once (503). Default: no limit; 32M in "
        "quire serve.",
        parse=parse_human_int,
        minimum=1,
    )
    max_num_reserved_tokens: int | None = flag(
        None,
        "Tokens that live requests may have in all, prompts and the longest outputs they ask for; more are refused at "
        "once (503). Default: no limit.",
        parse=parse_human_int,
        minimum=1,
    )
    max_num_scheduled_tokens: int | None = flag(
        None, "Tokens scheduled in one step where it should differ from the budget.", parse=parse_human_int, minimum=1
    )
    scheduling_policy: str = flag(
        "fcfs",
        "Order of waiting requests: first come first served, or by priority (smaller first).",
        choices=("fcfs", "priority"),
    )
    enable_chunked_prefill: bool = flag(True, "Split prompts that do not fit the step's budget.")
    long_prefill_token_threshold: int = flag(
        0, "Most prompt tokens of one request per step; 0 for no limit.", parse=parse_human_int, minimum=0
    )
    scheduler_reserve_full_isl: bool = flag(
        True, "Admit a request only when blocks for its whole prompt are free, so that prefills do not thrash."
    )
    watermark: float = flag(
        0.0, "Share of blocks kept free when admitting requests.", parse=float, minimum=0, maximum=0.9
    )
    stream_interval: int = flag(1, "Emit a streamed update every so many tokens.", parse=int, minimum=1)
    scheduler_cls: str = flag("quire.engine.sched.scheduler:Scheduler", "Scheduler class, as package.module:Class.")


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Source and cache of the weights."""

    load_format: str = flag(
        "auto",
        "auto and safetensors read the checkpoint; dummy fills in random weights.",
        choices=("auto", "safetensors", "dummy"),
    )
    weight_cache: bool = flag(
        True,
        "Keep weights as CPU kernels read them, packed, in the cache directory, for a quicker next start.",
    )
    download_dir: str | None = flag(None, "Cache directory of downloaded models; default is the hub's.")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Device that computes."""

    device: str = flag("auto", "auto takes CUDA when there is one, else the CPU.", choices=("auto", "cpu", "cuda"))


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """Time limits of requests and readers."""

    request_timeout_s: float | None = flag(
        None,
        "Seconds a request may take; then it ends with an error (504). A request may ask for less or more itself. "
        "Default: no limit.",
        parse=float,
        minimum=0.001,
    )
    slow_client_timeout_s: float = flag(
        60.0,
        "Seconds that output of a stream may wait for its reader; then the request is aborted (408). 0 for no limit.",
        parse=float,
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """Start, restart and end of the engine core's process."""

    shutdown_timeout: float = flag(
        0.0,
        "Seconds that running requests are given to finish when the engine is asked to stop; 0 aborts them.",
        parse=float,
        minimum=0,
    )
    core_restart_limit: int = flag(
        6,
        "Times a dead engine core is started again within the restart window; then the engine is not ready. 0: never.",
        parse=int,
        minimum=0,
    )
    core_restart_window_s: float = flag(
        60.0, "Seconds over which --core-restart-limit counts restarts.", parse=float, minimum=0.01
    )
    core_hang_timeout_s: float = flag(
        10.0,
        "Seconds (or 5 times what a step is expected to take) without progress after which a core is killed as hung.",
        parse=float,
        minimum=0.01,
    )


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """Grammars of structured outputs. Limits are per grammar; a request whose grammar exceeds one is refused."""

    grammar_backend: str = flag(
        "auto",
        "Library that compiles JSON schemas, regular expressions and grammars; xgrammar must be installed.",
        choices=("auto", "guidance", "xgrammar"),
    )
    grammar_jump_forward: bool = flag(
        True, "Append tokens that a grammar forces without running the model for each; the output is the same."
    )
    grammar_compile_cpu_s: float = flag(
        3.0, "CPU seconds a grammar may take to compile.", parse=float, minimum=0.1, maximum=600
    )
    grammar_compile_memory_bytes: int = flag(
        1 << 29, "Memory a grammar may take to compile (512M, 1G).", parse=parse_human_int, minimum=1 << 24
    )

    def __post_init__(self) -> None:
        if self.grammar_backend == "xgrammar" and not has_xgrammar():
            raise ConfigError(
                "--grammar-backend xgrammar: xgrammar is not installed; pip install 'quire[xgrammar]', or use guidance"
            )


def has_xgrammar() -> bool:
    """Returns whether xgrammar is installed."""
    return importlib.util.find_spec("xgrammar") is not None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All configs of an engine. Only composition roots hold it (LLMEngine, EngineCore, Worker); other classes take the
    parts they need."""

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
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lora_config: LoRAConfig = field(default_factory=LoRAConfig)
    kv_transfer_config: KVTransferConfig = field(default_factory=KVTransferConfig)

    def with_engines(self, num_engines: int, generation: int) -> EngineConfig:
        """Returns the same for another number of engines that share experts: `ParallelConfig.with_engines`."""
        return dataclasses.replace(self, parallel_config=self.parallel_config.with_engines(num_engines, generation))

    @property
    def transfer_parts(self) -> dict[str, EngineConfig]:
        """The same with the store's part of a connector of two parts, and with the peers', by name (`PARTS`)."""
        parts = (dataclasses.replace(self, kv_transfer_config=part) for part in self.kv_transfer_config.parts)
        return dict(zip(PARTS, parts, strict=True))


def describe_engine(config: EngineConfig) -> dict[str, str]:
    """Returns what all engines of a server must have in common, on whatever machine, by the name of its flag. Paths are
    not among it, nor what only changes how fast an engine is."""
    model, lora, parallel = config.model_config, config.lora_config, config.parallel_config
    hf_config = json.dumps(dict(model.hf_config.raw), sort_keys=True, default=str).encode()
    return {
        "--model": f"{model.hf_config.architecture or '-'} of config {hashlib.sha256(hf_config).hexdigest()[:12]}",
        "--dtype": model.dtype,
        "--quantization": model.quantization or "none",
        "--model-impl": model.implementation.name,
        "--runner": "pooling" if model.pooling is not None else "generate",
        "--max-model-len": str(model.model_len),
        "--enable-prompt-embeds": str(model.enable_prompt_embeds),
        "--block-size": str(config.cache_config.block_size),
        "--kv-cache-dtype": config.cache_config.cache_dtype,
        "--grammar-backend": config.structured_outputs_config.grammar_backend,
        "--enable-lora": f"rank {lora.max_lora_rank}, {lora.lora_dtype}" if lora.enable_lora else "False",
        "--enable-expert-parallel": str(parallel.shares_experts),
        **(_describe_sharing(config) if parallel.shares_experts else {}),
    }


def _describe_sharing(config: EngineConfig) -> dict[str, str]:
    """Returns what engines that share experts must have in common besides."""
    scheduler = config.scheduler_config
    return {
        "--expert-placement-strategy": config.parallel_config.expert_placement_strategy,
        "--max-num-batched-tokens": str(scheduler.max_num_batched_tokens),
        "--max-num-seqs": str(scheduler.max_num_seqs),
    }

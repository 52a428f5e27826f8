"""A worker: one device, its model, and its share of the KV cache. What an executor talks to."""

from __future__ import annotations

import torch

from quire.config.engine import EngineConfig
from quire.logger import init_logger
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.worker import host, platform
from quire.worker.attention.registry import make_attention_backend
from quire.worker.loader import load_model, resolve_dtype
from quire.worker.model_runner import ModelRunner

logger = init_logger(__name__)


class Worker:
    """Composition root of the worker side.

    Call order: init_device, load_model, get_kv_cache_spec, determine_available_memory, update_max_model_len (where it
    was fitted), initialize_from_config, compile_or_warm_up_model, then steps.
    """

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.max_model_len = config.model_config.model_len
        self._runner: ModelRunner | None = None
        self._profiler: torch.profiler.profile | None = None
        self._trace_prefix = "quire"

    # -- start-up -----------------------------------------------------------------------------------------------------

    def init_device(self) -> None:
        """Choose device, types and threads. Raises ConfigError if the configuration cannot run here."""
        model, cache_dtype = self.config.model_config, self.config.cache_config.cache_dtype
        self.device = platform.choose_device(self.config.device_config.device)
        self.dtype = resolve_dtype(model, self.device)
        self.cache_dtype = self.dtype if cache_dtype == "auto" else getattr(torch, cache_dtype)
        self.backend = make_attention_backend(self.device, self.dtype, self.cache_dtype)
        if self.device.type == "cpu":
            platform.set_num_threads()
        logger.info("worker: device %s, %s, attention backend %s", self.device, self.dtype, self.backend.name)

    @property
    def runner(self) -> ModelRunner:
        """The runner, once the model is loaded."""
        assert self._runner is not None, "load_model comes first"
        return self._runner

    def load_model(self) -> None:
        """Read the weights, unless that is done. Raises ModelLoadError."""
        if self._runner is not None:
            return
        model, scheduler = self.config.model_config, self.config.scheduler_config
        assert scheduler.max_num_seqs is not None, "EngineArgs fills it in"
        assert scheduler.max_num_batched_tokens is not None, "EngineArgs fills it in"
        self._runner = ModelRunner(
            load_model(model, self.config.load_config, self.device, self.dtype),
            self.backend,
            self.device,
            vocab_size=model.hf_config.vocab_size,
            max_num_reqs=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_batched_tokens,
        )

    def get_kv_cache_spec(self) -> dict[str, AnyKVCacheSpec]:
        """What each attention layer keeps per token, by layer name. Loads the model: its layers know."""
        self.load_model()
        return self.runner.get_kv_cache_specs(self.config.cache_config.block_size, self.cache_dtype)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: --kv-cache-memory-bytes, or what is left after weights and the largest step."""
        cache = self.config.cache_config
        if cache.kv_cache_memory_bytes is not None and cache.kv_cache_memory_bytes >= 0:
            return cache.kv_cache_memory_bytes
        if self.device.type == "cpu":
            return self._available_cpu_memory()
        return self._available_cuda_memory(cache.gpu_memory_utilization)

    def _available_cpu_memory(self) -> int:
        block_size = self.config.cache_config.block_size
        block_bytes = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        useful = host.useful_kv_cache_bytes(self.max_model_len, self.runner.max_num_reqs, block_size, block_bytes)
        return host.cpu_kv_cache_bytes(host.available_cpu_memory(), useful)

    def _available_cuda_memory(self, utilization: float) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.runner.profile_run(self.get_kv_cache_spec())
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        outside_torch = total - free - reserved
        peak = torch.cuda.max_memory_allocated(self.device) + outside_torch
        torch.cuda.empty_cache()
        return max(0, int(total * utilization) - peak)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Take the memory of the KV cache and of the batch."""
        self.runner.initialize_kv_cache(kv_cache_config, self.max_model_len)

    def update_max_model_len(self, max_model_len: int) -> None:
        """The context length, once fitted to the cache. Comes before initialize_from_config."""
        self.max_model_len = max_model_len

    def compile_or_warm_up_model(self) -> None:
        """Run once, so that the first request does not pay for what is set up on first use."""
        self.runner.execute_dummy_batch()

    # -- steps --------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """See ModelRunner.execute_model."""
        return self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """See ModelRunner.sample_tokens."""
        return self.runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """A step of nobody, to keep in time with other ranks."""
        self.runner.execute_dummy_batch()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Draft tokens for the next step: none, without a drafter."""
        return None

    # -- the rest -----------------------------------------------------------------------------------------------------

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the loaded model can be asked for."""
        return ("generate",)

    def check_health(self) -> None:
        """Raises if the worker cannot work. A worker in this process is as healthy as the process."""

    def profile(self, is_start: bool, prefix: str | None = None) -> None:
        """Record what torch does between a start and a stop; the trace (for chrome://tracing) goes to the working
        directory as PREFIX-rankN.trace.json, with the prefix given at the start."""
        if is_start:
            self._trace_prefix = prefix or "quire"
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(f"{self._trace_prefix}-rank{self.rank}.trace.json")
            self._profiler = None

    def shutdown(self) -> None:
        """Let go of model and cache."""
        self._runner = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

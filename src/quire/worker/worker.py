"""A worker: one device, its model, and its share of the KV cache. Executors call it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from quire.config.engine import EngineConfig
from quire.config.lora import LoRAConfig
from quire.errors import ConfigError
from quire.failpoints import failpoint
from quire.logger import init_logger
from quire.lora_request import LoRARequest
from quire.resolve import resolve
from quire.timeline import stamp
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.wire.kv_transfer import KVConnectorMetadata
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad
from quire.wire.ring import WorkerLinks
from quire.wire.shared_memory import WORKERS_FILE_BYTES
from quire.wire.topology import Group, GroupKind, Topology
from quire.wire.worker_link import WorkerNetwork
from quire.worker import host, platform
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.attention.registry import make_attention_backend
from quire.worker.kernels.registry import choose_kernels
from quire.worker.kv_transfer.worker import KVConnectorWorker, Report
from quire.worker.loader import Placement, load_weights
from quire.worker.loader.shards import Sharding
from quire.worker.loader.standby import StandbyExperts, make_pool
from quire.worker.lora.exchange import FactorsMemory
from quire.worker.lora.table import AdapterTable
from quire.worker.model_runner import ModelRunner
from quire.worker.packed_cache import PackedCache, max_cache_bytes
from quire.worker.parallel.collectives import Collectives
from quire.worker.parallel.fingerprint import digest_weights, make_numerics_id
from quire.worker.parallel.net import NetCollectives
from quire.worker.parallel.plan import Stage
from quire.worker.parallel.pool import ExpertsPool, PooledRunner
from quire.worker.parallel.shm import ShmCollectives
from quire.worker.parallel.stages import StageRunner
from quire.worker.parallel.tokens import TokenExchange
from quire.worker.profiler import WorkerProfiler
from quire.worker.spec_decode.draft_kv import draft_kv_cache_specs
from quire.worker.spec_decode.drafter import ModelDrafter
from quire.worker.spec_decode.hidden_head import tap_for_another
from quire.worker.spec_decode.speculation import Speculation, follow_warm_up, make_speculation

logger = init_logger(__name__)


class Worker:
    """Composition root of the worker side.

    Call order: init_device, load_model, get_kv_cache_spec, determine_available_memory, update_max_model_len (where it
    was fitted), initialize_from_config, compile_or_warm_up_model, then steps.
    """

    def __init__(self, config: EngineConfig, rank: int = 0, links: WorkerLinks | None = None) -> None:
        """`links`: what the workers of an engine share, if there are several."""
        stamp("torch")  # the executor has just imported this module and, with it, torch
        self.config = config
        self.rank = rank
        self._links = links
        self._sharding: Sharding | None = None
        """Its part of a model; None: all."""
        self.max_model_len = config.model_config.model_len
        self._runner: ModelRunner | None = None
        self._speculation: Speculation | None = None
        """None: no speculation, or no model yet."""
        self._adapters: AdapterTable | None = None
        """None: no adapters are served, or no model yet."""
        self._profiler = WorkerProfiler(config.observability_config.profiler, rank)
        connector = config.kv_transfer_config.connector
        self._transfers: KVConnectorWorker | None = (
            None if connector is None else resolve(connector.worker)(config, rank)
        )
        """Worker half of the connector; None: blocks stay in the cache."""

    # -- start-up -----------------------------------------------------------------------------------------------------

    def init_device(self) -> None:
        """Chooses device, types and threads. Raises ConfigError if the configuration cannot run here."""
        model = self.config.model_config
        self.device = platform.choose_device(self.config.device_config.device)
        self.dtype = platform.resolve_dtype(model, self.device)
        if self.device.type == "cpu":
            platform.set_num_threads(num_shares=self._num_workers)
        self.kernels = choose_kernels(self.device, self.dtype, torch.get_num_threads())
        if self._links is not None and self.device.type != "cpu":
            raise ConfigError("several workers of an engine need a CPU so far; use --device cpu")
        parallel = self.config.parallel_config
        if self._links is not None or parallel.shares_experts:
            collectives = self._join_others() if self.group.size > 1 else None
            pool = None
            if parallel.shares_experts:
                pool = make_pool(self.config, self.device, self.kernels, self._max_rows)
            experts = parallel.expert_placement_strategy if parallel.enable_expert_parallel else None
            self._sharding = Sharding(collectives, self._stage, experts, pool)
        self.backend = make_attention_backend(self.device, self.dtype, self.cache_dtype, self.kernels)
        names = self.kernels.name, self.backend.name
        logger.info("worker: device %s, %s, %s kernels, %s attention", self.device, self.dtype, *names)
        if self._collectives is not None and isinstance(self.backend, NativeAttentionBackend):
            self.backend.agree = self._collectives.agree
        stamp("kernels")

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of cached keys and values."""
        name = self.config.cache_config.cache_dtype
        return self.dtype if name == "auto" else cast("torch.dtype", getattr(torch, name))

    @property
    def _collectives(self) -> Collectives | None:
        """None: no other worker shares its layers."""
        return None if self._sharding is None else self._sharding.collectives

    @property
    def _pool(self) -> ExpertsPool | None:
        """None: no other engine shares its experts."""
        return None if self._sharding is None else self._sharding.pool

    def _join_others(self) -> ShmCollectives:
        """Returns the collectives of this worker and those beside it."""
        assert self._links is not None, "an executor of several workers gives them links"
        start = 0 if self._stage is None else self._stage.index * WORKERS_FILE_BYTES
        file, rows, threads = self._links.shared_file, self._max_rows, self._num_threads
        network = self._links.network
        if network is not None and self.group.size > len(network.ranks()):
            return NetCollectives(file, self.group, self.kernels, rows, network, num_threads=threads)
        return ShmCollectives(file, self.group, self.kernels, rows, num_threads=threads, start=start)

    def join_engines(self, epoch: int, network: WorkerNetwork | None = None) -> None:
        """Computes the steps that follow with all engines that share experts: they are in this epoch of their group,
        on the machines of `network` if there are several."""
        assert self._pool is not None, "the engine shares experts"
        self._pool.join(epoch, network)
        if self._adapters is not None and self._adapters.exchange is not None:
            self._adapters.exchange.forget_all()

    def prepare_experts(self, num_engines: int, generation: int) -> Future[None]:
        """Begins to read the experts that this engine will have among another number of engines. They are in memory
        when the Future is done."""
        assert self._pool is not None, "the engine shares experts"
        self.discard_experts()
        config = self.config.with_engines(num_engines, generation)
        pool = make_pool(config, self.device, self.kernels, self._max_rows)
        placement = Placement(self.device, self.dtype, choose_kernels(self.device, self.dtype, 1))
        self._pool.standby = standby = StandbyExperts(config, pool, placement, self.loaded[0].weights.source)
        return standby.ready

    def install_experts(self) -> None:
        """Replaces the experts by those that `prepare_experts` has read. This engine is alone until `join_engines`."""
        former, runner = self._pool, self.runner
        assert former is not None
        assert isinstance(runner, PooledRunner)
        standby = former.standby
        assert isinstance(standby, StandbyExperts), "prepare_experts comes first"
        self.loaded[0] = standby.install(self.loaded[0], self.kernels)
        self.config, self._sharding, runner.shared_experts = standby.config, standby.sharding, standby.pool
        former.close()
        platform.release_free_memory(self.device)

    def discard_experts(self) -> None:
        """Frees the experts that `prepare_experts` has read, or reads."""
        if self._pool is not None and self._pool.standby is not None:
            self._pool.standby.discard()
            self._pool.standby = None

    @property
    def _max_rows(self) -> int:
        """Tokens of the largest step."""
        scheduler = self.config.scheduler_config
        return max(scheduler.max_num_batched_tokens or 0, scheduler.max_num_seqs or 0)

    @property
    def _num_threads(self) -> int:
        """Threads of all workers on this machine."""
        return torch.get_num_threads() * self._num_workers

    @property
    def _num_workers(self) -> int:
        """Number of workers on this machine."""
        parallel, links = self.config.parallel_config, self._links
        if links is None or links.network is None:
            return parallel.world_size * len(parallel.machine_engines)
        return (len(links.network.ranks()) + links.network.num_neighbours) * len(parallel.machine_engines)

    @property
    def _topology(self) -> Topology:
        parallel = self.config.parallel_config
        return Topology(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)

    @property
    def group(self) -> Group:
        """The workers that share each layer with this one."""
        return self._topology.group(GroupKind.TENSOR, self.rank)

    @property
    def _stage(self) -> Stage | None:
        """The stage of this worker; None: there is one only. Raises ConfigError."""
        parallel = self.config.parallel_config
        if parallel.pipeline_parallel_size == 1:
            return None
        index = self._topology.place_of(self.rank).pp
        return Stage(index, parallel.pipeline_parallel_size, parallel.layer_partition)

    @property
    def runner(self) -> ModelRunner:
        """The model runner, once the model is loaded."""
        assert self._runner is not None, "load_model comes first"
        return self._runner

    def load_model(self) -> None:
        """Reads the weights, unless that is done. Raises ModelLoadError."""
        if self._runner is not None:
            return
        failpoint("worker.load")
        model, scheduler = self.config.model_config, self.config.scheduler_config
        assert scheduler.max_num_seqs is not None, "EngineArgs fills it in"
        assert scheduler.max_num_batched_tokens is not None, "EngineArgs fills it in"
        stage = self._stage
        placement = Placement(self.device, self.dtype, self.kernels, self._sharding)
        loaded = load_weights(model, self.config.load_config, placement)
        if model.enable_prompt_embeds and not getattr(loaded.model, "takes_prompt_embeds", False):
            raise ConfigError(
                f"--enable-prompt-embeds: {type(loaded.model).__name__} takes token ids only, not embeddings; leave "
                "the flag out"
            )
        self.loaded = [loaded]
        """The target, the drafter if it is a model, and what that has of the target besides."""
        make: Callable[..., ModelRunner] = ModelRunner
        if self._pool is not None:
            make = partial(PooledRunner, self._pool)
        elif stage is not None and self._links is not None:
            make = partial(StageRunner, stage, self._links)
        self._runner = make(
            loaded.model,
            self.backend,
            self.device,
            vocab_size=model.hf_config.vocab_size,
            max_num_reqs=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_batched_tokens,
            kernels=self.kernels,
            dtype=self.dtype,
            pooling=model.pooling,
        )
        if self._collectives is not None:
            self._runner.sampler.exchange = TokenExchange(self._collectives)
        if self.config.lora_config.enable_lora:
            self._adapters = self._runner.adapters = self._make_adapters(loaded.model, placement)
            if self._runner.pooler is not None:
                self._runner.pooler.adapters = self._adapters
            if isinstance(self._runner, PooledRunner):
                self._runner.pooled_adapters = self._adapters.exchange
        drafting = self.config.speculative_config.drafting
        if drafting is not None and self.rank == self._topology.output_rank:  # the others get drafts with the step
            self._speculation = make_speculation(self.config, placement, self._runner, drafting)
        elif drafting is not None:
            tap_for_another(self.config, drafting, loaded.model, self._sharding)
        if self._draft_model is not None:
            self.loaded.append(self._draft_model.loaded)
            if self._draft_model.ends is not None:
                self.loaded.append(self._draft_model.ends)
        stamp("weights")

    def _make_adapters(self, model: nn.Module, placement: Placement) -> AdapterTable:
        """Returns an empty table of adapters. Raises ConfigError for a type that this model's adapters cannot have."""
        config, limits = self.config.model_config, self.config.lora_config
        own = str(self.dtype).removeprefix("torch.")
        if limits.lora_dtype not in ("auto", own):
            raise ConfigError(
                f"--lora-dtype {limits.lora_dtype} on a model of {own}: adapters have the model's type; leave it out, "
                "or choose another --dtype"
            )
        pools = config.pooling is not None
        is_cached = self.config.load_config.weight_cache and max_cache_bytes() > 0
        cache = PackedCache.of_adapters() if is_cached else None
        shared, parallel = None, self.config.parallel_config
        if self._pool is not None and self.kernels.pack_format is not None and not parallel.spans_machines:
            shared = FactorsMemory(parallel.experts_file, parallel.engine_index)
        name = str(config.model)
        return AdapterTable(model, placement, limits, pools=pools, base_model=name, cache=cache, shared=shared)

    @property
    def _draft_model(self) -> ModelDrafter | None:
        """The drafter, if it is a model."""
        return None if self._speculation is None else self._speculation.model

    def get_kv_cache_spec(self) -> dict[str, AnyKVCacheSpec]:
        """Returns the cache spec of each attention layer by its name. Loads the model, whose layers make them."""
        self.load_model()
        return self.runner.get_kv_cache_specs(self.config.cache_config.block_size, self.cache_dtype)

    def get_draft_kv_cache_spec(self) -> dict[str, AnyKVCacheSpec]:
        """Returns the cache spec of each of the drafter's layers by its name in the `KVCacheConfig`."""
        self.load_model()
        layers = () if self._draft_model is None else self._draft_model.layers
        return draft_kv_cache_specs(layers, self.config.cache_config.block_size, self.cache_dtype)

    def determine_available_memory(self) -> int:
        """Returns the bytes for the KV cache: --kv-cache-memory-bytes, or what weights and the largest step leave."""
        cache = self.config.cache_config
        if cache.kv_cache_memory_bytes is not None and cache.kv_cache_memory_bytes >= 0:
            return self._share_of(cache.kv_cache_memory_bytes)
        if self.device.type == "cpu":
            return self._available_cpu_memory()
        return self._available_cuda_memory(cache.gpu_memory_utilization)

    def _available_cpu_memory(self) -> int:
        block_size = self.config.cache_config.block_size
        specs = [*self.get_kv_cache_spec().values(), *self.get_draft_kv_cache_spec().values()]
        block_bytes = sum(spec.page_size_bytes for spec in specs)
        useful = host.useful_kv_cache_bytes(self.max_model_len, self.runner.max_num_reqs, block_size, block_bytes)
        useful = useful * self.group.size * self._num_layers // len(self._own_layers)
        if self._adapters is not None:  # the engine takes their memory out of what is returned
            useful += adapters_share(useful, self.config.lora_config)
        mapped_bytes = sum(model.cache.mapped_bytes for model in self.loaded)  # the system counts them as free
        if self._collectives is not None:  # not taken before the first large step
            mapped_bytes += sum(self._collectives.row_bytes.values()) * self._collectives.max_rows
        if self._pool is not None:
            mapped_bytes += self._pool.num_bytes
        free = max(0, host.available_cpu_memory() - mapped_bytes)
        free = free * self.config.parallel_config.world_size // self._num_workers  # as if all workers were here
        return self._share_of(host.cpu_kv_cache_bytes(free, useful))

    @property
    def _num_layers(self) -> int:
        return self.config.model_config.hf_config.num_hidden_layers

    @property
    def _own_layers(self) -> range:
        return range(self._num_layers) if self._stage is None else self._stage.layers(self._num_layers)

    def _share_of(self, num_bytes: int) -> int:
        """Returns this worker's share of memory for the KV cache of an engine."""
        return num_bytes // self.group.size * len(self._own_layers) // self._num_layers

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
        """Allocates the KV cache and the batch."""
        self._kv_cache_config = kv_cache_config
        self.runner.initialize_kv_cache(kv_cache_config, self.max_model_len)
        if self._transfers is not None:
            self._transfers.register_kv_caches(self.runner.kv_cache)
        stamp("KV cache")

    def update_max_model_len(self, max_model_len: int) -> None:
        """Sets the context length after it was fitted to the cache. Must be called before initialize_from_config."""
        self.max_model_len = max_model_len

    def compile_or_warm_up_model(self) -> None:
        """Runs a dummy step, so that the first request does not pay for what is set up on first use."""
        self.runner.execute_dummy_batch()
        if self._speculation is not None:
            self._speculation.warm_up()
        elif self.config.speculative_config.drafting is not None:
            follow_warm_up(self.runner)
        stamp("warm-up")

    # -- steps --------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        if scheduler_output.kv_connector_metadata is not None:
            self.start_transfers(scheduler_output.kv_connector_metadata)
        if self._profiler.is_armed:
            self._profiler.begin_step()
        if self._adapters is not None:
            self._adapters.begin_step()
        if self._speculation is not None:
            self._speculation.begin_step(scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids)
        output = self.runner.execute_model(scheduler_output)
        if self._transfers is not None:
            self._transfers.end_step()
        return output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        return self.runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """Runs a dummy step of one token, to keep in step with other ranks."""
        self.runner.execute_dummy_batch()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Returns the draft tokens for the next step; None without speculation. It is called after the outputs of a
        step have left, so that drafting delays none of them."""
        return None if self._speculation is None else self._speculation.propose()

    def reset_drafter(self) -> None:
        """Makes the drafter forget the texts of all requests."""
        if self._speculation is not None:
            self._speculation.reset()

    # -- adapters -----------------------------------------------------------------------------------------------------

    def load_adapter(self, load: AdapterLoad) -> Future[AdapterInfo]:
        """Begins to load an adapter; it may be used in the step after the Future is done. May be called on any
        thread."""
        return self._table.load(load)

    def measure_adapter(self, request: LoRARequest) -> Future[int]:
        """Begins to compute the bytes that an adapter will take at most. May be called on any thread."""
        return self._table.measure(request)

    def drop_adapter(self, key: AdapterKey) -> None:
        """Removes an adapter that no request uses, before the next step. May be called on any thread."""
        self._table.drop(key)

    @property
    def _table(self) -> AdapterTable:
        assert self._adapters is not None, "the engine refuses adapters without --enable-lora"
        return self._adapters

    # -- transfers of blocks ------------------------------------------------------------------------------------------

    def register_transfer_callback(self, report: Report) -> None:
        """Sets what gets the reports of transfers that have ended, on any thread."""
        assert self._transfers is not None, "a connector is configured"
        self._transfers.report = report

    def start_transfers(self, orders: KVConnectorMetadata) -> None:
        """Begins transfers of blocks, beside the steps."""
        assert self._transfers is not None, "a connector is configured"
        self._transfers.start(orders)

    # -- sleep and new weights ----------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Frees memory and drops all requests. Level 1: the KV cache; weights move from an accelerator to main memory
        and stay there on a CPU. Level 2: the weights, too, and adapters."""
        if level != 1 and self._adapters is not None:
            self._adapters.drop_all()
        for model in self.loaded:
            if level == 1:
                model.weights.offload()
            else:
                model.weights.drop()
        self.release_kv_cache_memory()

    def release_kv_cache_memory(self) -> None:
        """Frees the KV cache only and drops all requests."""
        self.runner.release_kv_cache()
        if self._draft_model is not None:
            self._draft_model.release_kv_cache()
        if self._transfers is not None:
            self._transfers.register_kv_caches(self.runner.kv_cache)
        self.kernels.release_memory()
        platform.release_free_memory(self.device)

    def wake_up(self, tags: list[str]) -> None:
        """Restores what `tags` ("weights", "kv_cache") name. Raises ModelLoadError if the weights cannot be read."""
        if "weights" in tags:
            for model in self.loaded:
                model.weights.restore()
        if "kv_cache" in tags:
            self.initialize_from_config(self._kv_cache_config)

    def check_weights(self, path: str) -> None:
        """Raises ModelLoadError unless the checkpoint directory `path` fits the loaded model."""
        self.loaded[0].weights.check(Path(path))

    def load_weights(self, path: str | None = None) -> None:
        """Replaces the weights in place by those of `path`; None: reads them again. Raises ModelLoadError."""
        for model in (self.loaded[0], *self.loaded[2:]):
            model.weights.replace(None if path is None else Path(path))
        if self._transfers is not None and path is not None:
            self._transfers.set_weights(path)

    def undo_weights(self) -> None:
        """Takes back the last `load_weights`, which has failed in some worker: the weights of before are read by the
        next one without a path, or by `wake_up`."""
        if self.loaded[0].weights.undo() and self._transfers is not None:
            self._transfers.undo_weights()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns the tasks that the loaded model serves."""
        pooling = self.config.model_config.pooling
        return ("generate",) if pooling is None else pooling.tasks

    def get_numerics_id(self) -> str:
        """Returns what decides the bits of the logits (`EngineCoreReadyResponse.numerics_id`)."""
        model = self.config.model_config
        form = model.quantization or "as stored"
        types: tuple[object, ...] = (self.dtype, self.cache_dtype, form, model.implementation.name)
        if self.kernels.pack_format is None:  # only the native kernels compute the same for any number
            types = (*types, f"{self.group.size} workers")
        weights = digest_weights(model.model_dir)
        return make_numerics_id(self.device, self.kernels.pack_format, types, self.backend.name, weights)

    def check_health(self) -> None:
        """Raises if the worker cannot run. A worker in this process is as healthy as the process."""

    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Starts or stops the torch profiler: see WorkerProfiler."""
        if is_start:
            self._profiler.start(prefix, delay_iterations, max_iterations)
        else:
            self._profiler.stop()

    def get_model(self) -> nn.Module:
        """The loaded model."""
        return cast("nn.Module", self.runner.model)

    def reload_weights(self) -> None:
        """Reads the weights again from their checkpoint."""
        self.load_weights()

    def shutdown(self) -> None:
        """Releases model and cache."""
        if self._transfers is not None:
            self._transfers.close()
        if self._adapters is not None:
            self._adapters.shutdown()
        if self._runner is not None:
            for model in self.loaded:
                model.cache.close()
        self._runner = self._speculation = self._adapters = None
        for shared in (self._collectives, self._pool):
            if shared is not None:
                shared.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def adapters_share(cache_bytes: int, config: LoRAConfig) -> int:
    """Returns the bytes that adapters get beside a KV cache of `cache_bytes`: by default a tenth of both, at most 1
    GiB, and as much without a cache."""
    if config.lora_memory_bytes is not None:
        return config.lora_memory_bytes
    return min(host.GIB, -(-cache_bytes // 9)) if cache_bytes else host.GIB

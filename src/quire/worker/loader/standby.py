"""The experts that an engine will have once the number of engines has changed.

They are read beside the steps of the present group, on a thread and with kernels of their own, since a context of
kernels serves one thread at a time. Between two steps they take the place of the present ones, and compute with the
threads of those. Meanwhile the engine's part of the model is in memory twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import nn

from quire.config.engine import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.failpoints import failpoint
from quire.wire.topology import GroupKind, Topology
from quire.worker.kernels.base import Kernels
from quire.worker.layers.moe import Experts
from quire.worker.loader import LoadedModel, ModelWeights, Placement, load_weights
from quire.worker.loader.shards import Sharding
from quire.worker.parallel.pool import ExpertsPool

NICENESS = 10
"""Added to the priority of the thread that reads: steps come first."""


class StandbyExperts:
    """Reads an engine's next part of the model. `ready` ends when it is in memory, or with the error that keeps it from
    that."""

    def __init__(
        self, config: EngineConfig, pool: ExpertsPool, placement: Placement, source: Path | None = None
    ) -> None:
        """`config` has the next number of engines. `placement` has kernels that no other thread uses. `source` is where
        the present weights are from, if that is another directory than the model's."""
        self.config, self.pool, self._source = config, pool, source
        self.sharding = Sharding(None, None, config.parallel_config.expert_placement_strategy, pool)
        self.ready: Future[None] = Future()
        self._placement = dataclasses.replace(placement, sharding=self.sharding)
        self._loaded: LoadedModel | None = None
        threading.Thread(target=self._read, name="StandbyExperts", daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # the priority of this thread, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            failpoint("worker.standby")
            self._loaded = load_weights(self.config.model_config, self.config.load_config, self._placement)
            if self._source is not None and self._source != self.config.model_config.model_dir:
                self._loaded.weights.replace(self._source)
        except Exception as e:
            failure = e if isinstance(e, QuireError) else RuntimeError(f"{type(e).__name__}: {e}")
            self.ready.set_exception(failure)
        else:
            self.ready.set_result(None)

    def install(self, present: LoadedModel, kernels: Kernels) -> LoadedModel:
        """Puts the experts into the `present` model, where they compute with `kernels`. Returns the model with its
        weights as they are now. `ready` must have ended well."""
        self.ready.result()
        assert self._loaded is not None, "it is ready"
        for path, experts in mixtures(self._loaded.model):
            parent, _, name = path.rpartition(".")
            former = present.model.get_submodule(path)
            setattr(present.model.get_submodule(parent), name, experts)
            experts.move_to(kernels)
            if isinstance(former, Experts) and former.sites is not None:
                experts.set_sites(*former.sites)
        placement, config = dataclasses.replace(self._placement, kernels=kernels), self.config
        weights = ModelWeights(present.model, config.model_config, config.load_config, placement, self._loaded.cache)
        weights.follow(present.weights)
        present.cache.cancel()
        return LoadedModel(present.model, weights, self._loaded.cache)

    def discard(self) -> None:
        """Frees what has been read, once reading has ended."""
        self.ready.add_done_callback(lambda _: self._forget())

    def _forget(self) -> None:
        if self._loaded is not None:
            self._loaded.cache.cancel()
            self._loaded = None


def mixtures(model: nn.Module) -> list[tuple[str, Experts]]:
    """Returns the mixtures of experts of a model, by their places."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, Experts)]
    return [(path, experts) for path, experts in found if experts.spec.num_experts > 1]


def make_pool(config: EngineConfig, device: torch.device, kernels: Kernels, max_rows: int) -> ExpertsPool:
    """Returns the experts of all engines, as one of them sees them; `max_rows` are the tokens of its largest step.
    Raises ConfigError where they cannot be shared."""
    parallel = config.parallel_config
    if device.type != "cpu":
        raise ConfigError("engines that share experts (--enable-expert-parallel) need a CPU so far; --device cpu")
    if parallel.experts_file < 0:
        raise ConfigError("--enable-expert-parallel: this engine was started without the others of its group")
    topology = Topology(dp=parallel.data_parallel_size, expert_parallel=True)
    group = topology.group(GroupKind.EXPERT, parallel.engine_index)
    file, threads = parallel.experts_file, torch.get_num_threads() * len(parallel.machine_engines)
    return ExpertsPool(file, group, kernels, max_rows, num_threads=threads, generation=parallel.experts_generation)

"""A worker without a model, for tests of `MultiprocExecutor`: it is started in processes, by its dotted name."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from quire.config.engine import EngineConfig
from quire.errors import ModelLoadError
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput
from quire.wire.kv_cache import FullAttentionSpec, KVCacheConfig
from quire.wire.ring import WorkerLinks


class BarrierError(Exception):
    """Stands for the error of a barrier."""


class ApartWorker:
    """Answers with its rank. Steps whose request names a fault have it."""

    def __init__(self, config: EngineConfig, rank: int, links: WorkerLinks) -> None:
        self.rank, self._file = rank, links.shared_file

    def init_device(self) -> None:
        """Does nothing."""

    load_model = compile_or_warm_up_model = shutdown = check_health = init_device

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """A spec whose number of heads is its rank's."""
        return {"layer": FullAttentionSpec(16, 1 + self.rank, 8)}

    def determine_available_memory(self) -> int:
        """Bytes by rank."""
        return 1000 + self.rank

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        """Stores its own config."""
        self.num_blocks = config.num_blocks

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs a step."""
        fault = next(iter(output.num_scheduled_tokens), "")
        if fault == f"kill {self.rank}":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == f"fail {self.rank}":
            raise ModelLoadError(f"rank {self.rank} has a fault")
        if fault.startswith(("kill", "fail")):
            self._wait_for_abort()
        return None if fault else ModelRunnerOutput(["r"], [[self.rank]])

    def _wait_for_abort(self) -> None:
        while os.pread(self._file, 4, 0) == bytes(4):
            threading.Event().wait(0.001)
        raise BarrierError("another worker of the step has failed")

    def sample_tokens(self, grammar: Any) -> ModelRunnerOutput:
        """Returns a token: its rank."""
        return ModelRunnerOutput(["r"], [[self.rank + 5]])

    def take_draft_token_ids(self) -> None:
        """There are none."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns one task."""
        return ("generate",)

    def get_pid(self) -> int:
        """Process id."""
        return os.getpid()

    def get_cpus(self) -> list[int]:
        """Processors that it may use."""
        return sorted(os.sched_getaffinity(0))

    def check_weights(self, path: str) -> None:
        """Refuses, on one worker."""
        if self.rank == 1:
            raise ModelLoadError(f"{path} does not fit")

    def hang(self) -> None:
        """Never answers."""
        threading.Event().wait()


def add_rank(worker: ApartWorker, number: int) -> int:
    """A function to be called with a worker."""
    return worker.rank + number

"""A worker without a model, for tests of `MultiprocExecutor`: it is started in processes, by its dotted name."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from quire.config.engine import EngineConfig
from quire.errors import AdapterError, ModelLoadError
from quire.lora_request import LoRARequest
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput
from quire.wire.kv_cache import FullAttentionSpec, KVCacheConfig
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad
from quire.wire.ring import WorkerLinks

T = TypeVar("T")


class BarrierError(Exception):
    """Stands for the error of a barrier."""


class ApartWorker:
    """Answers with its rank. Steps whose request names a fault have it."""

    def __init__(self, config: EngineConfig, rank: int, links: WorkerLinks) -> None:
        self.rank, self._file, self._links = rank, links.shared_file, links
        self.loaded: list[AdapterKey] = []

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

    def measure_adapter(self, request: LoRARequest) -> Future[int]:
        """Returns bytes by rank."""
        return _in_a_thread(lambda: 10 + self.rank)

    def load_adapter(self, load: AdapterLoad) -> Future[AdapterInfo]:
        """Loads an adapter, whose name may say on which rank this fails, or reads other files."""
        self.loaded.append(load.key)
        name = load.lora_request.lora_name

        def run() -> AdapterInfo:
            if name == f"fail {self.rank}":
                raise AdapterError(f"rank {self.rank} cannot read it")
            digest = "other" if name == f"other {self.rank}" else "same"
            return AdapterInfo(*load.key, digest, 100 + self.rank, 4)

        return _in_a_thread(run)

    def drop_adapter(self, key: AdapterKey) -> None:
        """Drops one."""
        self.loaded.remove(key)

    def get_loaded(self) -> list[AdapterKey]:
        """Adapters that were loaded and not dropped."""
        return self.loaded

    def get_pid(self) -> int:
        """Process id."""
        return os.getpid()

    def get_numbers(self) -> list[int]:
        """Numbers of its machine: its first worker, and those of all machines."""
        network = self._links.network
        return [self._links.ranks[0], *(network.parts if network is not None else ())]

    def pass_on(self, size: int) -> int:
        """Sends so many bytes to the next stage. Returns how many came, and one more each; the first stage's own."""
        inlet, outlet = self._links.inlet, self._links.outlet
        if inlet is not None:
            frames = inlet.receive(60)
            assert frames is not None
            size = len(frames[1]) + 1
        if outlet is not None:
            outlet.send([b"states", bytes(size)])
        return size

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


def _in_a_thread(run: Callable[[], T]) -> Future[T]:
    """Returns the result of a call that a thread makes."""
    threads = ThreadPoolExecutor(1)
    future = threads.submit(run)
    threads.shutdown(wait=False)
    return future


def add_rank(worker: ApartWorker, number: int) -> int:
    """A function to be called with a worker."""
    return worker.rank + number

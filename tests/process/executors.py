"""Executors for core processes of the tests; named by dotted string, so importable there."""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from quire.config.engine import EngineConfig
from quire.errors import ModelLoadError, ServerError
from quire.failpoints import failpoint
from quire.testing.fake_executor import FakeExecutor
from quire.testing.fake_hardware import InFlight
from quire.wire.exchange import ExchangeLostError, HostExchange
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput
from quire.wire.shared_memory import EPOCHS_BYTES, epoch_start, generation_start
from quire.wire.worker_link import WorkerNetwork

from .pace import LEISURELY_STEP_S, PACE_FILE


class Quick(FakeExecutor):
    """A fake model with room for 262,144 tokens, whose steps take no time. A core makes each block before it serves."""

    available_bytes = 1 << 20


class Steady(Quick):
    """Steps of 2 ms: slow enough to be watched."""

    step_time_s = 0.002

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """`echo`, `fail`, `collects` and `weird` (a result that cannot be sent) are its methods."""
        match method:
            case "collects":
                return [gc.isenabled()]
            case "echo":
                return [list(args)]
            case "fail":
                raise RuntimeError("asked to fail")
            case "weird":
                return [object()]
        return super().collective_rpc(method, timeout, args, kwargs)


class Calm(Quick):
    """Steps of 8 ms: many readers read on for as long as a test takes, and leave it the processors."""

    step_time_s = 0.008


class Unloadable(Quick):
    """Its weights are missing."""

    def __init__(self, config: EngineConfig) -> None:
        raise ModelLoadError("model.safetensors has no tensor 'lm_head.weight'")


class Broken(Quick):
    """Fails at start-up with an unexpected error."""

    def determine_available_memory(self) -> list[int]:
        raise KeyError("surprise")


class Mortal(Quick):
    """Fails in its fifth step."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._steps_left = 5

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._steps_left -= 1
        if not self._steps_left:
            raise RuntimeError("the fifth step fails")
        return super().execute_model(*args, **kwargs)


class SlowToLoad(Quick):
    """Takes long to start."""

    def determine_available_memory(self) -> list[int]:
        time.sleep(60)
        return super().determine_available_memory()


class Leisurely(Quick):
    """Steps of 20 ms: a stream that lasts until the test has done what it is to meet, and then hurries (`pace.py`)."""

    @property
    def step_time_s(self) -> float:  # type: ignore[override]
        path = os.environ.get(PACE_FILE)
        return 0.0 if path is not None and os.path.exists(path) else LEISURELY_STEP_S


class Patient(Leisurely):
    """Leisurely, and five times slower once it has not hurried for eight seconds: then the machine is crowded, and what
    the stream is to meet comes late."""

    _num_slow = 0

    @property
    def step_time_s(self) -> float:  # type: ignore[override]
        own = super().step_time_s
        self._num_slow = self._num_slow + 1 if own else 0
        return own if self._num_slow < 8 / LEISURELY_STEP_S else 5 * own


class Pools(Steady):
    """Pools: the digest of a prompt, as one number."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("embed",)

    def _execute(self, step: SchedulerOutput) -> InFlight:
        under_way = super()._execute(step)
        if self._unsampled is None:
            return under_way
        (_, digests), self._unsampled = self._unsampled, None
        pooled = {req_id: np.array([digest[-1] % 65536], dtype=np.float32) for req_id, digest in digests.items()}
        req_ids = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(req_ids, [[] for _ in req_ids], pooler_output=pooled)
        return self._start(output, step.total_num_scheduled_tokens)


class SlowAdapters(Steady):
    """Adapters take 20 ms to load, and seven fit at once."""

    adapter_load_s = 0.02
    adapter_bytes = 140_000


class ManyAdapters(Steady):
    """Adapters take 2 ms to load, and two hundred fit at once."""

    adapter_load_s = 0.002
    adapter_bytes = 5_000


class Sharing(Steady):
    """Steps that all engines of a group compute together, of 2 ms. Fails if they are not at the same one."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._parallel = config.parallel_config
        self._join(self._parallel.data_parallel_size, self._parallel.experts_generation)
        self._next: tuple[int, int] | None = None

    def _join(self, size: int, generation: int) -> None:
        self._rank, self._size = self._parallel.engine_index, size
        start = generation_start(generation)
        self._words = memoryview(mmap.mmap(self._parallel.experts_file, EPOCHS_BYTES, offset=start)).cast("I")
        self._epoch, self._generation = 0, 0
        """Epoch 0: this engine is alone."""
        self._network: WorkerNetwork | None = None
        self._exchange: HostExchange | None = None

    def join_engines(self, epoch: int, network: WorkerNetwork | None = None) -> None:
        """`network`: the engines are on machines of their own."""
        self._epoch, self._generation, self._network = epoch, 0, network
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def prepare_experts(self, num_engines: int, generation: int) -> Future[None]:
        failpoint("worker.standby")
        self._next, done = (num_engines, generation), Future[None]()
        done.set_result(None)
        return done

    def install_experts(self) -> None:
        assert self._next is not None
        self._join(*self._next)
        self._next = None

    def discard_experts(self) -> None:
        self._next = None

    def load_weights(self, path: str | None = None) -> None:
        """Engine 1 has an expert of `/half` that cannot be read."""
        if path == "/half" and self._rank == 1:
            raise ModelLoadError("an expert holds NaN")
        super().load_weights(path)

    def _meet(self) -> None:
        if not self._epoch:
            return
        start, self._generation = epoch_start(self._epoch) // 4, self._generation + 1
        if self._network is not None:
            self._meet_afar(self._network, start)
            return
        self._words[start + 16 * (1 + self._rank)] = self._generation
        for rank in range(self._size):
            while (found := self._words[start + 16 * (1 + rank)]) < self._generation and not self._words[start]:
                time.sleep(0.0001)
            if self._words[start]:
                raise ServerError("another engine has ended")
            if found > self._generation + 1:
                raise RuntimeError(f"engine {rank} is at step {found}, and engine {self._rank} at {self._generation}")

    def _meet_afar(self, network: WorkerNetwork, start: int) -> None:
        def check() -> None:
            if self._words[start]:
                raise ServerError("another engine has ended")

        try:
            if self._exchange is None:
                self._exchange = HostExchange(network, check, 60.0)
            steps = self._exchange.exchange([b"%d" % self._generation])
        except ExchangeLostError:
            self._words[start] = 1
            raise
        if any(int(step) != self._generation for (step,) in steps):
            raise RuntimeError(f"others are at the steps {steps}, and engine {self._rank} at {self._generation}")

    def execute_dummy_batch(self) -> None:
        self._meet()
        super().execute_dummy_batch()

    def _execute(self, step: SchedulerOutput) -> InFlight:
        if step.total_num_scheduled_tokens:
            self._meet()
        return super()._execute(step)

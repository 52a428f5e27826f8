"""Which processes and devices an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How workers are run. One process, one worker, for now; the executor is a dotted name."""

    distributed_executor_backend: str = flag(
        "uni", "Executor: uni (the worker lives in the engine's process), or package.module:Class."
    )
    worker_cls: str = flag("quire.worker.worker:Worker", "Worker class, as package.module:Class.")
    engine_host: str | None = flag(
        None,
        "Speak with the engine core over TCP, encrypted and authenticated, on this address; unset: by private sockets.",
    )

    @property
    def executor_class(self) -> str:
        """The executor's dotted name."""
        return EXECUTORS.get(self.distributed_executor_backend, self.distributed_executor_backend)

    @property
    def core_names(self) -> tuple[str, ...]:
        """What an engine core will resolve once it has read its configuration, so that it can begin before: the
        executor, and the worker where the executor is ours (another's may never make that worker)."""
        names = [self.executor_class]
        if self.distributed_executor_backend in EXECUTORS:
            names += [LEAN_TORCH, self.worker_cls]
        return tuple(names)


LEAN_TORCH = "quire.worker.lean_torch:LazyFinder"
"""Imported before torch, it leaves out what no worker of ours uses."""
EXECUTORS: dict[str, str] = {"uni": "quire.engine.executor.uniproc:UniProcExecutor"}

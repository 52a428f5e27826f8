"""The torch profiler of a worker."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.config.observability import ProfilerConfig
from quire.logger import init_logger

logger = init_logger(__name__)


class WorkerProfiler:
    """Traces torch's work in steps, for Perfetto or chrome://tracing: those between `start` and `stop`, or fewer.

    It skips `delay_iterations` and stops by itself after `max_iterations` (0: no limit). The trace is
    PREFIX-rankN.trace.json.gz in the directory configured; a prefix may be a path of its own.
    """

    def __init__(self, config: ProfilerConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._profile: torch.profiler.profile | None = None
        self._prefix = ""
        self._num_to_skip = 0
        self._num_left: int | None = None
        """Steps still to be recorded; None for as many as come."""
        self.is_armed = False
        """True if `begin_step` is to be called."""

    def start(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        """Starts recording. Arguments that are None take the configured values. A second call while it records has no
        effect."""
        if self.is_armed:
            return
        self._prefix = prefix or "quire"
        self._num_to_skip = self._config.delay_iterations if delay_iterations is None else delay_iterations
        limit = self._config.max_iterations if max_iterations is None else max_iterations
        self._num_left = limit or None
        self.is_armed = True
        if not self._num_to_skip:
            self._record()

    def begin_step(self) -> None:
        """Counts a step that is about to run, and starts or ends the recording."""
        if self._num_to_skip:
            self._num_to_skip -= 1
            return
        if self._profile is None:
            self._record()
        if self._num_left == 0:
            try:
                self.stop()
            except OSError:  # a trace that cannot be written must not fail a step
                logger.exception("the profile is lost")
        elif self._num_left is not None:
            self._num_left -= 1

    def stop(self) -> None:
        """Writes the trace, if there is one."""
        self.is_armed = False
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        suffix = ".json.gz" if self._config.torch_profiler_use_gzip else ".json"
        name = f"{self._prefix}-rank{self._rank}.trace{suffix}"
        path = Path(self._config.torch_profiler_dir).expanduser() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
        logger.info("profile written to %s", path)

    def _record(self) -> None:
        config = self._config
        self._profile = torch.profiler.profile(
            with_stack=config.torch_profiler_with_stack,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_flops=config.torch_profiler_with_flops,
        )
        self._profile.start()

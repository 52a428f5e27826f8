"""How an engine core comes and goes."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """The life of the engine core's process."""

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

"""What the engine tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Statistics and their cost."""

    disable_log_stats: bool = flag(False, "Compute no statistics.")
    enable_logging_iteration_details: bool = flag(False, "Log what every step computed and how long it took.")

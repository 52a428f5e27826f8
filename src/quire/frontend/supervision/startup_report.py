"""How an engine's start went: a line in its frontend's log, and the file that QUIRE_STARTUP_REPORT names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire import envs
from quire.logger import init_logger
from quire.timeline import Stamp, get_stamps, stamp
from quire.wire.engine_core import EngineCoreReadyResponse
from quire.wire.process import peak_memory_bytes

logger = init_logger(__name__)

MIB = 1 << 20


class Startup(msgspec.Struct):
    """The report, as JSON. `core` is empty where the core lives in the frontend's process: one list has both."""

    frontend: list[Stamp]
    core: list[Stamp]
    frontend_peak_memory_bytes: int
    core_peak_memory_bytes: int


class StartupReport:
    """Made when the engine is ready; `finish` once its first output is there."""

    def __init__(self, ready: EngineCoreReadyResponse) -> None:
        stamp("engine ready")
        self._ready = ready
        logger.info("%s", describe_start(get_stamps(), ready.stamps, peak_memory_bytes(), ready.peak_memory_bytes))

    def finish(self) -> None:
        """Write the report, where one is wanted. A file that cannot be written is a line in the log."""
        stamp("first output")
        name = envs.STARTUP_REPORT.get()
        if not name:
            return
        startup = Startup(get_stamps(), self._ready.stamps, peak_memory_bytes(), self._ready.peak_memory_bytes)
        part = Path(f"{name}.{os.getpid()}.part")
        try:
            part.write_bytes(msgspec.json.encode(startup))
            part.replace(name)  # whoever waits for it finds it whole
        except OSError as e:
            logger.warning("%s=%s cannot be written: %s", envs.STARTUP_REPORT.name, name, e.strerror or e)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def describe_start(frontend: Sequence[Stamp], core: Sequence[Stamp], frontend_memory: int, core_memory: int) -> str:
    """The line of the log. Without a core's stamps the core is in this process."""
    start, end = frontend[0], frontend[-1]
    text = f"engine ready {end.time_s - start.time_s:.2f} s after its process began"
    memory = f"peak memory {frontend_memory // MIB} MiB"
    if core:
        text += f", its core after {core[-1].time_s - core[0].time_s:.2f} s"
        memory += f", core {core_memory // MIB} MiB"
    return f"{text}; {memory}"

"""A recording on its way to a file: the core's loop only encodes, a thread writes."""

from __future__ import annotations

import os
import secrets
import threading
import time
from pathlib import Path

import msgspec

from quire.config.engine import EngineConfig
from quire.engine.files import open_new_file, write_all
from quire.engine.kv_cache_init import KVCacheSizes
from quire.engine.recording.format import AnyEvent, Header, encode_events, encode_header
from quire.engine.recording.recorder import Recorder, keyed_digest
from quire.logger import init_logger
from quire.version import __version__

logger = init_logger(__name__)

WRITE_INTERVAL_S = 0.25
"""What was recorded longer ago than this (and the time of a write) survives whatever ends the process."""
MAX_PENDING_BYTES = 1 << 26
"""A disk that is slower than the engine ends the recording, not the engine."""
END_S = 5.0


class RecordingWriter:
    """Appends events to a new file. `emit` belongs to one thread, and never waits for the disk.

    When a write fails, the recording ends there, and the log says so: serving goes on.
    """

    def __init__(self, path: Path, header: Header) -> None:
        """Raises ConfigError if the file exists or cannot be made."""
        self._fd = open_new_file(path, "--record")
        write_all(self._fd, encode_header(header))
        self._path = path
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._num_pending = 0
        self._is_over = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="RecordingWriter", daemon=True)
        self._thread.start()

    def emit(self, event: AnyEvent) -> None:
        """Take an event in; dropped after the end."""
        if self._is_over:
            return
        with self._lock:
            self._encoder.encode_into(event, self._pending, -1)
            self._num_pending += 1
        if len(self._pending) > MAX_PENDING_BYTES:
            self._give_up(f"{MAX_PENDING_BYTES} bytes wait to be written")

    def close(self) -> None:
        """Write what is left. May be called twice."""
        self._ends.set()
        self._thread.join(END_S)
        self._is_over = True

    def _write_all(self) -> None:
        try:
            while not self._ends.wait(WRITE_INTERVAL_S):
                self._write_pending()
            self._write_pending()
        except OSError as e:
            self._give_up(e.strerror or str(e))
        finally:
            os.close(self._fd)

    def _write_pending(self) -> None:
        with self._lock:
            count, events = self._num_pending, self._pending
            self._num_pending, self._pending = 0, bytearray()
        if count:
            write_all(self._fd, encode_events(count, events))

    def _give_up(self, why: str) -> None:
        if not self._is_over:
            logger.error("the recording %s ends here: %s", self._path, why)
        self._is_over = True
        with self._lock:
            self._num_pending, self._pending = 0, bytearray()
        self._ends.set()


class FileRecorder(Recorder):
    """Records an engine, as its configuration says."""

    def __init__(self, config: EngineConfig, sizes: KVCacheSizes) -> None:
        """Raises ConfigError if the file cannot be written."""
        clock = time.monotonic()
        observability = config.observability_config
        header = Header(
            quire=__version__,
            created_at=time.time(),
            clock=clock,
            model=config.model_config.name,
            scheduler=config.scheduler_config,
            kv_cache=sizes.config,
            max_model_len=sizes.max_model_len,
            enable_caching=config.cache_config.enable_prefix_caching,
            has_prompts=observability.record_prompts,
        )
        assert observability.record is not None
        self._writer = RecordingWriter(Path(observability.record), header)
        super().__init__(
            self._writer.emit,
            keyed_digest(secrets.token_bytes(32)),
            clock=clock,
            with_prompts=observability.record_prompts,
        )
        logger.info("recording to %s", observability.record)

    def close(self) -> None:
        self._writer.close()

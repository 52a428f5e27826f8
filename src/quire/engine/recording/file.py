"""A recording on its way to a file: the core's loop only encodes, a thread writes."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path

import msgspec

from quire.config.engine import EngineConfig
from quire.engine.files import BackgroundFile
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


class RecordingWriter:
    """Appends events to a new file. `emit` belongs to one thread, and never waits for the disk."""

    def __init__(self, path: Path, header: Header) -> None:
        """Raises ConfigError if the file exists or cannot be made."""
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._num_pending = 0
        self._file = BackgroundFile(path, "--record", WRITE_INTERVAL_S, self._take, head=encode_header(header))

    def emit(self, event: AnyEvent) -> None:
        """Take an event in; dropped after the end."""
        if self._file.is_over:
            return
        with self._lock:
            self._encoder.encode_into(event, self._pending, -1)
            self._num_pending += 1
        if len(self._pending) > MAX_PENDING_BYTES:
            self._file.give_up(f"{MAX_PENDING_BYTES} bytes wait to be written")

    def close(self) -> None:
        """Write what is left. May be called twice."""
        self._file.close()

    def _take(self) -> bytes:
        with self._lock:
            count, events = self._num_pending, self._pending
            self._num_pending, self._pending = 0, bytearray()
        return bytes(encode_events(count, events)) if count else b""


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

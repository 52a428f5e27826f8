"""Files that the engine core writes while it serves: new ones only, and never with a wait of its loop.

The loop encodes events; a thread writes them.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.config.engine import EngineConfig
from quire.engine.kv_cache.sizing import KVCacheSizes
from quire.engine.recording.format import (
    FORMAT,
    FORMAT_WITH_TRANSFERS,
    AnyEvent,
    Header,
    encode_events,
    encode_header,
)
from quire.engine.recording.recorder import Recorder, keyed_digest
from quire.errors import ConfigError
from quire.logger import init_logger
from quire.version import __version__

logger = init_logger(__name__)

END_S = 5.0
"""Seconds to wait for the end of a file."""


class BackgroundFile:
    """A new file that a thread fills at intervals with what `take` returns.

    When a write fails, or the owner gives up because the disk is too slow, the file ends there and the log says so:
    serving continues. Knows nothing of the contents.
    """

    def __init__(
        self, path: Path, flag: str, interval_s: float, take: Callable[[], bytes], *, head: bytes, tail: bytes = b""
    ) -> None:
        """Raises ConfigError, naming `flag`, if the file exists or cannot be made."""
        self._path = path
        self._flag = flag
        self._interval_s = interval_s
        self._take = take
        self._tail = tail
        self._fd = open_new_file(path, flag)
        self._ends = threading.Event()
        self.is_over = False
        """True after the end: further data is dropped."""
        write_all(self._fd, head)
        self._thread = threading.Thread(target=self._write_all, name="BackgroundFile", daemon=True)
        self._thread.start()

    def give_up(self, why: str) -> None:
        """Ends the file where it is. Callable from any thread."""
        if not self.is_over:
            logger.error("%s %s ends here: %s", self._flag, self._path, why)
        self.is_over = True
        self._ends.set()

    def close(self) -> None:
        """Writes the remaining data, and the end of the file. May be called twice."""
        self._ends.set()
        self._thread.join(END_S)
        self.is_over = True

    def _write_all(self) -> None:
        try:
            while not self._ends.wait(self._interval_s):
                write_all(self._fd, self._take())
            data = self._take()
            write_all(self._fd, self._tail if self.is_over else data + self._tail)
        except OSError as e:
            self.give_up(e.strerror or str(e))
        finally:
            os.close(self._fd)


def open_new_file(path: Path, flag: str) -> int:
    """Opens a new file that only its owner may read. Returns a descriptor to append to it.

    Raises ConfigError, naming `flag`, if the file exists or cannot be made.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{flag} {path}: the file exists; remove it, or choose another one") from None
    except OSError as e:
        raise ConfigError(f"{flag} {path}: {e.strerror or e}") from None


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Writes all of `data`. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


WRITE_INTERVAL_S = 0.25
"""Seconds between writes: events recorded longer ago than this (and the time of a write) survive the end of the
process."""
MAX_PENDING_BYTES = 1 << 26
"""Most bytes that wait to be written; a disk that is slower than the engine ends the recording, not the engine."""


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
        """Encodes an event; drops it after the end."""
        if self._file.is_over:
            return
        with self._lock:
            self._encoder.encode_into(event, self._pending, -1)
            self._num_pending += 1
        if len(self._pending) > MAX_PENDING_BYTES:
            self._file.give_up(f"{MAX_PENDING_BYTES} bytes wait to be written")

    def close(self) -> None:
        """Writes the remaining events. May be called twice."""
        self._file.close()

    def _take(self) -> bytes:
        with self._lock:
            count, events = self._num_pending, self._pending
            self._num_pending, self._pending = 0, bytearray()
        return bytes(encode_events(count, events)) if count else b""


class FileRecorder(Recorder):
    """Records an engine, as its configuration asks."""

    def __init__(self, config: EngineConfig, sizes: KVCacheSizes, max_concurrent_steps: int = 1) -> None:
        """Raises ConfigError if the file cannot be written."""
        clock = time.monotonic()
        observability = config.observability_config
        drafting = config.speculative_config.drafting
        transfer = config.kv_transfer_config
        has_transfers = transfer.connector is not None
        header = Header(
            format=FORMAT_WITH_TRANSFERS if has_transfers else FORMAT,
            quire=__version__,
            created_at=time.time(),
            clock=clock,
            model=config.model_config.name,
            scheduler=config.scheduler_config,
            kv_cache=sizes.config,
            max_model_len=sizes.max_model_len,
            enable_caching=config.cache_config.enable_prefix_caching,
            num_spec_tokens=0 if drafting is None else drafting.num_speculative_tokens,
            num_lookahead_tokens=0 if drafting is None else drafting.num_lookahead_tokens,
            max_concurrent_steps=max_concurrent_steps,
            has_prompts=observability.record_prompts,
            connector=(transfer.kv_connector or "") if has_transfers else "",
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

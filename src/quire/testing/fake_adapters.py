"""The adapters of `FakeExecutor`: loads that take time and fail, and a strict reading of what is in memory.

The digest of an adapter is that of `adapter_model.safetensors` in its directory, where there is one, and of its path
otherwise. It enters every token of its requests, so that one that is computed with another revision has wrong tokens.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path

from quire.errors import AdapterError
from quire.lora_request import LoRARequest
from quire.testing.fake_hardware import ProtocolError
from quire.wire.execution import NewRequestData
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad


def fake_digest(lora_request: LoRARequest) -> str:
    """Returns the digest that a load would find now. Raises AdapterError for a path that contains "missing"."""
    path = lora_request.lora_path
    if "missing" in path:
        raise AdapterError(f"{path}: there is no adapter_config.json")
    file = Path(path) / "adapter_model.safetensors"
    return sha256(file.read_bytes() if file.is_file() else path.encode()).hexdigest()


class FakeAdapters:
    """The adapters of one worker. A load takes `load_s` seconds on a thread; with 0 it is done at once.

    A load fails with the probability `failure_rate`, which follows from `seed` and the order of the loads.
    """

    def __init__(
        self,
        *,
        num_bytes: int = 1000,
        load_s: float = 0.0,
        failure_rate: float = 0.0,
        seed: int = 0,
        read: Callable[[LoRARequest], str] = fake_digest,
    ) -> None:
        self.loaded: dict[AdapterKey, str] = {}
        """Digests of the adapters in memory."""
        self.loading: dict[AdapterKey, AdapterLoad] = {}
        self.num_loads = 0
        self.read = read
        self._num_bytes, self._load_s, self._failure_rate = num_bytes, load_s, failure_rate
        self._rng = random.Random(seed)

    def size_of(self, lora_request: LoRARequest) -> int:
        """Returns the memory that an adapter takes."""
        return self._num_bytes

    def measure(self, lora_request: LoRARequest) -> Future[int]:
        """Returns a Future that has ended."""
        future: Future[int] = Future()
        try:
            self.read(lora_request)
        except AdapterError as e:
            future.set_exception(e)
        else:
            future.set_result(self.size_of(lora_request))
        return future

    def load(self, load: AdapterLoad) -> Future[AdapterInfo]:
        """Begins to load. Raises ProtocolError for a key that is loaded, or being loaded."""
        if load.key in self.loaded or load.key in self.loading:
            raise ProtocolError(f"adapter {load.key} is loaded twice")
        self.loading[load.key] = load
        self.num_loads += 1
        fails = self._rng.random() < self._failure_rate
        future: Future[AdapterInfo] = Future()
        if self._load_s:
            threading.Thread(target=self._sleep_and_end, args=(load, future, fails), daemon=True).start()
        else:
            self.end_load(load, future, fails)
        return future

    def _sleep_and_end(self, load: AdapterLoad, future: Future[AdapterInfo], fails: bool) -> None:
        time.sleep(self._load_s)
        self.end_load(load, future, fails)

    def end_load(self, load: AdapterLoad, future: Future[AdapterInfo], fails: bool) -> None:
        """Ends a load."""
        del self.loading[load.key]
        try:
            if fails:
                raise AdapterError(f"{load.lora_request.lora_path}: it cannot be read this time")
            digest = self.read(load.lora_request)
        except AdapterError as e:
            future.set_exception(e)
            return
        self.loaded[load.key] = digest
        size = self.size_of(load.lora_request)
        future.set_result(AdapterInfo(*load.key, digest=digest, num_bytes=size, rank=8))

    def drop(self, key: AdapterKey) -> None:
        """Drops a loaded adapter. Raises ProtocolError for one that is not."""
        if self.loaded.pop(key, None) is None:
            raise ProtocolError(f"adapter {key} is dropped and was not loaded")

    def digest_of(self, data: NewRequestData) -> str:
        """Returns the digest of a request's adapter; empty without one. Raises ProtocolError if it is not in memory."""
        if data.lora_request is None or not data.lora_revision:
            return ""  # a scheduler without a manager of adapters loads none
        key = data.lora_request.lora_int_id, data.lora_revision
        if key not in self.loaded:
            raise ProtocolError(f"request {data.req_id} runs with adapter {key}; loaded are {sorted(self.loaded)}")
        return self.loaded[key]

"""Streams of a server for a program without an event loop: one works on a thread, and its chunks are waited for here.

The waiting can be interrupted at any moment (Ctrl-C); what is under way is then hung up on, which aborts it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from quire.cli.command_line import Arguments
from quire.cli.remote.address import ServerAddress
from quire.cli.remote.client import HttpClient, ModelCard, given_api_key
from quire.cli.remote.events import Chunk

T = TypeVar("T")
CTRL_C_HEARD_S = 0.2
"""A signal that comes just before the interpreter begins to wait ends no wait: it is looked for so often."""


@dataclass(frozen=True)
class Arrival:
    """Something of stream `key` that came at `now` (time.perf_counter): a chunk, or with None its end or `error`."""

    key: int
    now: float
    chunk: Chunk | None
    error: Exception | None = None


class RemoteServer:
    """A server, asked from one thread. A context manager: what is left at its end is hung up on."""

    def __init__(self, address: ServerAddress, api_key: str | None = None) -> None:
        self.address = address
        self._client = HttpClient(address, api_key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-remote", daemon=True)
        self._thread.start()
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._num_streams = 0

    @staticmethod
    def of(args: Arguments) -> RemoteServer:
        """The one that --url and --api-key name. Raises ConfigError."""
        return RemoteServer(ServerAddress.parse(args["url"]), given_api_key(args["api_key"]))

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def find_model(self, name: str | None) -> ModelCard:
        """The model of that name, or the first that is served. Raises NotFoundError, RemoteError, RefusedError."""
        return self._ask(self._client.find_model(name))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """A question answered whole. Raises RemoteError, RefusedError."""
        return self._ask(self._client.post(path, body))

    def start(self, path: str, body: Mapping[str, Any]) -> int:
        """Begin a stream; its arrivals have the key that is returned."""
        self._num_streams += 1
        key = self._num_streams
        data = msgspec.json.encode(body)

        async def begin() -> None:
            self._streams[key] = asyncio.create_task(self._stream(key, path, data))

        self._ask(begin())
        return key

    def arrivals(self, *keys: int) -> Iterator[Arrival]:
        """What comes of these streams, until all have ended. What is late of others is dropped."""
        left = set(keys)
        while left:
            try:
                arrival = self._arrivals.get(timeout=CTRL_C_HEARD_S)
            except queue.Empty:
                continue
            if arrival.key in left:
                if arrival.chunk is None:
                    left.remove(arrival.key)
                yield arrival

    def stop(self, *keys: int) -> None:
        """Hang up on these streams, if they are under way."""

        async def cancel() -> None:
            tasks = [task for key in keys if (task := self._streams.get(key)) is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._ask(cancel())

    def close(self) -> None:
        """Hang up on everything and end the thread."""
        if self._thread.is_alive():
            self.stop(*list(self._streams))
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join()
            self._loop.close()

    def _end(self) -> None:
        self._client.close()
        self._loop.call_soon(self._loop.stop)

    def _ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def _stream(self, key: int, path: str, body: bytes) -> None:
        def on_chunk(chunk: Chunk) -> None:
            self._arrivals.put(Arrival(key, time.perf_counter(), chunk))

        error: Exception | None = None
        try:
            await self._client.stream(path, body, on_chunk)
        except Exception as e:  # whatever it is, who waits must hear of it
            error = e
        finally:
            del self._streams[key]
        self._arrivals.put(Arrival(key, time.perf_counter(), None, error))

"""The hardware of `FakeExecutor`: a KV cache whose slots hold digests, the time that steps take, and its adapters.

The digest of an adapter is that of `adapter_model.safetensors` in its directory, where there is one, and of its path
otherwise. It enters every token of its requests, so that one that is computed with another revision has wrong tokens.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from quire.errors import AdapterError
from quire.lora_request import LoRARequest
from quire.testing.fake_model import SLOT_BYTES
from quire.wire.execution import ModelRunnerOutput, NewRequestData
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad

NULL_BLOCK_ID = 0


class ProtocolError(AssertionError):
    """The engine asked for something that a real worker could only answer with wrong numbers."""


class KVMemory:
    """KV cache: one pool of blocks for all groups, as in the real cache. Tensor j is shared by the j-th layer of every
    group.

    A block counts the live tables that hold it. A block of more than one table is shared, hence read-only. Slots that
    were never written read as zeros; freed ones keep their content, as on a device.
    """

    def __init__(self, num_blocks: int, max_block_size: int) -> None:
        self.num_blocks = num_blocks
        self._bytes_per_block = max_block_size * SLOT_BYTES
        self._slots = bytearray(num_blocks * self._bytes_per_block)
        self._num_holders = [0] * num_blocks
        self._written: set[int] = set()
        """Blocks written since `take_written`."""
        self.has_lost_step = False
        """True after a step has failed, until the next one: tables may have blocks that the engine has freed."""
        self.in_flight: list[set[int]] = []
        """Blocks that each step without a result has written, and may still be writing."""

    def hold(self, block_ids: Iterable[int]) -> None:
        """Adds a table to the holders of these blocks; null blocks are not counted."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ProtocolError(f"block {block_id} does not exist: the pool has {self.num_blocks} blocks")
            if block_id != NULL_BLOCK_ID:
                self._num_holders[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Removes a table from the holders of these blocks."""
        for block_id in block_ids:
            if block_id != NULL_BLOCK_ID:
                self._num_holders[block_id] -= 1

    def read(self, table: BlockTable, start: int, end: int) -> bytes:
        """Returns the slots of tokens [start, end) through `table`."""
        if start == end:
            return b""
        first, stride, memory = start // table.block_size, self._bytes_per_block, self._slots
        size = table.block_size * SLOT_BYTES
        block_ids = table.block_ids[first : -(-end // table.block_size)]
        if NULL_BLOCK_ID in block_ids:
            raise ProtocolError(f"tokens [{start}, {end}) are read through the null block: table {table.block_ids}")
        slots = b"".join([memory[i * stride : i * stride + size] for i in block_ids])
        offset = first * table.block_size
        return slots[(start - offset) * SLOT_BYTES : (end - offset) * SLOT_BYTES]

    def write(self, table: BlockTable, start: int, slots: bytes) -> None:
        """Writes the slots of the tokens from `start` on through `table`."""
        size = table.block_size * SLOT_BYTES
        offset = start * SLOT_BYTES
        done = 0
        while done < len(slots):
            index, inside = divmod(offset + done, size)
            block_id = table.block_ids[index]
            self._check_writable(block_id, table)
            part = slots[done : done + size - inside]
            at = block_id * self._bytes_per_block + inside
            self._slots[at : at + len(part)] = part
            self._written.add(block_id)
            done += len(part)

    def forget_tables(self) -> None:
        """Forgets all tables: no request reads or writes here any more."""
        self._num_holders = [0] * self.num_blocks

    def take_written(self) -> set[int]:
        """Returns the blocks that were written through tables since the last call."""
        written, self._written = self._written, set()
        return written

    def read_block(self, block_id: int, rank: int = 0, num_ranks: int = 1) -> bytes:
        """Returns all slots of a block: of several workers one's part, which is each so-many-th byte."""
        end = (block_id + 1) * self._bytes_per_block
        return bytes(self._slots[block_id * self._bytes_per_block + rank : end : num_ranks])

    def load_block(self, block_id: int, slots: bytes, rank: int = 0, num_ranks: int = 1) -> None:
        """Writes all slots of a block that no live table holds, or a worker's part of them, as a transfer does. Raises
        ProtocolError for another one, and for one that a step in flight writes."""
        if block_id == NULL_BLOCK_ID or (self._num_holders[block_id] and not self.has_lost_step):
            raise ProtocolError(f"block {block_id} is loaded while {self._num_holders[block_id]} live tables hold it")
        if any(block_id in written for written in self.in_flight):
            raise ProtocolError(f"block {block_id} is loaded while a step in flight may write it")
        at = block_id * self._bytes_per_block + rank
        slots = slots[: len(range(rank, self._bytes_per_block, num_ranks))]
        self._slots[at : at + len(slots) * num_ranks - num_ranks + 1 : num_ranks] = slots

    def _check_writable(self, block_id: int, table: BlockTable) -> None:
        if block_id == NULL_BLOCK_ID:
            raise ProtocolError(f"the null block would be written: table {table.block_ids}")
        if self._num_holders[block_id] != 1:
            raise ProtocolError(
                f"block {block_id} would be written while {self._num_holders[block_id]} live tables hold it: "
                f"table {table.block_ids}"
            )


class BlockTable:
    """Blocks of one request in one group, in order of position; append-only, as the engine sends them."""

    def __init__(self, memory: KVMemory, block_size: int, window: int | None, block_ids: list[int]) -> None:
        self.block_size = block_size
        self.block_ids: list[int] = []
        self._memory = memory
        self._window = window
        self._num_released = 0
        """Number of leading blocks that have left the sliding window. The engine may give them to other requests."""
        self.append(block_ids)

    def append(self, block_ids: list[int]) -> None:
        """Appends blocks for more tokens."""
        self._memory.hold(block_ids)
        self.block_ids += block_ids

    def first_visible(self, position: int) -> int:
        """Returns the first token that attention at `position` can see."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def slide(self, position: int) -> None:
        """Releases blocks that no position from `position` on can see."""
        gone = self.first_visible(position) // self.block_size
        if gone > self._num_released:
            self._memory.release(self.block_ids[self._num_released : gone])
            self._num_released = gone

    def drop(self) -> None:
        """Releases all blocks: the request has finished or was preempted."""
        self._memory.release(self.block_ids[self._num_released :])


class Clock(Protocol):
    """Clock of the fake: the module `time`, or a `VirtualClock`."""

    def sleep(self, seconds: float, /) -> None:
        """Lets time pass."""


class VirtualClock:
    """Clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float, /) -> None:
        """Advances `now`."""
        self.now += seconds


class InFlight(Future[Any]):
    """Output of a step on a device that is always busy: never done until it is waited for. `finish` is called then,
    before the output is returned; it may raise."""

    def __init__(self, output: ModelRunnerOutput | None, finish: Callable[[InFlight], None] | None = None) -> None:
        super().__init__()
        self.output = output
        self._finish = finish

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the step and returns its output."""
        if not self.done():
            if self._finish is not None:
                self._finish(self)
            self.set_result(self.output)
        return super().result(timeout)


def as_future(run: Callable[[], InFlight]) -> Future[Any]:
    """Returns a done Future with the result of `run`, or with its error."""
    try:
        return run()
    except Exception as e:
        failed: Future[Any] = Future()
        failed.set_exception(e)
        return failed


def fake_digest(lora_request: LoRARequest) -> str:
    """Returns the digest that a load would find now. Raises AdapterError for a path that contains "missing"."""
    path = lora_request.lora_path
    if "missing" in path:
        raise AdapterError(f"{path}: there is no adapter_config.json")
    file = Path(path) / "adapter_model.safetensors"
    return sha256(file.read_bytes() if file.is_file() else path.encode()).hexdigest()


def fake_invocation(lora_request: LoRARequest) -> list[int]:
    """Returns the tokens at which an adapter begins: those in a path that ends with "alora=5,6"; none in another."""
    return [int(token) for token in lora_request.lora_path.partition("alora=")[2].split(",") if token]


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
        invocation = fake_invocation(load.lora_request)
        future.set_result(AdapterInfo(*load.key, digest, size, 8, invocation))

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

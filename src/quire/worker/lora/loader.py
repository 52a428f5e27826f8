"""Reads and packs adapters on a thread of its own, without stopping a step.

Files are read with `pread`, never through a memory map: a user's file that shrinks under a map would end the process.
While steps run the thread works a fifth of the time, in slices of about a millisecond; without steps it never rests.
What takes longer than a few microseconds (reads, digests, casts, packing) does not hold the interpreter's lock.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from quire.config.adapter import TENSORS_FILE, AdapterFiles, AdapterIndex, Factors, open_adapter
from quire.config.adapter_targets import AdapterTarget, AllExperts
from quire.config.checkpoint import TensorInfo
from quire.config.lora import LoRAConfig
from quire.errors import AdapterError, GenerationError, QuireError
from quire.failpoints import failpoint
from quire.logger import init_logger
from quire.lora_request import LoRARequest
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.lora import LowRank, PackedLowRank
from quire.worker.kernels.native_lora import LINE, take_lines
from quire.worker.kernels.packs import take_memory
from quire.worker.lora.exchange import Block, FactorsExchange
from quire.worker.lora.packed import AdapterCache, Head, PackedAdapter
from quire.worker.lora.sites import AdapterSites, Site
from quire.worker.packed_cache import PackedCache

logger = init_logger(__name__)

READ_BYTES = 1 << 20
RAW_BYTES = 4 << 20
"""Size of the block for what was read and is not packed yet: memory that is used again is quicker than new one."""
CAST_ITEMS = 1 << 15
"""Numbers that torch converts at once: more would be shared among threads that the steps need."""
SLICE_S = 0.0005
"""Work after which the thread rests, if steps run."""
SHARE = 0.2
"""Largest share of the time that it works while steps run."""
STEP_GAP_S = 0.1
"""Steps run if the last one began no longer ago."""
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Pace:
    """Spreads the work of a thread over time."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._last_step = -STEP_GAP_S
        self._worked = 0.0

    def note_step(self) -> None:
        """Notes that a step begins."""
        self._last_step = self._clock()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Measures the work of the block, and rests after it if it is time to."""
        start = time.thread_time()
        yield
        self._worked += time.thread_time() - start
        if self._worked >= SLICE_S:
            worked, self._worked = self._worked, 0.0
            if self.is_shared:
                self._sleep(worked * (1 / SHARE - 1))

    @property
    def is_shared(self) -> bool:
        """True while steps run."""
        return self._clock() - self._last_step < STEP_GAP_S


class Digest:
    """SHA-256 of what was read. Without steps another thread computes it, while the first goes on."""

    def __init__(self, pace: Pace, threads: Executor) -> None:
        """`threads`: one, which does one piece after the other."""
        self._pace, self._threads = pace, threads
        self._hash = hashlib.sha256()
        self._last: Future[None] | None = None
        self._pieces: list[bytes | memoryview] = []
        self._num_bytes = 0
        """Size of `_pieces`, which are passed on together: to wake a thread takes as long as to read a small one."""

    def update(self, piece: bytes | memoryview) -> None:
        """Adds a piece, which must not change until `wait`."""
        if self._pace.is_shared:
            self.wait()
            with self._pace.work():
                self._hash.update(piece)
            return
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes >= READ_BYTES:
            self._pass_on()

    def _pass_on(self) -> None:
        pieces, self._pieces, self._num_bytes = self._pieces, [], 0
        self._last = self._threads.submit(self._add, pieces)

    def _add(self, pieces: list[bytes | memoryview]) -> None:
        for piece in pieces:
            self._hash.update(piece)

    def wait(self) -> None:
        """Waits until all pieces are in the digest."""
        if self._pieces:
            self._pass_on()
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def hexdigest(self) -> str:
        """Returns the digest of all pieces."""
        self.wait()
        return self._hash.hexdigest()


@dataclass(frozen=True)
class LoadedAdapter:
    """The packed weights of one revision."""

    key: AdapterKey
    name: str
    info: AdapterInfo
    packed: Mapping[str, PackedLowRank]
    """Weights by site."""
    head: Head | None = None
    """Weight and bias of its classifier."""
    block: Block | None = None
    """Memory that other engines read, if it changes experts which they share."""


@dataclass(eq=False)
class _Job:
    """A load that is not done."""

    load: AdapterLoad
    is_cancelled: bool = False


T = TypeVar("T")


class AdapterLoader:
    """Owns the thread; may be called on any. `deliver` is called on it with each loaded adapter, before its Future is
    done.

    Futures raise AdapterError, NotFoundError for no directory, or GenerationError for a fault of ours.
    """

    def __init__(
        self,
        kernels: Kernels,
        sites: AdapterSites,
        limits: LoRAConfig,
        dtype: torch.dtype,
        device: torch.device,
        deliver: Callable[[LoadedAdapter], None],
        base_model: str = "",
        cache: PackedCache | None = None,
        exchange: FactorsExchange | None = None,
    ) -> None:
        """`cache`: the directory of packed adapters; `exchange`: other engines share the experts."""
        self.pace = Pace()
        self.exchange = exchange
        self._writing = Pace()
        self.hashing = ThreadPoolExecutor(1, "quire-adapter-digests")
        self.cache: AdapterCache | None = None
        if cache is not None and kernels.pack_format is not None:
            self.cache = AdapterCache(cache, sites, limits, kernels.pack_format, self._writing.work)
        self._kernels, self._sites, self._limits, self._dtype = kernels, sites, limits, dtype
        self._device, self._deliver = device, deliver
        self._base_model = base_model
        self._jobs: set[_Job] = set()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def note_step(self) -> None:
        """Notes that a step begins."""
        self.pace.note_step()
        self._writing.note_step()

    def load(self, load: AdapterLoad) -> Future[AdapterInfo]:
        """Begins to load an adapter, and returns at once."""
        job = _Job(load)
        self._jobs.add(job)
        return self._submit(load.lora_request, lambda: self._load(job))

    def measure(self, request: LoRARequest) -> Future[int]:
        """Begins to compute the memory that an adapter will take, of which it reads no tensor."""
        return self._submit(request, lambda: self._measure(request))

    def cancel_all(self) -> None:
        """Ends all loads with an error."""
        for job in list(self._jobs):
            job.is_cancelled = True

    def free(self, adapter: LoadedAdapter) -> None:
        """Frees an adapter on the thread: giving much memory back to the system takes time."""
        self._queue.put(functools.partial(_let_go, [adapter]))

    def shutdown(self) -> None:
        """Ends the thread."""
        self.cancel_all()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
        self.hashing.shutdown()
        if self.cache is not None:
            self.cache.close()

    def _submit(self, request: LoRARequest, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put(lambda: _complete(future, request, work))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-adapters", daemon=True)
                self._thread.start()
        return future

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _load(self, job: _Job) -> AdapterInfo:
        try:
            with torch.inference_mode():
                adapter = _Reading(self, job).run()
        finally:
            self._jobs.discard(job)
        self._deliver(adapter)
        return adapter.info

    def _measure(self, request: LoRARequest) -> int:
        with self.pace.work(), open_adapter(directory_of(request)) as files:
            known = None if self.cache is None else self.cache.num_bytes(files)
            if known is not None:
                return known
            index = AdapterIndex.of(files, self._limits, self._sites.targets)
        return index.estimated_bytes(self._dtype.itemsize)


def directory_of(request: LoRARequest) -> Path:
    """Returns the directory of an adapter. Raises AdapterError."""
    try:
        return Path(request.lora_path).expanduser()
    except RuntimeError as e:  # ~ of a user who does not exist
        raise AdapterError(f"lora_path {request.lora_path!r}: {e}") from None


def _complete(future: Future[T], request: LoRARequest, work: Callable[[], T]) -> None:
    """Does `work` and puts its result, or its error, into `future`."""
    try:
        result = work()
    except QuireError as e:
        future.set_exception(e)
    except Exception as e:
        logger.exception("adapter %r of %s cannot be loaded", request.lora_name, request.lora_path)
        future.set_exception(
            GenerationError(f"adapter {request.lora_name!r} cannot be loaded: {type(e).__name__}: {e}")
        )
    else:
        future.set_result(result)


def _let_go(adapters: list[LoadedAdapter]) -> None:
    adapters.clear()


class _Reading:
    """One adapter on its way into memory: a site is packed once all its factors are read."""

    def __init__(self, loader: AdapterLoader, job: _Job) -> None:
        self._loader, self._job = loader, job
        self._pace = loader.pace
        self._digest = Digest(loader.pace, loader.hashing)
        self._is_copied = not loader._kernels.keeps_weights
        """True if packing copies what was read."""
        self._raw = Arena(torch.empty(RAW_BYTES if self._is_copied else 0, dtype=torch.uint8))
        """Memory for what was read."""
        self._name = job.load.lora_request.lora_name
        self._block: Block | None = None
        """Memory for the packed factors that other engines can read."""

    def run(self) -> LoadedAdapter:
        loader, load = self._loader, self._job.load
        failpoint("lora.read", self._name)
        adapter = None if loader.cache is None or load.digest is None else loader.cache.open(load.digest)
        directory = directory_of(load.lora_request)
        if adapter is None:
            with open_adapter(directory) as files:
                adapter = self._find(files) or self._read(files)
        packed = adapter.packed
        if loader.exchange is not None:
            packed, self._block = loader.exchange.publish(packed, self._block, self._pace.work)
        for note in adapter.notes:
            logger.warning("adapter %r: %s", self._name, note)
        if load.digest not in (None, adapter.digest):
            raise AdapterError(
                f"the files of adapter {self._name!r} in {directory} were changed since it was loaded: their digest is "
                f"{adapter.digest[:16]}…, not {str(load.digest)[:16]}…; requests that began with the former ones "
                "cannot go on"
            )
        request = load.lora_request
        info = AdapterInfo(
            request.lora_int_id,
            load.revision,
            adapter.digest,
            adapter.num_bytes,
            adapter.rank,
            list(adapter.invocation),
        )
        return LoadedAdapter(load.key, self._name, info, packed, adapter.head, self._block)

    def _find(self, files: AdapterFiles) -> PackedAdapter | None:
        """Returns what these files were packed to earlier."""
        cache = self._loader.cache
        with self._pace.work():
            digest = None if cache is None else cache.digest_of(files)
        return None if cache is None or digest is None else cache.open(digest)

    def _read(self, files: AdapterFiles) -> PackedAdapter:
        """Reads and packs the files."""
        loader = self._loader
        with self._pace.work():
            key = None if loader.cache is None else loader.cache.key_of(files)
            index = AdapterIndex.of(files, loader._limits, loader._sites.targets)
        self._digest.update(files.config)
        self._hash_header(files, index)
        num_bytes = index.estimated_bytes(loader._dtype.itemsize) if self._is_copied else 0
        self._packs = Arena(self._take(loader.exchange, num_bytes))
        packed, head = self._pack_all(files, index), self._read_head(files, index)
        files.check_unchanged()
        notes, invocation = tuple(self._notes(index)), index.config.invocation
        adapter = PackedAdapter(self._digest.hexdigest(), index.rank, notes, packed, head, invocation)
        if loader.cache is not None and key is not None:
            loader.cache.store(adapter, files, key)
        return adapter

    def _take(self, exchange: FactorsExchange | None, num_bytes: int) -> Tensor:
        """Returns memory for packed factors."""
        if exchange is None:
            return take_memory(num_bytes)
        self._block = exchange.take(num_bytes)
        return self._block.memory[exchange.index_bytes :]

    def _hash_header(self, files: AdapterFiles, index: AdapterIndex) -> None:
        header = bytearray(index.data_start)
        self._fill(files, memoryview(header), 0)

    def _pack_all(self, files: AdapterFiles, index: AdapterIndex) -> dict[str, PackedLowRank]:
        """Returns the packed factors by site. Those of matrices that other workers have are only read."""
        sites, waiting = self._loader._sites.sites, defaultdict[str, dict[int, LowRank]](dict)
        missing: dict[str, int] = defaultdict(int)
        packed: dict[str, PackedLowRank] = {}
        targets = [factors.target for factors in index.factors if factors.target is not None]
        for target in targets:
            missing[target.site] += 1
        for factors, target in zip(index.factors, targets, strict=True):
            a, b = self._tensor(files, index, factors.a), self._tensor(files, index, factors.b)
            bias = None if factors.bias is None else self._tensor(files, index, factors.bias)
            site = sites.get(target.site)
            missing[target.site] -= 1
            if site is not None:
                with self._pace.work():
                    waiting[target.site].update(
                        self._own_parts(site, target, factors, LowRank(a, b, factors.scale, bias))
                    )
                if not missing[target.site] and (parts := waiting.pop(target.site)):
                    failpoint("lora.pack", self._name)
                    count = site.shape.num_parts if target.experts is None else site.shape.groups
                    with self._pace.work():
                        whole = [parts.get(i) for i in range(count)]
                        packed[target.site] = site.pack(self._loader._kernels, whole, self._packs.take)
            if not waiting and self._raw.is_half_full:
                self._digest.wait()
                self._raw.reset()
        return packed

    def _own_parts(self, site: Site, target: AdapterTarget, factors: Factors, whole: LowRank) -> dict[int, LowRank]:
        """Returns the parts of a site, or its groups, that factors change, with the rows that this worker has."""
        if target.experts is None:
            if not site.has_part(target.part):
                return {}
            found = {target.part: self._in_order(whole, site.order_of(target.part))}
        else:
            groups = range(target.experts.count) if site.own_groups is None else site.own_groups
            found = {
                i: _with_rows(own, site.group_order)
                for i, own in _split_experts(factors, target.experts, whole.a, whole.b).items()
                if i in groups
            }
        return {i: own for i, own in found.items() if len(own.b)}

    def _read_head(self, files: AdapterFiles, index: AdapterIndex) -> Head | None:
        if index.head is None:
            return None
        device = self._loader._device
        weight = self._tensor(files, index, index.head.weight).clone().to(device)
        bias = index.head.bias
        return weight, None if bias is None else self._tensor(files, index, bias).clone().to(device)

    def _in_order(self, factors: LowRank, order: Tensor | None) -> LowRank:
        """Returns factors on the model's device, with a row for each output in its order."""
        own, device = _with_rows(factors, order), self._loader._device
        return LowRank(own.a.to(device), own.b.to(device), own.scale, None if own.bias is None else own.bias.to(device))

    def _tensor(self, files: AdapterFiles, index: AdapterIndex, info: TensorInfo) -> Tensor:
        """Returns a tensor of the file in the type of the adapters. Raises AdapterError for NaN and infinity."""
        raw = self._raw.take(info.nbytes)
        self._fill(files, memoryview(raw.numpy().data), index.data_start + info.offset)
        source = raw.view(_TYPES[info.dtype])
        dtype = self._loader._dtype
        result = source if source.dtype == dtype else torch.empty(source.shape, dtype=dtype)
        for start in range(0, len(source), CAST_ITEMS):
            piece, place = source[start : start + CAST_ITEMS], result[start : start + CAST_ITEMS]
            with self._pace.work():
                if result is not source:
                    place.copy_(piece)
                # a sum is not finite if a number is not; where it overflows, the numbers are looked at themselves
                if not math.isfinite(place.sum().item()) and not place.isfinite().all():
                    name = str(dtype).removeprefix("torch.")
                    raise AdapterError(f"{info.file}: tensor {info.name} holds NaN or infinity as {name}")
        return result.view(info.shape)

    def _fill(self, files: AdapterFiles, place: memoryview, position: int) -> None:
        """Reads the bytes of the file from `position` on into `place`, and adds them to the digest."""
        done = 0
        while done < len(place):
            if self._job.is_cancelled:
                raise AdapterError(f"adapter {self._name!r} was removed while it was loaded")
            with self._pace.work():
                piece = place[done : done + READ_BYTES]
                count = os.preadv(files.tensors.fileno(), [piece], position + done)
            if count == 0:
                path = files.directory / TENSORS_FILE
                raise AdapterError(f"{path} was shortened while it was read; load the adapter again")
            self._digest.update(piece[:count])
            done += count

    def _notes(self, index: AdapterIndex) -> Iterator[str]:
        yield from index.notes
        ours, theirs = self._loader._base_model, index.config.base_model
        if ours and theirs and Path(ours).name != Path(theirs).name:
            yield f"it was trained on {theirs}, the model is {ours}"


class Arena:
    """Hands out pieces of one block of memory; what does not fit comes from the allocator."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._used = memory, 0

    def take(self, num_bytes: int) -> Tensor:
        """Returns [num_bytes] uint8 at a multiple of 64."""
        start = self._used + -(self._memory.data_ptr() + self._used) % LINE
        if start + num_bytes > len(self._memory):
            return take_lines(num_bytes)
        self._used = start + num_bytes
        return self._memory[start : self._used]

    @property
    def is_half_full(self) -> bool:
        return 2 * self._used > len(self._memory)

    def reset(self) -> None:
        """Hands out the block from its beginning again: nothing uses its pieces any more."""
        self._used = 0


def _split_experts(factors: Factors, experts: AllExperts, a: Tensor, b: Tensor) -> dict[int, LowRank]:
    """Returns the factors of each expert: see config/adapter.py. A factor of all experts is used for each."""
    rank, count = factors.rank, experts.count
    first = a.view(-1, rank, a.shape[1]).expand(count, -1, -1)
    second = b.view(b.shape[0], rank, -1).expand(-1, -1, count).permute(2, 0, 1)
    if factors.is_flipped:
        first, second = second.mT, first.mT
    if experts.gates_alternate and factors.target is not None and factors.target.site == experts.gate_up_site:
        second = torch.cat([second[:, ::2], second[:, 1::2]], dim=1)
    return {i: LowRank(first[i].contiguous(), second[i].contiguous(), factors.scale) for i in range(count)}


def _with_rows(factors: LowRank, order: Tensor | None) -> LowRank:
    """Returns factors with these rows of B and of the bias; None: all."""
    if order is None:
        return factors
    bias = None if factors.bias is None else _take_rows(factors.bias, order)
    return LowRank(factors.a, _take_rows(factors.b, order), factors.scale, bias)


def _take_rows(stored: Tensor, order: Tensor) -> Tensor:
    """Returns the rows in another order. numpy, because torch would use the threads of the steps."""
    bits = stored.view(torch.int16 if stored.element_size() == 2 else torch.int32).numpy()
    return torch.from_numpy(bits[order.numpy()]).view(stored.dtype)

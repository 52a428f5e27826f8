"""The adapters in a worker's memory: each has a slot at every site, and a step's rows name slots."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from quire.config.lora import LoRAConfig
from quire.failpoints import failpoint
from quire.lora_request import LoRARequest
from quire.wire.execution import NewRequestData
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad
from quire.worker.input_batch import NO_ADAPTER, StepInputs
from quire.worker.kernels.base import LinearKernel
from quire.worker.kernels.lora import AdapterBatch
from quire.worker.loader import Placement
from quire.worker.lora.exchange import FactorsExchange, FactorsMemory
from quire.worker.lora.loader import AdapterLoader, LoadedAdapter
from quire.worker.lora.sites import make_sites
from quire.worker.packed_cache import PackedCache

Numbers = npt.NDArray[np.int64]


class AdapterTable:
    """Owns the loaded adapters. Adapters arrive on the loader's thread. They are installed on the worker's, when a
    request of a step names them first, and removed when a step begins.

    So all workers of an engine have an adapter in the same slot, whatever the order in which they have read their
    parts: slots decide the order of a step's rows.

    Nothing here evicts: an adapter stays until `drop`, and no request of a step may name one that is not loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        limits: LoRAConfig,
        *,
        pools: bool,
        base_model: str,
        cache: PackedCache | None = None,
        shared: FactorsMemory | None = None,
    ) -> None:
        """`pools`: the model has a head for pooling; `base_model`: its name, for messages; `cache`: the directory of
        packed adapters; `shared`: memory that the engines read which share the experts."""
        kernels, dtype = placement.kernels, placement.dtype
        stage = None if placement.sharding is None else placement.sharding.stage
        self._sites = make_sites(model, kernels, dtype, pools=pools, stage=stage, shares=shared is not None)
        self._lock = threading.Lock()
        """Guards the next two."""
        self._arrived: dict[AdapterKey, LoadedAdapter] = {}
        """Loaded, not installed: no request has named them."""
        self._dropped: list[AdapterKey] = []
        self._new_slots, self._slots = count(), list[int]()
        self.exchange: FactorsExchange | None = None
        """Adapters of the experts that other engines share; None: there are none."""
        if shared is not None and self._sites.shared:
            self.exchange = FactorsExchange(shared, self._sites, self._take_slot, self._free_slot)
        self._loader = AdapterLoader(
            kernels, self._sites, limits, dtype, placement.device, self._deliver, base_model, cache, self.exchange
        )
        self._installed: dict[AdapterKey, tuple[int, LoadedAdapter]] = {}
        """Slots and adapters."""
        self._heads: dict[int, LinearKernel] = {}
        """Classifiers of adapters, by slot."""
        self._kernels = kernels

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, load: AdapterLoad) -> Future[AdapterInfo]:
        """Begins to read an adapter, and returns at once. May be called on any thread. See `AdapterLoader`."""
        return self._loader.load(load)

    def measure(self, request: LoRARequest) -> Future[int]:
        """Begins to compute the bytes that an adapter will take, and returns at once. May be called on any thread."""
        return self._loader.measure(request)

    def drop(self, key: AdapterKey) -> None:
        """Removes a loaded adapter, which no request uses any more, before the next step. May be called on any
        thread."""
        with self._lock:
            adapter = self._arrived.pop(key, None)
            self._dropped.append(key)
        if adapter is not None:
            self._loader.free(adapter)

    def drop_all(self) -> None:
        """Removes all adapters and ends all loads."""
        self._loader.cancel_all()
        with self._lock:
            arrived, self._arrived = self._arrived, {}
        for adapter in arrived.values():
            self._loader.free(adapter)
        self._remove_dropped()
        for key in list(self._installed):
            self._remove(key)

    def shutdown(self) -> None:
        """Ends the loader's thread."""
        self._loader.shutdown()

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Removes what was dropped."""
        self._loader.note_step()
        if self._dropped:
            self._remove_dropped()

    def slot_of(self, request: NewRequestData) -> int:
        """Returns the slot of a request's adapter."""
        if request.lora_request is None:
            return NO_ADAPTER
        key = request.lora_request.lora_int_id, request.lora_revision
        if key in self._arrived:
            self._install(key)
        assert key in self._installed, f"request {request.req_id} has adapter {key}, which is not loaded"
        return self._installed[key][0]

    @contextmanager
    def applied(self, inputs: StepInputs) -> Iterator[None]:
        """Applies the adapters of a step's requests to its rows, inside the block only: a drafter, which runs after
        the step, shares layers with the model."""
        slots = inputs.adapter_slots
        assert slots is not None
        try:
            slots_of_tokens, lens = _split(slots, inputs.query_lens, inputs.base_lens)
            _set(self._sites.tokens, slots_of_tokens, lens)
            if self.exchange is not None:
                self.exchange.set_own(slots_of_tokens, lens)
            _set(self._sites.logits, slots[inputs.sampling], inputs.logits_lens)
            yield
        finally:
            self._sites.tokens.clear()
            self._sites.logits.clear()
            if self.exchange is not None:
                self.exchange.clear_own()

    def apply_to_logits(self, slot: int, num_rows: int, num_base: int) -> None:
        """Applies one adapter to the rows of the next call of the logits head but the first `num_base`. Inside
        `applied`."""
        slots, lens = _split(np.array([slot]), np.array([num_rows]), np.array([num_base]))
        _set(self._sites.logits, slots, lens)

    def classify(self, slot: int, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Returns a classifier's scores for rows of one adapter, which may have a classifier of its own."""
        kernel = self._heads.get(slot)
        if kernel is None or self._sites.head is None:
            return function(hidden)
        with self._sites.head.replaced(kernel):
            return function(hidden)

    def _deliver(self, adapter: LoadedAdapter) -> None:
        with self._lock:
            self._arrived[adapter.key] = adapter

    def _remove_dropped(self) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, []
        for key in dropped:
            self._remove(key)

    def _install(self, key: AdapterKey) -> None:
        """Puts an adapter that has arrived into a slot, in the place of one with the same key."""
        with self._lock:
            adapter = self._arrived.pop(key)
        self._remove(key)
        failpoint("lora.install", adapter.name)
        slot = self._take_slot()
        for name, site in self._sites.sites.items():  # all: a site has a place for every slot in use
            site.kernel.install(slot, adapter.packed.get(name))
        if adapter.head is not None:
            assert self._sites.head is not None
            self._heads[slot] = self._kernels.linear(*adapter.head, self._sites.head.spec)
        if self.exchange is not None:
            self.exchange.install(slot, adapter.block)
        self._installed[key] = slot, adapter

    def _take_slot(self) -> int:
        return heapq.heappop(self._slots) if self._slots else next(self._new_slots)

    def _free_slot(self, slot: int) -> None:
        heapq.heappush(self._slots, slot)

    def _remove(self, key: AdapterKey) -> None:
        if key not in self._installed:
            return
        slot, adapter = self._installed.pop(key)
        failpoint("lora.remove", adapter.name)
        for name in adapter.packed:
            self._sites.sites[name].kernel.install(slot, None)
        self._heads.pop(slot, None)
        if self.exchange is not None:
            self.exchange.remove(slot)
        self._free_slot(slot)
        self._loader.free(adapter)


def _split(slots: Numbers, lens: Numbers, base_lens: Numbers | None) -> tuple[Numbers, Numbers]:
    """Returns slots and numbers of rows, with those rows apart that come before their request's adapter begins."""
    if base_lens is None:
        return slots, lens
    both = np.stack([np.full_like(slots, NO_ADAPTER), slots], axis=1).ravel()
    both_lens = np.stack([base_lens, lens - base_lens], axis=1).ravel()
    return both[both_lens > 0], both_lens[both_lens > 0]


def _set(batch: AdapterBatch, slots: Numbers, lens: Numbers) -> None:
    """Gives `batch` the rows of requests: `lens` rows of the adapter in `slots`, in this order."""
    if not len(slots):
        batch.clear()
        return
    begins = np.flatnonzero(np.diff(slots, prepend=slots[0] - 1))  # requests that have another slot than the one before
    ends = np.cumsum(lens)
    starts = (ends - lens)[begins].tolist()
    batch.set([*starts, int(ends[-1])], slots[begins].tolist())

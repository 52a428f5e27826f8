"""The worker half of connectors that are written for vLLM's interface (`kv_store/connector.py`).

In each step, those without tokens included: handle_preemptions, bind_connector_metadata, start_load_kv, for synchronous
loads wait_for_layer_load of each layer; the forward pass; save_kv_layer of each layer, if there were tokens;
wait_for_save, get_finished, get_block_ids_with_load_errors, build_connector_worker_meta, clear_connector_metadata.

Keys and values are in the cache when the forward pass is done, so layers are saved then, and not as each is computed:
native kernels compute several layers in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.kv_store.connector import HANDSHAKE, KVConnectorBase_V1, KVConnectorRole, LoadContext, ask, make_connector
from quire.logger import init_logger
from quire.wire.kv_cache import KVCacheConfig, KVCacheGroupSpec
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput, LoadOrder, LoadResult, SaveResult
from quire.worker.attention.backend import KVCache
from quire.worker.kv_cache import KVCacheMemory
from quire.worker.kv_transfer.worker import Arrivals, KVConnectorWorker

logger = init_logger(__name__)

FAILED = "connector"
"""Reason of loads that have failed."""
LAYOUT = "NHD"
"""The layout of the torch attention backend: tokens, heads, elements."""


@dataclass
class _Step:
    """The step that is being made."""

    params: dict[str, Any]
    loads: list[LoadOrder] = field(default_factory=list)
    """Synchronous loads, which end with it."""
    has_failed: bool = False
    """True if the connector has raised an error in a load."""


class CompatWorker(KVConnectorWorker):
    """Calls the worker's half of a connector in vLLM's order. All on the worker's thread."""

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        super().__init__(config, rank)
        self.foreign: KVConnectorBase_V1 | None = None
        self._layers: dict[str, Any] = {}
        self._handshake: Any = None
        """Metadata that the scheduler half does not have yet."""
        self._step: _Step | None = None
        self._loads: dict[int, LoadOrder] = {}
        """Loads that have not ended, by id."""
        self._async_ids: dict[str, list[int]] = {}
        """Ids of asynchronous loads by request, oldest first."""
        self._arrivals = Arrivals()

    def register_kv_caches(self, memory: Any) -> None:
        self._layers, kv_cache_config = self.describe_memory(memory)
        is_first = self.foreign is None
        if self.foreign is None:
            self.foreign = make_connector(self.config, KVConnectorRole.WORKER, kv_cache_config)
            self._check_layout(self.foreign, memory)
        self.foreign.register_kv_caches(self._layers)
        if is_first:
            self._handshake = ask(self.foreign, None, self.foreign.get_handshake_metadata)

    def describe_memory(self, memory: KVCacheMemory) -> tuple[dict[str, Any], KVCacheConfig]:
        """Returns the tensors of all layers, and what the connector's constructor is given."""
        layers = {name: join_parts(memory.caches[name]) for name in memory.layer_groups}
        groups = [
            KVCacheGroupSpec([name for name, group in memory.layer_groups.items() if group == index], spec)
            for index, spec in enumerate(memory.specs)
        ]
        num_blocks = next(iter(layers.values())).shape[1] if layers else 1
        return layers, KVCacheConfig(num_blocks, [], groups)

    def _check_layout(self, foreign: KVConnectorBase_V1, memory: Any) -> None:
        ask = getattr(type(foreign), "get_required_kvcache_layout", None)
        layout = None if ask is None else ask(foreign._vllm_config)
        name = type(foreign).__name__
        if layout not in (None, LAYOUT):
            raise ConfigError(f"kv_connector {name} asks for blocks in the layout {layout}; there is {LAYOUT} only")
        if layout == LAYOUT and memory.backend.name != "torch":
            raise ConfigError(
                f"kv_connector {name} asks for blocks in the layout {LAYOUT}, and those of the {memory.backend.name} "
                "attention backend have another; set QUIRE_CPU_KERNELS=torch"
            )

    # -- a step ------------------------------------------------------------------------------------------------

    def start(self, orders: KVConnectorMetadata) -> None:
        if self._handshake is not None:  # there was nothing to report to before
            handshake, self._handshake = self._handshake, None
            self.report(KVConnectorOutput(info={HANDSHAKE: handshake}))
        for transfer_id in orders.cancels:  # a connector has no way to end a load early
            if not self._arrivals.has(transfer_id):
                load, save = LoadResult(transfer_id, 0, "unknown"), SaveResult(transfer_id, 0, "unknown")
                self.report(KVConnectorOutput(loads=[load], saves=[save]))
        if orders.params is None:
            return
        if self._step is not None:  # its forward pass has failed
            self._end(self._step, has_computed=False)
        step = self._step = _Step(orders.params)
        for order in orders.loads:
            self._arrivals.add(order.load_id)
            self._loads[order.load_id] = order
            request_id, is_async = orders.params["loads"][order.load_id]
            if is_async:
                self._async_ids.setdefault(request_id, []).append(order.load_id)
            else:
                step.loads.append(order)
        self._begin(step)

    def _begin(self, step: _Step) -> None:
        foreign = self.foreign
        assert foreign is not None, "there is a cache before the first step"
        meta = step.params["meta"]
        ask(self.foreign, None, foreign.handle_preemptions, meta)
        ask(self.foreign, None, foreign.bind_connector_metadata, meta)
        try:
            foreign.start_load_kv(LoadContext(self._layers))
            for name in self._layers if step.loads else ():
                foreign.wait_for_layer_load(name)
        except Exception:
            logger.exception("%s cannot load", type(foreign).__name__)
            step.has_failed = True

    def end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._end(step, has_computed=step.params["num_tokens"] > 0)

    def _end(self, step: _Step, *, has_computed: bool) -> None:
        foreign = self.foreign
        assert foreign is not None
        for name, layer in self._layers.items() if has_computed else ():
            ask(self.foreign, None, foreign.save_kv_layer, name, layer, None)
        ask(self.foreign, None, foreign.wait_for_save)
        sent, received = ask(self.foreign, (None, None), foreign.get_finished, step.params["finished"])
        invalid = ask(self.foreign, set(), foreign.get_block_ids_with_load_errors)
        meta = ask(self.foreign, None, foreign.build_connector_worker_meta)
        ask(self.foreign, None, foreign.clear_connector_metadata)
        ended = [self._end_load(order, invalid, step.has_failed) for order in step.loads]
        for request_id in received or ():
            ids = self._async_ids.get(request_id)
            if ids:
                ended.append(self._end_load(self._loads[ids.pop(0)], invalid, has_failed=False))
                if not ids:
                    del self._async_ids[request_id]
        if ended or sent or received or meta is not None:
            info = {
                "finished_sending": sent,
                "finished_recving": received,
                "invalid_block_ids": invalid,
                "kv_connector_worker_meta": meta,
            }
            self.report(KVConnectorOutput(loads=ended, info=info))

    def _end_load(self, order: LoadOrder, invalid: set[int], has_failed: bool) -> LoadResult:
        """Returns the result of a load: what is before its first invalid block may be used."""
        del self._loads[order.load_id]
        size = len(order.keys)
        bad = [index for ids in order.block_ids for index, block_id in enumerate(ids) if block_id in invalid]
        num_good = 0 if has_failed else min(bad, default=size)
        if num_good == size:
            return LoadResult(order.load_id, size)
        return LoadResult(order.load_id, num_good, "partial" if num_good else "failed", reason=FAILED)

    def close(self) -> None:
        foreign, self.foreign = self.foreign, None
        self._layers, self._step = {}, None
        if foreign is not None:
            ask(self.foreign, None, foreign.shutdown)


def join_parts(kv_cache: KVCache) -> Tensor:
    """Returns one view of a layer's keys and values: [2, num_blocks, ...]; [1, num_blocks, ...] where values are parts
    of keys. What follows is the backend's: block_size, num_kv_heads, head_size of the torch backend, an order of its
    own of the native ones."""
    key, value = kv_cache
    if key.data_ptr() == value.data_ptr():
        return key[None]
    distance = (value.data_ptr() - key.data_ptr()) // key.element_size()
    return torch.as_strided(key, (2, *key.shape), (distance, *key.stride()))

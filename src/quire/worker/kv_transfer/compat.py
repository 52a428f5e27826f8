"""The worker half of connectors that are written for vLLM's interface (`kv_store/connector.py`).

In each step, those without tokens included: handle_preemptions, bind_connector_metadata, start_load_kv, for synchronous
loads wait_for_layer_load of each layer; the forward pass; save_kv_layer of each layer, if there were tokens;
wait_for_save, get_transfer_results, get_block_ids_with_load_errors, the methods of `MESSAGES`, and
clear_connector_metadata.

Each of several workers reports every step, also if it has nothing to say: the reports of a step are taken in together.

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
from quire.kv_store.connector import (
    HANDSHAKE,
    MESSAGES,
    KVConnectorBase_V1,
    KVConnectorRole,
    LoadContext,
    TransferResults,
    ask,
    crosses_processes,
    make_connector,
)
from quire.kv_store.objects import decode_object, encode_object
from quire.logger import init_logger
from quire.wire.kv_cache import KVCacheConfig, KVCacheGroupSpec
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput, LoadOrder, cut_load
from quire.worker.attention.backend import KVCache
from quire.worker.kv_cache import KVCacheMemory
from quire.worker.kv_transfer.worker import KVConnectorWorker

logger = init_logger(__name__)

LAYOUT = "NHD"
"""The layout of the torch attention backend: tokens, heads, elements."""


MAX_IDS_BYTES, MAX_INVALID, MAX_MESSAGE_BYTES = 8 << 10, 2048, 16 << 10
"""Bounds of a report, which goes to the engine as one datagram (`engine/executor/late_answers.py: MAX_BYTES`). More ids
go with the next step."""


@dataclass
class _Step:
    """The step that is being made."""

    params: dict[str, Any]
    """Message of the scheduler half."""
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
        self._crosses = crosses_processes(config)
        self._unsent: dict[str, list[Any]] = {"sent": [], "received": [], "failed": [], "invalid": []}
        """Ids that are to be reported."""

    def register_kv_caches(self, memory: Any) -> None:
        self._layers, kv_cache_config = self.describe_memory(memory)
        is_first = self.foreign is None
        if self.foreign is None:
            self.foreign = make_connector(self.config, KVConnectorRole.WORKER, kv_cache_config, self.rank)
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
        for transfer_id in orders.cancels:  # a connector has no way to end a load early
            self.answer_if_lost(transfer_id)
        params = orders.params
        if params is None:
            return
        if self._step is not None:  # its forward pass has failed
            self._end(self._step, has_computed=False)
        step = self._step = _Step(params)
        for order in orders.loads:
            self.arrivals.add(order.load_id)
            if order.load_id in params["sync"]:
                step.loads.append(order)
        self._begin(step)

    def _begin(self, step: _Step) -> None:
        foreign = self.foreign
        assert foreign is not None, "there is a cache before the first step"
        meta = step.params["meta"]
        if self._crosses and meta is not None:
            meta = ask(foreign, None, decode_object, meta)
        ask(foreign, None, foreign.handle_preemptions, meta)
        ask(foreign, None, foreign.bind_connector_metadata, meta)
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
            ask(foreign, None, foreign.save_kv_layer, name, layer, None)
        ask(foreign, None, foreign.wait_for_save)
        none, finished = TransferResults(), set(step.params["finished"])
        results = ask(foreign, none, foreign.get_transfer_results, finished)
        invalid = ask(foreign, set(), foreign.get_block_ids_with_load_errors)
        message = self._take_message(foreign)
        ask(foreign, None, foreign.clear_connector_metadata)
        unsent = self._unsent
        unsent["sent"] += results.finished_sending or ()
        unsent["received"] += results.finished_recving or ()
        unsent["failed"] += results.failed_recving or ()
        unsent["invalid"] += invalid
        report = KVConnectorOutput([cut_load(order, invalid, has_failed=step.has_failed) for order in step.loads])
        if message is not None or any(unsent.values()):
            report.info = {name: _take(unsent[name]) for name in ("sent", "invalid", "failed")}
            is_whole = not (unsent["invalid"] or unsent["failed"])  # what is wrong comes no later than the end
            report.info |= {"received": _take(unsent["received"]) if is_whole else [], "message": message}
        if self._crosses:
            report.step = step.params["step"]  # the others report it, too
            self.report(report)
        elif report:
            self.report(report)

    def _take_message(self, foreign: KVConnectorBase_V1) -> Any:
        """Returns the connector's objects for the scheduler half; None: there are none, or they cannot go there."""
        message = {name: ask(foreign, None, getattr(foreign, method)) for name, method in MESSAGES.items()}
        message[HANDSHAKE], self._handshake = self._handshake, None
        message = {name: value for name, value in message.items() if value is not None}
        if not message or not self._crosses:
            return message or None
        data: bytes | None = ask(foreign, None, encode_object, message)
        if data is not None and len(data) > MAX_MESSAGE_BYTES:
            logger.error(
                "%s: %s of worker %d are dropped: %d bytes for the scheduler's half, and %d are the most for a step",
                type(foreign).__name__, ", ".join(message), self.rank, len(data), MAX_MESSAGE_BYTES,
            )  # fmt: skip
            return None
        return data

    def close(self) -> None:
        foreign, self.foreign = self.foreign, None
        self._layers, self._step = {}, None
        if foreign is not None:
            ask(foreign, None, foreign.shutdown)


def _take(ids: list[Any]) -> list[Any]:
    """Removes ids from the head of a list, as many as fit into a report, and returns them."""
    count = num_bytes = 0
    for one in ids[:MAX_INVALID]:
        num_bytes += len(one) if isinstance(one, str) else 4
        if num_bytes > MAX_IDS_BYTES and count:
            break
        count += 1
    taken = ids[:count]
    del ids[:count]
    return taken


def join_parts(kv_cache: KVCache) -> Tensor:
    """Returns one view of a layer's keys and values: [2, num_blocks, ...]; [1, num_blocks, ...] where values are parts
    of keys. What follows is the backend's: block_size, num_kv_heads, head_size of the torch backend, an order of its
    own of the native ones."""
    key, value = kv_cache
    if key.data_ptr() == value.data_ptr():
        return key[None]
    distance = (value.data_ptr() - key.data_ptr()) // key.element_size()
    return torch.as_strided(key, (2, *key.shape), (distance, *key.stride()))

"""Connectors that come with Quire and are written for vLLM's interface: several as one, and one for benchmarks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError
from quire.kv_store.connector import (
    MESSAGES,
    ForeignOutput,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    TransferResults,
    ask,
    join_messages,
)
from quire.resolve import resolve


@dataclass
class MultiMetadata(KVConnectorMetadata):
    """The metadata of all connectors, in order."""

    parts: list[Any]
    num_senders: dict[str, int] = field(default_factory=dict)
    """Ended requests whose blocks several connectors hold, and how many."""


@dataclass
class MultiMessage:
    """The messages of all connectors' workers' halves, in order: as many of each as cannot be joined."""

    parts: list[list[Any]]

    @classmethod
    def of(cls, messages: Iterable[Any]) -> MultiMessage | None:
        """Returns the messages of one worker's halves, None for those that have none; None if all have none."""
        parts = [[] if message is None else [message] for message in messages]
        return cls(parts) if any(parts) else None

    def aggregate(self, other: MultiMessage) -> MultiMessage:
        """Returns this with the messages of another worker."""
        return MultiMessage([join_messages(own + more) for own, more in zip(self.parts, other.parts, strict=True)])


class MultiConnector(KVConnectorBase_V1):
    """Loads from the first connector that has tokens, and saves to all. Blocks go when all have sent them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.parts: list[KVConnectorBase_V1] = [
            factory(config, role, kv_cache_config) for factory, config in _find_parts(vllm_config)
        ]
        self._source: dict[str, int] = {}
        """The connector that has tokens of a request, by its last look-up."""
        self._num_senders: dict[str, int] = {}
        self._unsent: Counter[str] = Counter()
        """Connectors that have yet to send the blocks of a request, besides the first to do so."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        layouts = {
            layout
            for factory, config in _find_parts(vllm_config)
            if (layout := factory.get_required_kvcache_layout(config)) is not None
        }
        if len(layouts) > 1:
            raise ConfigError(f"MultiConnector: its connectors ask for different layouts: {', '.join(sorted(layouts))}")
        return next(iter(layouts), None)

    # -- the scheduler's half ----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        for part in self.parts:
            part.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = (0, False)
        for index, part in enumerate(self.parts):
            num_tokens, is_async = part.get_num_new_matched_tokens(request, num_computed_tokens)
            if num_tokens is None:
                return None, False
            if num_tokens and not found[0]:
                found, self._source[request.request_id] = (num_tokens, is_async), index
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        source = self._source.get(request.request_id)
        for index, part in enumerate(self.parts):
            part.update_state_after_alloc(request, blocks, num_external_tokens if index == source else 0)

    def build_connector_meta(self, scheduler_output: Any) -> MultiMetadata:
        num_senders, self._num_senders = self._num_senders, {}
        return MultiMetadata([part.build_connector_meta(scheduler_output) for part in self.parts], num_senders)

    def update_connector_output(self, connector_output: ForeignOutput) -> None:
        messages: dict[str, MultiMessage | None] = {name: getattr(connector_output, name) for name in MESSAGES}
        for index, part in enumerate(self.parts):
            own = {name: [] if message is None else message.parts[index] for name, message in messages.items()}
            output = connector_output
            for number in range(max(1, *map(len, own.values()))):
                fields: Any = {name: values[number] if number < len(values) else None for name, values in own.items()}
                part.update_connector_output(dataclasses.replace(output, **fields))
                output = ForeignOutput()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], MultiMessage]) -> None:
        for index, part in enumerate(self.parts):
            own = {place: value for place, message in metadata.items() for value in message.parts[index]}
            if own:  # one that cannot take its own does not keep the others from theirs
                ask(part, None, part.set_xfer_handshake_metadata_pp_aware, own)

    def get_finished_count(self) -> int | None:
        counts = {part.get_finished_count() for part in self.parts}
        if len(counts) > 1:
            raise ConfigError(f"MultiConnector: get_finished_count of its connectors is not one number: {counts}")
        return counts.pop()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._source.pop(request.request_id, None)
        answers = [part.request_finished(request, block_ids) for part in self.parts]
        num_senders = sum(is_held for is_held, _ in answers)
        if num_senders > 1:
            self._num_senders[request.request_id] = num_senders
        return num_senders > 0, next((params for _, params in answers if params is not None), None)

    def has_pending_push_work(self) -> bool:
        return any(part.has_pending_push_work() for part in self.parts)

    def reset_cache(self) -> bool | None:
        answers = [part.reset_cache() for part in self.parts]
        return False not in answers

    # -- the worker's half -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for part in self.parts:
            part.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> MultiMessage | None:
        return MultiMessage.of(part.get_handshake_metadata() for part in self.parts)

    def handle_preemptions(self, kv_connector_metadata: MultiMetadata) -> None:
        for part, meta in zip(self.parts, kv_connector_metadata.parts, strict=True):
            part.handle_preemptions(meta)

    def bind_connector_metadata(self, connector_metadata: MultiMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        for request_id, number in connector_metadata.num_senders.items():
            self._unsent[request_id] += number - 1
        for part, meta in zip(self.parts, connector_metadata.parts, strict=True):
            part.bind_connector_metadata(meta)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for part in self.parts:
            part.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for part in self.parts:
            part.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for part in self.parts:
            part.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for part in self.parts:
            part.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        for part in self.parts:
            part.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        all_sent, all_received, all_failed = set[str](), set[str](), set[str]()
        for part in self.parts:
            sent, received, failed = part.get_transfer_results(finished_req_ids)
            all_received |= received or set()
            all_failed |= failed or set()
            for request_id in sent or ():
                if self._unsent[request_id]:
                    self._unsent[request_id] -= 1
                else:
                    del self._unsent[request_id]
                    all_sent.add(request_id)
        return TransferResults(all_sent, all_received, all_failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set().union(*(part.get_block_ids_with_load_errors() for part in self.parts))

    def build_connector_worker_meta(self) -> MultiMessage | None:
        return MultiMessage.of(part.build_connector_worker_meta() for part in self.parts)

    def get_kv_connector_stats(self) -> MultiMessage | None:
        return MultiMessage.of(part.get_kv_connector_stats() for part in self.parts)

    def get_kv_connector_kv_cache_events(self) -> MultiMessage | None:
        return MultiMessage.of(part.get_kv_connector_kv_cache_events() for part in self.parts)

    def shutdown(self) -> None:
        for part in self.parts:
            part.shutdown()


def _find_parts(vllm_config: Any) -> Iterable[tuple[type[KVConnectorBase_V1], Any]]:
    """Yields the class of each connector, and what its constructor is given. Raises ConfigError."""
    transfer = vllm_config.kv_transfer_config
    wanted = transfer.get_from_extra_config("connectors", None)
    if not isinstance(wanted, list) or not wanted:
        raise ConfigError("MultiConnector needs kv_connector_extra_config's connectors: a list of configurations")
    for given in wanted:
        name = given.get("kv_connector") if isinstance(given, Mapping) else None
        module = given.get("kv_connector_module_path") if name else None
        if not isinstance(name, str) or not isinstance(module, str):
            raise ConfigError(
                f"MultiConnector: {given!r} is no connector written for vLLM's interface; name its kv_connector and "
                "kv_connector_module_path (StoreConnector cannot be one of several)"
            )
        own = transfer._replace(
            kv_connector=name,
            kv_role=given.get("kv_role", transfer.kv_role),
            kv_connector_extra_config=given.get("kv_connector_extra_config", {}),
        )
        yield resolve(f"{module}:{name}"), vllm_config.replace(own)


@dataclass
class FillOrders(KVConnectorMetadata):
    """Blocks to be filled."""

    block_ids: list[int]


class DecodeBenchConnector(KVConnectorBase_V1):
    """Has all blocks of every prompt, each filled with numbers that nothing computed: a benchmark of decoding need not
    wait for prompts. Answers mean nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._mean = float(self._kv_transfer_config.get_from_extra_config("fill_mean", 0.015))
        self._std = float(self._kv_transfer_config.get_from_extra_config("fill_std", 0.0))
        self._block_size = vllm_config.cache_config.block_size
        self._block_ids: list[int] = []
        self._layers: dict[str, Any] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return request.num_tokens - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            for block_ids in blocks.get_block_ids():
                self._block_ids += block_ids[-(num_external_tokens // self._block_size) :]

    def build_connector_meta(self, scheduler_output: Any) -> FillOrders:
        block_ids, self._block_ids = self._block_ids, []
        return FillOrders([block_id for block_id in block_ids if block_id])

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Holds no blocks of any group."""
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._layers = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        block_ids = self._get_connector_metadata().block_ids
        for layer in self._layers.values() if block_ids else ():
            layer[:, block_ids] = layer[:, block_ids].normal_(self._mean, self._std) if self._std else self._mean

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

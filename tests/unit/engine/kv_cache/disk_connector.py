"""A connector of files, a directory for each block and a file for each layer: synchronous, or in a thread. Each of
several workers has a directory of its own."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from safetensors.torch import load_file, save_file

from quire.failpoints import failpoint
from quire.kv_store.connector import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole


@dataclass
class Transfers(KVConnectorMetadata):
    """Blocks by hash, with their ids. Loads have their request."""

    loads: list[tuple[str, list[tuple[bytes, int]]]] = field(default_factory=list)
    saves: list[tuple[bytes, int]] = field(default_factory=list)


class DiskConnector(KVConnectorBase_V1):
    """Saves what prompts fill in their first step."""

    may_load = Event()
    """Asynchronous loads wait for it, unless `waits` is False in the configuration."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = self._kv_transfer_config
        self._root = Path(config.get_from_extra_config("shared_storage_path", None))
        parallel = vllm_config.parallel_config
        if parallel.world_size > 1:
            self._root /= str(parallel.rank)  # the scheduler looks where the first worker writes
        self.count_needed = config.get_from_extra_config("count_needed", None)
        self._is_async = config.get_from_extra_config("is_async", False)
        self._waits = config.get_from_extra_config("waits", True)
        self._sends = config.get_from_extra_config("sends", False)
        self._block_size = vllm_config.cache_config.block_size
        self._new: dict[str, Any] = {}
        self._loads: list[tuple[str, list[tuple[bytes, int]]]] = []
        self.layers: dict[str, Any] = {}
        self.invalid: set[int] = set()
        self.futures: dict[str, Future[None]] = {}
        self.to_send: set[str] = set()
        self._pool = ThreadPoolExecutor(1) if self._is_async and role is KVConnectorRole.WORKER else None

    def on_new_request(self, request: Any) -> None:
        self._new[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = 0
        for digest in request.block_hashes[num_computed_tokens // self._block_size :]:
            if not (self._root / digest.hex()).exists():
                break
            count += self._block_size
        return count, self._is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            ids = blocks.get_block_ids()[0]
            first = len(ids) - num_external_tokens // self._block_size
            self._loads.append((request.request_id, list(zip(request.block_hashes[first:], ids[first:], strict=False))))

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        transfers = Transfers(self._loads)
        self._loads = []
        for data in scheduler_output.scheduled_new_reqs:
            num_full = (
                data.num_computed_tokens + scheduler_output.num_scheduled_tokens.get(data.req_id, 0)
            ) // self._block_size
            first = data.num_computed_tokens // self._block_size
            hashes = self._new.pop(data.req_id).block_hashes
            transfers.saves += zip(hashes[first:num_full], data.block_ids[0][first:num_full], strict=True)
        return transfers

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._sends and bool(block_ids), {"num_blocks": len(block_ids)} if self._sends else None

    def get_finished_count(self) -> int | None:
        return self.count_needed  # type: ignore[no-any-return]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.layers = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert forward_context.kv_caches is self.layers
        for request_id, blocks in self._get_connector_metadata().loads:
            if self._pool is None:
                self._load(blocks)
            else:
                self.futures[request_id] = self._pool.submit(self._load_later, blocks)

    def _load_later(self, blocks: list[tuple[bytes, int]]) -> None:
        assert not self._waits or self.may_load.wait(120)
        self._load(blocks)

    def _load(self, blocks: list[tuple[bytes, int]]) -> None:
        for digest, block_id in blocks:
            for name, layer in self.layers.items():
                failpoint("kv.read")
                try:
                    layer[:, block_id] = load_file(self._root / digest.hex() / f"{name}.safetensors")["kv"]
                except OSError:
                    self.invalid.add(block_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert layer_name in self.layers

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for digest, block_id in self._get_connector_metadata().saves:
            directory = self._root / digest.hex()
            directory.mkdir(parents=True, exist_ok=True)
            new = directory / f"{layer_name}.{os.getpid()}.new"
            save_file({"kv": kv_layer[:, block_id].clone()}, new)
            new.rename(directory / f"{layer_name}.safetensors")

    def wait_for_save(self) -> None:
        return

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done = {request_id for request_id, future in self.futures.items() if future.done()}
        for request_id in done:
            self.futures.pop(request_id).result()
        sent, self.to_send = self.to_send, finished_req_ids if self._sends else set()
        return sent, done

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

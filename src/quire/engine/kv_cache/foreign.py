"""The scheduler half of connectors that are written for vLLM's interface (`kv_store/connector.py`).

`KVExchange` knows only loads that a request waits for. So a load that the connector calls synchronous is one step of
its own: the connector sees its request as new in that step, and as resumed when it runs. Saves are the connector's own
business: it plans them in `build_connector_meta`, and its worker half reads the blocks after the step's forward pass.

Every worker has a half of its own, which gets the metadata of each step. What they report of a step is taken in
together (`wire/kv_transfer.py: TransferAggregator`). A synchronous load ends when all workers have made its step, an
asynchronous one when all of them have named its request, or as many as `get_finished_count` says. Of both counts what
every worker could load.

An error of the connector is logged and costs a load or a save, not the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.config.engine import EngineConfig
from quire.engine.kv_cache.connector import BlockTables, ExternalMatch, KVConnectorScheduler
from quire.engine.kv_cache.load_cost import NEVER
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import Request, RequestStatus
from quire.errors import ConfigError, GenerationError, QuireError
from quire.kv_store.connector import (
    HANDSHAKE,
    MESSAGES,
    CachedRequests,
    ForeignBlocks,
    ForeignOutput,
    KVConnectorBase_V1,
    KVConnectorRole,
    Step,
    ask,
    crosses_processes,
    join_messages,
    make_connector,
)
from quire.kv_store.objects import decode_object, encode_object
from quire.logger import init_logger
from quire.wire.execution import BlockIds, NewRequestData, SchedulerOutput
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.kv_transfer import KVConnectorOutput, LoadOrder, LoadResult, cut_load
from quire.wire.topology import Topology

logger = init_logger(__name__)

POLL_S = 0.005
"""Time between steps without tokens while a transfer of the connector is under way."""


class ForeignRequest:
    """A request as the connector sees it: `engine/request.py: Request`, read only, with the parameters that vLLM keeps
    on it."""

    __slots__ = ("_request", "kv_transfer_params")

    def __init__(self, request: Request) -> None:
        self._request = request
        params = request.sampling_params
        extra = None if params is None else params.extra_args
        self.kv_transfer_params: Any = None if extra is None else extra.get("kv_transfer_params")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@dataclass(eq=False)
class _Load:
    """A load that has not ended. The connector learns of it when it is sent to the worker."""

    request: Request
    order: LoadOrder
    block_ids: BlockIds
    num_tokens: int
    is_async: bool
    is_begun: bool = False
    invalid: set[int] = field(default_factory=set)
    """Blocks that some worker could not load."""


class WorkerReports:
    """Requests that some workers have named and others have yet to, and the asynchronous loads that end so."""

    def __init__(self, num_needed: int) -> None:
        self._num_needed = num_needed
        self._counts = Counter[tuple[str, str]]()
        """Numbers of workers that have named a request, and not yet as many as needed: "sent" or "received", and its
        id."""
        self._failed: set[str] = set()
        """Requests that some worker has named as failed, and too few as received."""
        self._loads: dict[str, list[_Load]] = {}
        """Asynchronous loads that have begun and not ended, by request, oldest first."""

    def expect(self, load: _Load) -> None:
        """Notes that an asynchronous load has begun."""
        self._loads.setdefault(load.request.request_id, []).append(load)

    def forget(self, load: _Load) -> None:
        """Notes that a load has ended, or was lost."""
        loads = self._loads.get(load.request.request_id, [])
        if load in loads:
            loads.remove(load)
        if not loads:
            self._loads.pop(load.request.request_id, None)

    def add(self, infos: Sequence[dict[str, Any]]) -> tuple[ForeignOutput, list[LoadResult]]:
        """Takes in what workers report of a step. Returns it in vLLM's form, and the loads that have ended: the oldest
        of each request that enough workers have received."""
        output, sent, received = ForeignOutput(), list[str](), list[str]()
        for info in infos:
            output.invalid_block_ids.update(info["invalid"])
            self._failed.update(info["failed"])
            sent += self._count("sent", info["sent"])
            received += self._count("received", info["received"])
        output.finished_sending, output.finished_recving = set(sent), set(received)
        output.failed_recving = self._failed & output.finished_recving
        if output.invalid_block_ids:
            for load in [load for loads in self._loads.values() for load in loads]:
                ids = {block_id for table in load.order.block_ids for block_id in table}
                load.invalid |= ids & output.invalid_block_ids
        ended: list[LoadResult] = []
        for request_id in received:
            has_failed = request_id in self._failed
            self._failed.discard(request_id)
            if loads := self._loads.get(request_id):
                load = loads.pop(0)
                ended.append(cut_load(load.order, load.invalid, has_failed=has_failed))
        return output, ended

    def _count(self, kind: str, request_ids: Sequence[str]) -> list[str]:
        """Notes that a worker has named these. Returns those that enough workers have named with it."""
        done: list[str] = []
        for request_id in request_ids:
            self._counts[kind, request_id] += 1
            if self._counts[kind, request_id] == self._num_needed:
                del self._counts[kind, request_id]
                done.append(request_id)
        return done


class ForeignScheduler(KVConnectorScheduler):
    """Calls the scheduler's half of a connector in vLLM's order."""

    sees_all_steps = True

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, kv_cache_config)
        self.foreign: KVConnectorBase_V1 = make_connector(config, KVConnectorRole.SCHEDULER, kv_cache_config)
        extra = config.kv_transfer_config.kv_connector_extra_config
        self._fails = extra["kv_load_failure_policy"] == "fail"
        self._crosses = crosses_processes(config)
        parallel = config.parallel_config
        self._topology = Topology(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)
        self._reports = WorkerReports(self._count_needed())
        self._num_steps = 0
        self._requests: dict[str, ForeignRequest] = {}
        self._tables: dict[str, BlockTables] = {}
        """The block tables of running requests."""
        self._is_async: dict[str, bool] = {}
        """Answer of the last look-up, by request."""
        self._loads: dict[int, _Load] = {}
        """Loads by `id` of the order."""
        self._known: set[str] = set()
        """Requests that the connector has seen in a step."""
        self._errors: dict[str, QuireError] = {}
        self._sending: set[str] = set()
        """Ended requests whose blocks are held until they were sent."""

    def _count_needed(self) -> int:
        """Returns how many workers must name a request. Raises ConfigError for a number that there are not."""
        number: int | None = self.foreign.get_finished_count()
        num_workers = self._topology.world_size
        if number is not None and not 0 <= number <= num_workers:
            raise ConfigError(
                f"kv_connector {type(self.foreign).__name__}: get_finished_count returns {number}, and there are "
                f"{num_workers} workers (--tensor-parallel-size x --pipeline-parallel-size); None is all of them"
            )
        return number or num_workers

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        self._manager = manager

    # -- requests ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = ForeignRequest(request)
        ask(self.foreign, None, self.foreign.on_new_request, self._requests[request.request_id])

    def request_finished(self, request: Request) -> None:
        request_id = request.request_id
        foreign, tables = self._requests.pop(request_id, None), self._tables.pop(request_id, ())
        self._is_async.pop(request_id, None)
        self._errors.pop(request_id, None)
        self._known.discard(request_id)
        if foreign is None:
            return
        ids = [[block.block_id for block in table] for table in tables] or [[] for _ in self.specs]
        finish: Any = getattr(self.foreign, "request_finished_all_groups", None)
        if finish is not None:
            is_held, params = ask(self.foreign, (False, None), finish, foreign, tuple(ids))
        else:
            own_ids, finish = ids[0] if ids else [], self.foreign.request_finished
            is_held, params = ask(self.foreign, (False, None), finish, foreign, own_ids)
        request.report.transfer_params = params
        blocks = [block for table in tables for block in table if not block.is_null]
        if is_held and blocks:  # the scheduler has just freed them, and has given none of them away
            self._manager.held.pin(("sending", request_id), blocks)
            self._sending.add(request_id)

    def wants_saves(self, request: Request) -> bool:
        return False  # its worker half saves what its metadata names

    @property
    def holds_blocks(self) -> bool:
        return bool(self._sending)

    # -- loads -------------------------------------------------------------------------------------------------

    def find_matches(self, request: Request, num_computed_tokens: int) -> list[ExternalMatch] | None:
        foreign = self._requests[request.request_id]
        num_found, is_async = ask(
            self.foreign, (0, False), self.foreign.get_num_new_matched_tokens, foreign, num_computed_tokens
        )
        if num_found is None:
            return None
        num_tokens = min(num_found, request.num_tokens - 1 - num_computed_tokens) // self.block_size * self.block_size
        if num_tokens <= 0:
            return []
        self._is_async[request.request_id] = is_async
        return [ExternalMatch(num_tokens)]

    def request_started(self, request: Request, tables: BlockTables) -> None:
        self._tables[request.request_id] = tables
        self._pass_blocks(request, _ids_of(tables), 0)

    def _pass_blocks(self, request: Request, block_ids: BlockIds, num_tokens: int) -> None:
        foreign = self._requests.get(request.request_id)
        if foreign is not None:
            blocks = ForeignBlocks(block_ids)
            ask(self.foreign, None, self.foreign.update_state_after_alloc, foreign, blocks, num_tokens)

    def update_state_after_alloc(self, request: Request, order: LoadOrder, tables: BlockTables) -> None:
        num_tokens = len(order.keys) * self.block_size
        is_async = self._is_async.pop(request.request_id)
        self._loads[id(order)] = _Load(request, order, _ids_of(tables), num_tokens, is_async)

    def on_load_finished(self, order: LoadOrder, result: LoadResult) -> None:
        load = self._loads.pop(id(order))
        self._reports.forget(load)
        request, has_failed = load.request, result.outcome in ("partial", "failed")
        if self._fails and has_failed and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._errors[request.request_id] = GenerationError(
                f"{len(order.keys) - result.num_verified} of its {len(order.keys)} KV blocks could not be loaded, and "
                "kv_load_failure_policy is fail; recompute computes their tokens"
            )

    def get_error(self, request: Request) -> QuireError | None:
        return self._errors.get(request.request_id)

    # -- steps -------------------------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> dict[str, Any] | None:
        begun = [load for load in self._loads.values() if load.order.load_id and not load.is_begun]
        for load in begun:
            load.is_begun = True
            if load.is_async:
                self._reports.expect(load)
            self._pass_blocks(load.request, load.block_ids, load.num_tokens)
        meta = ask(self.foreign, None, self.foreign.build_connector_meta, self._describe(output, begun))
        is_waiting = any(load.is_begun for load in self._loads.values()) or bool(self._sending)
        is_waiting = is_waiting or ask(self.foreign, False, self.foreign.has_pending_push_work)
        self.next_step_at = time.monotonic() + POLL_S if is_waiting else NEVER
        self._num_steps += 1
        return {
            "step": self._num_steps,
            "meta": ask(self.foreign, None, encode_object, meta) if self._crosses else meta,
            "sync": [load.order.load_id for load in begun if not load.is_async],
            "finished": output.finished_req_ids,
            "num_tokens": output.total_num_scheduled_tokens,
        }

    def _describe(self, output: SchedulerOutput, begun: list[_Load]) -> Step:
        """Returns a step for the connector, with the requests of synchronous loads that begin with it."""
        for request_id in output.preempted_req_ids:
            self._tables.pop(request_id, None)
        cached, new = CachedRequests(), [_describe_load(load) for load in begun if not load.is_async]
        self._known.update(data.req_id for data in new)
        for data in output.scheduled_new_reqs:
            if data.req_id in self._known:
                cached.resumed_req_ids.add(data.req_id)
                _add_cached(cached, data.req_id, data.block_ids, data.num_computed_tokens)
            else:
                new.append(data)
                self._known.add(data.req_id)
        running = output.scheduled_cached_reqs
        for row in zip(running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True):
            _add_cached(cached, *row)
        return Step(
            new,
            cached,
            output.num_scheduled_tokens,
            output.total_num_scheduled_tokens,
            output.finished_req_ids,
            output.preempted_req_ids,
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        infos = output.infos or ([] if output.info is None else [(output.rank, output.info)])
        if not infos:
            return
        messages = [self._read_message(info) for _, info in infos]
        handshakes = {
            self._place_of(rank): message[HANDSHAKE]
            for (rank, _), message in zip(infos, messages, strict=True)
            if HANDSHAKE in message
        }
        if handshakes:
            ask(self.foreign, None, self.foreign.set_xfer_handshake_metadata_pp_aware, handshakes)
        report, ended = self._reports.add([info for _, info in infos])
        for request_id in self._sending & (report.finished_sending or set()):
            self._sending.remove(request_id)
            self._manager.held.release(("sending", request_id))
        self._pass_on(report, messages)
        output.loads += ended

    def _read_message(self, info: dict[str, Any]) -> dict[str, Any]:
        """Returns a worker's objects, by field of `ForeignOutput`."""
        message = info["message"]
        if isinstance(message, bytes):
            message = ask(self.foreign, None, decode_object, message)
        return message or {}

    def _place_of(self, rank: int) -> tuple[int, int]:
        place = self._topology.place_of(rank)
        return place.pp, place.tp

    def _pass_on(self, report: ForeignOutput, messages: list[dict[str, Any]]) -> None:
        """Passes a report to the connector, and in further calls the messages that cannot be joined."""
        joined = {name: join_messages([one[name] for one in messages if name in one]) for name in MESSAGES}
        for index in range(max(1, *map(len, joined.values()))):
            for name, values in joined.items():
                setattr(report, name, values[index] if index < len(values) else None)
            ask(self.foreign, None, self.foreign.update_connector_output, report)
            report = ForeignOutput()

    def reset_cache(self) -> bool:
        return ask(self.foreign, False, self.foreign.reset_cache) is not False

    def set_weights(self, path: str) -> None:
        if not self.reset_cache():
            logger.warning("the connector did not drop what was computed with the weights before %s", path)

    def shutdown(self) -> None:
        ask(self.foreign, None, self.foreign.shutdown)


def _ids_of(tables: BlockTables) -> BlockIds:
    return tuple([block.block_id for block in table] for table in tables)


def _describe_load(load: _Load) -> NewRequestData:
    request = load.request
    return NewRequestData(
        request.request_id,
        request.prompt_token_ids,
        load.block_ids,
        load.order.start * len(load.order.keys[0].token_ids) + load.num_tokens,
        request.sampling_params,
        output_token_ids=request.output_token_ids,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
    )


def _add_cached(cached: CachedRequests, req_id: str, block_ids: BlockIds | None, num_computed_tokens: int) -> None:
    cached.req_ids.append(req_id)
    cached.new_block_ids.append(block_ids)
    cached.num_computed_tokens.append(num_computed_tokens)

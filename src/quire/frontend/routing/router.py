"""Places requests on engines: what this client has where, what each engine has cached, and the policy that chooses.

`Router` follows every request from its placement to its end, so that the load of an engine is exact at every choice,
without a message from the engine; a `LoadBoard` has the load of other API processes. `PrefixDirectory` remembers the
exact hashes of the prompts that were sent to an engine: as many as it has blocks, the least recently used forgotten
first, which is what the engine's own cache does. What an engine evicted otherwise, or got from another client, is not
known here; an error costs time, never a token. Both know no link and no socket.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from quire.frontend.routing.load_board import LoadBoard
from quire.frontend.routing.policy import EngineLoad, Reason, Routed, RoutingPolicy
from quire.wire.block_hash import BlockHash, ExtraKeys, hash_block
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest

MAX_HASHED_TOKENS = 1 << 16
"""Tokens of a prompt that are hashed; longer prompts differ long before."""
DEFAULT_NUM_BLOCKS = 1 << 16


def hash_prompt(request: EngineCoreRequest, block_size: int) -> list[BlockHash]:
    """Returns the hashes of the full blocks of a prompt, as the engine computes them; of a prompt of embeddings none.

    A later revision of an adapter has other hashes in the engine: its prompts are found only among themselves.
    """
    token_ids = request.prompt_token_ids
    if not token_ids or request.prompt_embeds is not None:
        return []
    lora = request.lora_request
    every: ExtraKeys = () if lora is None else (("lora", lora.lora_name, lora.lora_path),)
    first: ExtraKeys = every if request.cache_salt is None else (*every, ("cache_salt", request.cache_salt))
    hashes: list[BlockHash] = []
    parent: BlockHash | None = None
    num_tokens = min(len(token_ids), MAX_HASHED_TOKENS)
    for start in range(0, num_tokens - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size], (every if start else first) or None)
        hashes.append(parent)
    return hashes


class PrefixDirectory:
    """The prefixes of each engine. Single-threaded."""

    def __init__(self) -> None:
        self._blocks: dict[int, OrderedDict[BlockHash, None]] = {}
        """Blocks of each engine, the least recently used first."""
        self._limits: dict[int, int] = {}
        self._holders: dict[BlockHash, int] = {}
        """The engines that have a block: a bit for each index."""

    def open(self, engine: int, num_blocks: int | None = None) -> None:
        """Begins with an empty cache of an engine that has so many blocks: it is new, or was started again."""
        self.close(engine)
        self._blocks[engine] = OrderedDict()
        self._limits[engine] = num_blocks or DEFAULT_NUM_BLOCKS

    def close(self, engine: int) -> None:
        """Forgets an engine, or what it had cached."""
        for block in self._blocks.pop(engine, ()):
            self._forget(engine, block)

    def count_cached(self, engines: Sequence[int], hashes: Iterable[BlockHash]) -> list[int]:
        """Returns how many blocks at the start of a prompt each of the engines has."""
        counts = [0] * len(engines)
        having = list(enumerate(engines))
        for block in hashes:
            holders = self._holders.get(block, 0)
            having = [(i, engine) for i, engine in having if holders >> engine & 1] if holders else []
            if not having:
                break
            for i, _ in having:
                counts[i] += 1
        return counts

    def note_sent(self, engine: int, hashes: Iterable[BlockHash]) -> None:
        """Records that an engine computes a prompt."""
        known = self._blocks.get(engine)
        if known is None:
            return
        holders, bit = self._holders, 1 << engine
        for block in hashes:
            if block in known:
                known.move_to_end(block)
            else:
                known[block] = None
                holders[block] = holders.get(block, 0) | bit
        for _ in range(len(known) - self._limits[engine]):
            self._forget(engine, known.popitem(last=False)[0])

    def _forget(self, engine: int, block: BlockHash) -> None:
        holders = self._holders[block] & ~(1 << engine)
        if holders:
            self._holders[block] = holders
        else:
            del self._holders[block]


MAX_SESSIONS = 4096
"""Sessions whose engine is remembered between two inputs; of more, the one used last."""


class _Placed(NamedTuple):
    """A request at an engine."""

    load: EngineLoad
    num_tokens: int
    """Tokens it adds to the queue there."""


class Router:
    """Router of one client. `decisions` counts the reasons of its choices. `board` has the load that other clients give
    to the same engines, if there are any."""

    def __init__(self, policy: RoutingPolicy, board: LoadBoard | None = None) -> None:
        self.decisions: Counter[Reason] = Counter()
        self.num_expected_cached_tokens = 0
        """Tokens of placed requests that were expected in the engine's prefix cache."""
        self._policy = policy
        self._board = board
        self._loads: dict[int, EngineLoad] = {}
        self._directory = PrefixDirectory()
        self._block_size = 0
        self._waiting: dict[str, _Placed] = {}
        """Placed requests without a token."""
        self._running: dict[str, EngineLoad] = {}
        """The other placed requests."""
        self._sessions: dict[str, int] = {}

    # -- engines ------------------------------------------------------------------------------------------------------

    def open_engine(self, engine: int, ready: EngineCoreReadyResponse) -> None:
        """Records that an engine is ready, with an empty cache."""
        load = self._load(engine)
        load.num_tokens_of_cache, load.kv_usage = ready.kv_cache_size_tokens, 0.0
        self._show_facts(load, is_fitted=False)
        self._block_size = ready.block_size
        if self._policy.reads_prefixes:
            self._directory.open(engine, ready.num_gpu_blocks)

    def close_engine(self, engine: int) -> None:
        """Records that an engine has died, or is removed: its cache is lost. Its requests are given up one by one."""
        self._directory.close(engine)

    def note_step(self, outputs: EngineCoreOutputs) -> None:
        """Learns from the statistics of a step."""
        load = self._loads.get(outputs.engine_index)
        if load is not None and outputs.scheduler_stats is not None:
            self._show_facts(load, is_fitted=load.note_step(outputs.timestamp, outputs.scheduler_stats))

    def predict_wait(self, engine: int, num_tokens: int) -> float:
        """Returns the seconds until the first token of a request at an engine that has none of it cached."""
        load = self._load(engine)
        self._look_at(load)
        return load.predict_wait(num_tokens, 0)

    def num_requests(self, engine: int) -> int:
        """Returns the number of this client's requests that are placed at an engine."""
        load = self._loads.get(engine)
        return 0 if load is None else load.num_own_requests

    def _load(self, engine: int) -> EngineLoad:
        load = self._loads.get(engine)
        if load is None:
            load = self._loads[engine] = EngineLoad(engine)
        return load

    def _look_at(self, load: EngineLoad) -> None:
        """Takes in what other clients have at an engine."""
        board = self._board
        if board is not None:
            load.others = board.get_others(load.index)
            if not board.writes_facts:
                load.kv_usage, model = board.get_facts(load.index)
                load.model = model or load.model

    def _show(self, load: EngineLoad) -> None:
        """Shows other clients what this one has at an engine."""
        if self._board is not None:
            self._board.put_counts(load.index, load.own_counts)

    def _show_facts(self, load: EngineLoad, *, is_fitted: bool) -> None:
        if self._board is not None and self._board.writes_facts:
            self._board.put_facts(load.index, load.kv_usage, load.model if is_fitted else None)

    # -- requests -----------------------------------------------------------------------------------------------------

    def place(self, request: EngineCoreRequest, engines: Iterable[int], num_outputs: int = 0) -> int:
        """Chooses one of `engines`, which are at least one, for a request that has `num_outputs` output tokens."""
        engines = list(engines)
        chosen = self._find_bound(request, engines)
        hashes: list[BlockHash] = []
        cached = [0] * len(engines)
        num_tokens = len(request.prompt_token_ids or ()) + num_outputs
        if self._policy.reads_prefixes and self._block_size:
            hashes = hash_prompt(request, self._block_size)
            cached = [self._block_size * count for count in self._directory.count_cached(engines, hashes)]
        if chosen is None:
            key = int.from_bytes((hashes[0] if hashes else _digest(request))[:8], "little")
            loads = [self._load(engine) for engine in engines]
            for load in loads:
                self._look_at(load)
            position, reason = self._policy.choose(Routed(num_tokens, key, cached), loads)
        else:
            position, reason = chosen
        engine = engines[position]
        self.decisions[reason] += 1
        num_cached = min(cached[position], max(0, num_tokens - 1))
        self.num_expected_cached_tokens += num_cached
        self._directory.note_sent(engine, hashes)
        self._put(request, self._load(engine), num_tokens - num_cached)
        return engine

    def put(self, request: EngineCoreRequest, engine: int, num_outputs: int = 0) -> None:
        """Records that a request is at an engine that was not chosen here."""
        self._put(request, self._load(engine), len(request.prompt_token_ids or ()) + num_outputs)

    def _find_bound(self, request: EngineCoreRequest, engines: list[int]) -> tuple[int, Reason] | None:
        """Returns the engine that a request is bound to, if it may be chosen: by its rank, or by its session."""
        reason: Reason = "rank"
        engine = request.data_parallel_rank
        if engine is None:
            engine, reason = self._sessions.get(request.request_id), "session"
        return (engines.index(engine), reason) if engine in engines else None

    def _put(self, request: EngineCoreRequest, load: EngineLoad, num_tokens: int) -> None:
        request_id = request.request_id
        self._sessions.pop(request_id, None)
        if request.resumable:
            self._sessions[request_id] = load.index
            if len(self._sessions) > MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        self._waiting[request_id] = _Placed(load, num_tokens)
        load.num_waiting += 1
        load.num_queued_tokens += num_tokens
        self._show(load)

    def note_token(self, request_id: str) -> None:
        """Records the first token of a request at its engine."""
        placed = self._waiting.pop(request_id, None)
        if placed is not None:
            placed.load.num_waiting -= 1
            placed.load.num_queued_tokens -= placed.num_tokens
            placed.load.num_running += 1
            self._show(placed.load)
            self._running[request_id] = placed.load

    def remove(self, request_id: str) -> None:
        """Records that a request has ended, or leaves its engine. Unknown ids are ignored."""
        self.note_token(request_id)
        load = self._running.pop(request_id, None)
        if load is not None:
            load.num_running -= 1
            self._show(load)

    def placed_at(self, engine: int) -> list[str]:
        """Returns the requests that are placed at an engine."""
        waiting = [request_id for request_id, placed in self._waiting.items() if placed.load.index == engine]
        return waiting + [request_id for request_id, load in self._running.items() if load.index == engine]


def _digest(request: EngineCoreRequest) -> bytes:
    token_ids = request.prompt_token_ids or ()
    return sha256(b"".join(token.to_bytes(8, "little", signed=True) for token in token_ids)).digest()

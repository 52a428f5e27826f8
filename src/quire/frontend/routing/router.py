"""Places requests on engines: what this client has where, what each engine has cached, and the policy that chooses.

`Router` follows every request from its placement to its end, so that the load of an engine is exact at every choice,
without a message from the engine; a `LoadBoard` has the load of other API processes. `PrefixDirectory` remembers the
exact hashes of the prompts that were sent to an engine: as many as it has blocks, the least recently used forgotten
first, which is what the engine's own cache does. What an engine evicted otherwise, or got from another client, is not
known here; an error costs time, never a token. Both know no link and no socket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256

from quire.frontend.routing.load_board import LoadBoard
from quire.frontend.routing.policy import EngineLoad, Reason, Routed, RoutingPolicy
from quire.frontend.routing.prefix_directory import PrefixDirectory
from quire.wire.block_hash import BlockHash, ExtraKeys, hash_block
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest

MAX_HASHED_TOKENS = 1 << 16
"""Tokens of a prompt that are hashed; longer prompts differ long before."""


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


MAX_SESSIONS = 4096
"""Sessions whose engine is remembered between two inputs; of more, the one used last."""


_Placed = tuple[EngineLoad, int]
"""Load of the engine of a waiting request, and the tokens that it adds to the queue there."""


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
        load.note_ready(ready.kv_cache_size_tokens)
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
        self._look_at([load])
        return load.predict_wait(num_tokens, 0)

    def num_requests(self, engine: int) -> int:
        """Returns the number of this client's requests that are placed at an engine."""
        load = self._loads.get(engine)
        return 0 if load is None else load.num_own_requests

    def has_request(self, request_id: str) -> bool:
        """Returns whether a request is placed at an engine."""
        return request_id in self._waiting or request_id in self._running

    def _load(self, engine: int) -> EngineLoad:
        load = self._loads.get(engine)
        if load is None:
            load = self._loads[engine] = EngineLoad(engine)
        return load

    def _look_at(self, loads: list[EngineLoad]) -> None:
        """Takes in what other clients have at engines, and what their statistics say."""
        board = self._board
        if board is None:
            return
        others, facts = board.get_others(), board.get_facts()
        for load in loads:
            if load.index in others:
                load.note_others(others[load.index])
            if load.index in facts:
                load.note_facts(*facts[load.index])

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
        bound = self._find_bound(request, engines)
        hashes: list[BlockHash] = []
        num_blocks = [0] * len(engines)
        num_tokens = len(request.prompt_token_ids or ()) + num_outputs
        if self._policy.reads_prefixes and self._block_size:
            hashes = hash_prompt(request, self._block_size)
            num_blocks = self._directory.count_cached(engines, hashes)
        position, reason = bound or self._choose(request, num_tokens, engines, hashes, num_blocks)
        engine = engines[position]
        self.decisions[reason] += 1
        num_cached = min(self._block_size * num_blocks[position], max(0, num_tokens - 1))
        self.num_expected_cached_tokens += num_cached
        self._directory.note_sent(engine, hashes)
        self._put(request, self._load(engine), num_tokens - num_cached)
        return engine

    def _choose(
        self,
        request: EngineCoreRequest,
        num_tokens: int,
        engines: list[int],
        hashes: list[BlockHash],
        num_blocks: list[int],
    ) -> tuple[int, Reason]:
        """Asks the policy. `num_blocks` are cached at each of the engines."""
        key = int.from_bytes((hashes[0] if hashes else _digest(request))[:8], "little")
        try:
            loads = [self._loads[engine] for engine in engines]
        except KeyError:  # of an engine that was never ready
            loads = [self._load(engine) for engine in engines]
        self._look_at(loads)
        size = self._block_size
        return self._policy.choose(Routed(num_tokens, key, [size * count for count in num_blocks]), loads)

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
        if self._sessions:
            self._sessions.pop(request_id, None)
        if request.resumable:
            self._sessions[request_id] = load.index
            if len(self._sessions) > MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        self._waiting[request_id] = load, num_tokens
        load.add_request(num_tokens)
        self._show(load)

    def note_token(self, request_id: str) -> None:
        """Records the first token of a request at its engine."""
        placed = self._waiting.pop(request_id, None)
        if placed is not None:
            load, num_tokens = placed
            load.start_request(num_tokens)
            self._show(load)
            self._running[request_id] = load

    def remove(self, request_id: str) -> None:
        """Records that a request has ended, or leaves its engine. Unknown ids are ignored."""
        self.note_token(request_id)
        load = self._running.pop(request_id, None)
        if load is not None:
            load.remove_request()
            self._show(load)

    def placed_at(self, engine: int) -> list[str]:
        """Returns the requests that are placed at an engine."""
        waiting = [request_id for request_id, (load, _) in self._waiting.items() if load.index == engine]
        return waiting + [request_id for request_id, load in self._running.items() if load.index == engine]


def _digest(request: EngineCoreRequest) -> bytes:
    token_ids = request.prompt_token_ids or ()
    return sha256(b"".join(token.to_bytes(8, "little", signed=True) for token in token_ids)).digest()

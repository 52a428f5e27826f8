"""Measures what the KV store and KV cache events cost when something goes wrong, and at their limits.

    python -m benchmarks.kv_goals [--dir DIRECTORY] [--model half] PART...

kill: the core of an engine is killed with 8 live requests of 4,096 tokens, five times: seconds until it is ready again,
then until each has its next token; tokens that were computed again.
faults: seconds to the first token of prompts whose blocks are stored, while the store is 100 times slower, hangs, is
damaged, or cannot be written; beside an engine without a store.
saves: prompts without pause into a store of 256 MiB: seconds from computed to saved, and the largest size ever seen.
index: a directory with 1,000,000 blocks: seconds of the first scan, bytes in memory, a look-up of 8,192 tokens.
steps: what a store costs the scheduler where nothing is hit: microseconds of a step, and of each block that gets full.
events: KV cache events: blocks per second through the publisher to a subscriber, and what each costs the core's loop.
peers: the first token of a prompt of 4,096 tokens after a restart: with the store, beside vLLM, which computes it, and
llama.cpp, which reads a slot's file (benchmarks/peers/setup vllm llamacpp). --once makes one start of each of --peers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import queue
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq

from benchmarks.kv_store import make_llm, make_prompt, time_first_token
from benchmarks.models import find_checkpoint
from benchmarks.versus.peers import DEFAULT_HOME, PEERS, Place
from quire import EngineArgs, SamplingParams
from quire.config.engine import SchedulerConfig
from quire.config.kv_events import KVEventsConfig
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.changes import BlockChanges, Cleared
from quire.engine.kv_cache.connector import find_longest_match
from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.kv_cache.load_cost import LoadCost
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.kv_cache.store_scheduler import StoreScheduler
from quire.engine.kv_events import KVEventPublisher
from quire.engine.request import Request
from quire.engine.sched.exchange import KVExchange
from quire.engine.sched.interface import NoExchange
from quire.engine.sched.scheduler import Scheduler
from quire.engine.transfers import TransferLink
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.mp import AsyncMPClient
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import Entry, follow, open_extent, write_table
from quire.kv_store.index import StoreIndex
from quire.kv_store.record import TAG_BYTES, make_header
from quire.wire.block_hash import hash_block
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.execution import ModelRunnerOutput
from quire.wire.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from quire.wire.kv_transfer import KVConnectorOutput, SaveResult

STORE_BYTES = 8 << 30
BLOCK_SIZE = 16


# -- kill -----------------------------------------------------------------------------------------------------------

NUM_LIVE, LIVE_TOKENS = 8, 4096


class _Stream:
    """A request, and the times of its tokens."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    async def read(self, llm: AsyncLLM, number: int) -> None:
        params = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True, detokenize=False)
        async for _ in llm.generate(make_prompt(LIVE_TOKENS, number), params, f"live {number}"):
            self.stamps.append(time.perf_counter())


async def measure_kill(model: Path, directory: Path, num_rounds: int = 5) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    args = EngineArgs(
        str(model), max_model_len=8192, kv_cache_memory_bytes=4 << 30, max_num_seqs=NUM_LIVE,
        skip_tokenizer_init=True, kv_store=str(directory), kv_store_size=STORE_BYTES, core_restart_limit=num_rounds + 1,
    )  # fmt: skip
    config = args.create_engine_config("serving")
    client = await asyncio.to_thread(AsyncMPClient, config, log_stats=True)
    async with AsyncLLM(config, client=client) as llm:
        metrics = llm.pipeline.stats.metrics
        assert metrics is not None

        def value(name: str, *labels: str) -> float:
            return metrics.snapshot().value(name, *labels)

        streams = [_Stream() for _ in range(NUM_LIVE)]
        readers = [asyncio.create_task(stream.read(llm, number)) for number, stream in enumerate(streams)]
        wanted = NUM_LIVE * (LIVE_TOKENS // BLOCK_SIZE)
        while not all(stream.stamps for stream in streams) or value("quire_kv_saved_blocks") < wanted:
            await asyncio.sleep(0.05)
        rows: list[tuple[float, ...]] = []
        for number in range(num_rounds):
            await asyncio.sleep(2.0 if number else 1.0)
            pid, lengths = client.core_pid, [LIVE_TOKENS + len(stream.stamps) for stream in streams]
            assert pid is not None
            hits, restarts = value("vllm:external_prefix_cache_hits"), value("quire_engine_restarts")
            killed_at = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while value("quire_engine_restarts") == restarts or not client.is_ready:
                await asyncio.sleep(0.001)
            ready_at = time.perf_counter()
            while any(stream.stamps[-1] < ready_at for stream in streams):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.5)
            waits = [next(stamp for stamp in stream.stamps if stamp >= ready_at) - ready_at for stream in streams]
            again = sum(lengths) - (value("vllm:external_prefix_cache_hits") - hits)
            print(
                f"ready again {ready_at - killed_at:.2f} s after the kill; next tokens {min(waits):.3f} to "
                f"{max(waits):.3f} s after that; {again:.0f} of {sum(lengths)} tokens computed again",
                flush=True,
            )
            rows.append((ready_at - killed_at, min(waits), max(waits), again / sum(lengths)))
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    ready, first, last, share = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"{NUM_LIVE} requests of {LIVE_TOKENS} tokens, medians of {num_rounds}: ready {ready:.2f} s after the kill")
    print(
        f"next tokens {first:.2f} to {last:.2f} s after that (goal: 0.5); slowest of all {max(r[2] for r in rows):.2f}"
    )
    print(f"{share:.2%} of the tokens were computed again (goal: 1 % and parts of {NUM_LIVE} blocks)")
    shutil.rmtree(directory, ignore_errors=True)


# -- faults ---------------------------------------------------------------------------------------------------------

FAULT_TOKENS, NUM_FAULTY = 1024, 14
FAULTS = ("none", "slow", "hung", "damaged", "full")
SLOW_S = 0.013
"""A record of 192 KiB of `half` takes 0.13 ms from the page cache with two threads."""


def serve_faulty(model: Path, directory: Path | None) -> None:
    """Is the body of a process of its own: reads seeds, and prints seconds to the first token and cached tokens."""
    llm = make_llm(model, directory)
    time_first_token(llm, 256, seed=99)  # the first request of a process pays for more than its prompt
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, _, cached = time_first_token(llm, FAULT_TOKENS, seed=int(line))
        print(json.dumps([seconds, cached]), flush=True)


class _Server:
    """A process of `serve_faulty`."""

    def __init__(self, model: Path, directory: Path | None, fault: str = "none") -> None:
        command = [sys.executable, "-m", "benchmarks.kv_goals", "--model", str(model), "--faulty"]
        command += [] if directory is None else ["--dir", str(directory)]
        points = {"slow": f"kv.read=sleep({SLOW_S})", "hung": "kv.read=sleep(600)"}
        environment = {**os.environ, "QUIRE_FAILPOINTS": points.get(fault, "")}

        def limit_files() -> None:
            if fault == "full":  # a file cannot grow beyond this: what writing to a full disk does
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=limit_files,
            start_new_session=True,
        )  # fmt: skip
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def ask(self, seed: int) -> tuple[float, int]:
        """Returns the seconds to the first token of a prompt, and its cached tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        seconds, cached = json.loads(self._read())
        return seconds, cached

    def close(self) -> None:
        """Kills the process and its core."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def damage(directory: Path) -> None:
    """Changes a byte of the payload of each record."""
    store = StoreDirectory.open(directory, STORE_BYTES)
    for extent in store.list_extents():
        descriptor = open_extent(store.descriptor, extent.name, is_writable=True)
        for entry in follow(descriptor, 0, bytes.fromhex(extent.namespace)):
            offset = entry.offset + entry.head_bytes + 100
            byte = os.pread(descriptor, 1, offset)[0] ^ 1
            os.pwrite(descriptor, bytes([byte]), offset)
        os.close(descriptor)
    store.close()


def measure_faults(model: Path, directory: Path, faults: Sequence[str] = FAULTS) -> None:
    """Each prompt goes to the engine with the fault and to one without a store, in turns: how fast the machine is
    changes both alike."""
    shutil.rmtree(directory, ignore_errors=True)
    server = _Server(model, directory)
    for number in range(NUM_FAULTY):  # stores them
        server.ask(1 + number)
    time.sleep(2.0)
    server.close()
    print(f"{NUM_FAULTY} prompts of {FAULT_TOKENS} tokens; the slowest of {NUM_FAULTY} stands for p99\n")
    print(
        "| store | median | slowest | without: median | slowest | goal | tokens read |\n|---|--:|--:|--:|--:|--:|--:|"
    )
    without = _Server(model, None)
    for number, fault in enumerate(faults):
        if fault == "damaged":
            damage(directory)
        with_ = _Server(model, directory, fault)
        found: list[tuple[float, int]] = []
        computed: list[float] = []
        for i in range(NUM_FAULTY):
            stored = 1000 + i if fault == "full" else 1 + i
            found.append(with_.ask(stored))
            computed.append(without.ask(10_000 + 100 * number + i)[0])
        with_.close()
        seconds, worst = [value for value, _ in found], max(computed)
        print(
            f"| {fault if fault != 'none' else 'good'} | {statistics.median(seconds):.3f} s | {max(seconds):.3f} s "
            f"| {statistics.median(computed):.3f} s | {worst:.3f} s | {1.25 * worst + 0.1:.3f} s "
            f"| {sum(tokens for _, tokens in found)} |",
            flush=True,
        )
    without.close()
    shutil.rmtree(directory, ignore_errors=True)


# -- saves ----------------------------------------------------------------------------------------------------------

SMALL_BYTES = 256 << 20
SAVE_TOKENS, NUM_SAVED_PROMPTS = 2048, 24


def measure_saves(model: Path, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    llm = make_llm(model, directory, kv_store_size=SMALL_BYTES, disable_log_stats=False)
    largest, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not is_over.wait(0.002):
            total = 0
            for path in directory.glob("*.kvx"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
            largest = max(largest, total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompts = [make_prompt(SAVE_TOKENS, seed) for seed in range(NUM_SAVED_PROMPTS)]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    is_over.set()
    watcher.join()
    metrics = llm.llm_engine.pipeline.stats.metrics
    assert metrics is not None
    snapshot = metrics.snapshot()
    family = snapshot.find("quire_kv_save_lag_seconds")
    counts = [sum(values) for values in zip(*(series.counts for series in family.series), strict=True)]
    bounds, total, seen, p99 = [*family.bounds, float("inf")], sum(counts), 0, float("inf")
    for bound, number in zip(bounds, counts, strict=True):
        seen += number
        if seen >= 0.99 * total:
            p99 = bound
            break
    saved, dropped = snapshot.value("quire_kv_saved_blocks"), snapshot.value("quire_kv_saves_dropped")
    print(
        f"{NUM_SAVED_PROMPTS * SAVE_TOKENS} tokens in {seconds:.1f} s: {saved:.0f} blocks saved, {dropped:.0f} dropped"
    )
    print(f"from computed to saved: 99 % of {total} saves within {p99:g} s (goal: 1)")
    print(f"largest size of {SMALL_BYTES} bytes allowed: {largest} ({largest / SMALL_BYTES:.1%})")
    llm.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


# -- index ----------------------------------------------------------------------------------------------------------

NUM_INDEXED, RECORDS_PER_EXTENT = 1_000_000, 333
"""Blocks of `half` fill an extent of 64 MiB with so many records."""
PAYLOAD_BYTES = 24 * 8192


def make_large_directory(directory: Path) -> tuple[StoreDirectory, list[bytes]]:
    """Returns a directory of sealed extents whose payloads are holes, and the digests of a prompt of 8,192 tokens."""
    store = StoreDirectory.open(directory, 1 << 50)
    fingerprint, rng = bytes(32), random.Random(0)
    header = make_header(fingerprint, bytes(32), bytes(32), 0, range(BLOCK_SIZE), PAYLOAD_BYTES, b"")
    head_bytes, chain = header.header_bytes + TAG_BYTES, []
    for first in range(0, NUM_INDEXED, RECORDS_PER_EXTENT):
        number = min(RECORDS_PER_EXTENT, NUM_INDEXED - first)
        digests = [rng.randbytes(32) for _ in range(number)]
        chain += digests[: max(0, 8192 // BLOCK_SIZE - 1 - len(chain))]
        entries = [
            Entry(digest, 0, index * (head_bytes + PAYLOAD_BYTES), head_bytes, PAYLOAD_BYTES)
            for index, digest in enumerate(digests)
        ]
        name = f"{fingerprint.hex()[:16]}-1-{first}.kvx"
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        write_table(descriptor, store.key, fingerprint, entries)
        os.close(descriptor)
    return store, chain


def measure_index(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    store, chain = make_large_directory(directory)
    gc.collect()
    before = _resident_bytes()
    index = StoreIndex(store, bytes(32))
    start = time.perf_counter()
    index.scan()
    first_s = time.perf_counter() - start
    gc.collect()
    resident = _resident_bytes() - before
    start = time.perf_counter()
    index.scan()
    again_s = time.perf_counter() - start
    assert index.num_blocks == NUM_INDEXED, index.num_blocks
    request: Any = SimpleNamespace(num_tokens=8192, block_hashes=[*chain, bytes(32)], lora_request=None)
    specs = [FullAttentionSpec(BLOCK_SIZE, 2, 64)]
    times = []
    for _ in range(200):
        start = time.perf_counter()
        found = find_longest_match(specs, request, 0, lambda group, digest: index.contains(digest, group))
        times.append(time.perf_counter() - start)
    assert found == len(chain) * BLOCK_SIZE, found
    num_extents = -(-NUM_INDEXED // RECORDS_PER_EXTENT)
    print(f"{NUM_INDEXED} blocks in {num_extents} extents: first scan {first_s:.2f} s (goal: 1), later {again_s:.3f} s")
    print(f"memory: {resident / 1e6:.0f} MB (goal: 100)")
    print(f"look-up of {found} tokens: {1e3 * statistics.median(times):.3f} ms (goal: 0.5)")
    store.close()
    shutil.rmtree(directory, ignore_errors=True)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- steps ----------------------------------------------------------------------------------------------------------

NUM_DECODING, NUM_STEPS, PROMPT_BLOCKS, NUM_PROMPTS = 64, 1000, 128, 300


class _Loop:
    """A scheduler without a model, and with a store that can be taken away. Saves end at once, and their reports come
    between steps."""

    def __init__(self, directory: Path) -> None:
        group = KVCacheGroupSpec(["layer"], FullAttentionSpec(BLOCK_SIZE, 2, 64))
        caches = KVCacheConfig(1 << 15, [], [group])
        limits = SchedulerConfig(max_num_batched_tokens=PROMPT_BLOCKS * BLOCK_SIZE + NUM_DECODING, max_num_seqs=256)
        self.scheduler = Scheduler(caches, limits, max_model_len=1 << 20, enable_caching=True, log_stats=True)
        executor: Any = SimpleNamespace(send_transfers=lambda orders: None, register_transfer_callback=lambda put: None)
        self._link = TransferLink(executor, lambda: None)
        config = EngineArgs("demo", kv_store=str(directory), kv_store_size=STORE_BYTES).create_engine_config()
        connector = StoreScheduler(config, caches)
        identity = {"fingerprint": bytes(32), "generation": 0, "payload_bytes": [1]}  # one byte: no limit of the rate
        connector.update_connector_output(KVConnectorOutput(info=identity))

        def connect(manager: KVCacheManager) -> KVExchange:
            return KVExchange(connector, manager, self._link, cost=LoadCost(12288.0), max_pinned_blocks=1 << 14)

        self._exchange = self.scheduler.connect(connect)
        self._on_full_blocks = self.scheduler.kv_cache_manager.on_full_blocks
        self._num_prompts = 0

    def connect(self, *, has_store: bool) -> None:
        """Gives the scheduler its store back, or takes it away. No save is under way."""
        scheduler = self.scheduler
        scheduler.exchange = self._exchange if has_store else NoExchange()
        scheduler.waiting.gates = self._exchange.gates if has_store else ()
        scheduler.kv_cache_manager.on_full_blocks = self._on_full_blocks if has_store else None

    def step(self) -> float:
        """Returns the processor seconds of the scheduler's part of a step, with what the core asks before it."""
        scheduler = self.scheduler
        start = time.thread_time()
        assert scheduler.has_requests()
        assert not scheduler.is_blocked()
        assert scheduler.has_requests()
        output = scheduler.schedule()
        seconds = time.thread_time() - start
        req_ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(req_ids, [[5] for _ in req_ids])
        if output.kv_connector_metadata is not None:
            for save in output.kv_connector_metadata.saves:
                self._link.put(KVConnectorOutput(saves=[SaveResult(save.save_id, len(save.blocks))]))
        start = time.thread_time()
        self.scheduler.update_from_output(output, result)
        return seconds + time.thread_time() - start

    def add(self, num_tokens: int, max_tokens: int | None) -> None:
        self._num_prompts += 1
        prompt = list(range(self._num_prompts << 20, (self._num_prompts << 20) + num_tokens))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = EngineCoreRequest(f"request {self._num_prompts}", prompt, params, None, time.time())
        self.scheduler.add_request(Request(request, make_block_hasher(BLOCK_SIZE)))

    def close(self) -> None:
        self._exchange.shutdown()


def measure_steps(directory: Path) -> None:
    """One scheduler has the store by turns: two would differ by where their objects lie, by up to 3 us a step."""
    shutil.rmtree(directory, ignore_errors=True)
    loop = _Loop(directory)
    times: dict[tuple[str, bool], list[float]] = {}

    def note(what: str, has_store: bool, seconds: float) -> None:
        times.setdefault((what, has_store), []).append(seconds)

    gc.collect()
    gc.freeze()
    for number in range(2 * NUM_PROMPTS):
        has_store = number % 2 == 1
        loop.connect(has_store=has_store)
        loop.add(PROMPT_BLOCKS * BLOCK_SIZE, 3)
        note("prompt", has_store, sum(loop.step() for _ in range(3)))  # fills blocks, sends their save, has its end
    loop.connect(has_store=True)
    for _ in range(NUM_DECODING):
        loop.add(1, None)
    for _ in range(4):
        loop.step()
    for number in range(5, 2 * NUM_STEPS):
        place, in_turn = number % BLOCK_SIZE, number // BLOCK_SIZE % 2 == 1
        if place < 3:  # all requests fill a block; its save is sent; it has ended
            if place == 0:
                loop.connect(has_store=in_turn)
                note("filling", in_turn, 0.0)
            seconds = loop.step()
            if ("filling", in_turn) in times:
                times["filling", in_turn][-1] += seconds
        else:
            has_store = not has_store  # a round has 13 of these: each place in it has its turn
            loop.connect(has_store=has_store)
            note("step", has_store, loop.step())
    loop.connect(has_store=True)
    loop.close()
    more = {}
    for what in ("step", "prompt", "filling"):
        more[what] = 1e6 * (statistics.median(times[what, True]) - statistics.median(times[what, False]))
    whole = 1e6 * statistics.median(times["step", False])
    print(f"a step of {NUM_DECODING} requests without hits: {more['step']:.2f} us more than {whole:.0f} (goal: 2)")
    for what, label, number in (
        ("prompt", "of a prompt", PROMPT_BLOCKS),
        ("filling", "that decoding fills", NUM_DECODING),
    ):
        print(f"each block {label}: {(more[what] - 3 * more['step']) / number:.2f} us (goal: 1)")
    shutil.rmtree(directory, ignore_errors=True)


# -- events ---------------------------------------------------------------------------------------------------------

EVENT_BLOCKS, EVENT_ROUNDS, BLOCKS_PER_STEP = 100_000, 5, 128


def _fill_pool(pool: BlockPool, requests: Sequence[Any], batches: list[Any]) -> list[float]:
    """Registers the blocks of all requests; `batches` gets their changes. Returns the seconds of each request."""
    seconds = []
    for request in requests:
        number = len(request.block_hashes)
        table = [pool.get_new_blocks(number)]
        start = time.perf_counter()
        pool.cache_full_blocks(request, table, range(number), BLOCK_SIZE, None)
        if pool.changes is not None:
            batches.append(pool.changes.take())
        seconds.append(time.perf_counter() - start)
    return seconds


def _empty_pool(pool: BlockPool) -> list[float]:
    """Evicts all blocks, `BLOCKS_PER_STEP` at a time. Returns the seconds of each time."""
    seconds = []
    for first in range(1, len(pool.blocks), BLOCKS_PER_STEP):
        blocks = pool.blocks[first : first + BLOCKS_PER_STEP]
        start = time.perf_counter()
        pool.evict_blocks(blocks)
        if pool.changes is not None:
            pool.changes.take()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_events(directory: Path) -> None:
    rng, requests = random.Random(0), []
    for number in range(EVENT_BLOCKS // BLOCKS_PER_STEP):
        tokens = [rng.randrange(30_000) for _ in range(BLOCKS_PER_STEP * BLOCK_SIZE)]
        hashes: list[bytes] = []
        for index in range(BLOCKS_PER_STEP):
            parts = tuple(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            hashes.append(hash_block(hashes[-1] if hashes else None, parts, None))
        requests.append(
            SimpleNamespace(
                request_id=str(number),
                all_token_ids=tokens,
                block_hashes=hashes,
                lora_request=None,
                lora_start=0,
                cache_salt=None,
                prompt_embeds=None,
            )
        )
    num_blocks = len(requests) * BLOCKS_PER_STEP
    costs: dict[str, list[float]] = {}
    for _ in range(EVENT_ROUNDS):
        for changes in (None, BlockChanges()):
            pool = BlockPool(num_blocks + 2)
            pool.changes = changes
            for what, times in (("stored", _fill_pool(pool, requests, [])), ("removed", _empty_pool(pool))):
                costs.setdefault(f"{what} {changes is not None}", []).append(statistics.median(times))
    for what in ("stored", "removed"):
        more = statistics.median(costs[f"{what} True"]) - statistics.median(costs[f"{what} False"])
        print(f"on the core's loop: {1e6 * more / BLOCKS_PER_STEP:.2f} us for each block {what} (goal: 1)")
    directory.mkdir(parents=True, exist_ok=True)
    endpoint = f"ipc://{(directory / 'events').absolute()}"
    publisher = KVEventPublisher(
        KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint), [FullAttentionSpec(BLOCK_SIZE, 2, 64)]
    )
    command = [sys.executable, "-m", "benchmarks.kv_goals", "--subscribe", str(num_blocks), endpoint]
    subscriber = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert subscriber.stdout is not None
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: [heard.put(line) for line in subscriber.stdout or ()], daemon=True).start()
    while heard.empty():  # a subscription takes a moment
        publisher.publish(_one_change(requests[0]))
        time.sleep(0.01)
    publisher.publish([Cleared.ALL])  # what follows is counted
    batches: list[Any] = []
    pool = BlockPool(num_blocks + 2)
    pool.changes = BlockChanges()
    _fill_pool(pool, requests, batches)
    start = time.monotonic()
    for batch in batches:
        publisher.publish(batch)
    heard.get()
    seconds = float(heard.get(timeout=60)) - start
    publisher.close()
    subscriber.wait()
    print(f"to a subscriber: {num_blocks / seconds:,.0f} blocks/s (goal: 100,000)")
    shutil.rmtree(directory, ignore_errors=True)


def _one_change(request: Any) -> Any:
    changes = BlockChanges()
    changes.on_stored(request, 0, 0, request.all_token_ids[:BLOCK_SIZE], None)
    return changes.take()


def subscribe(endpoint: str, num_blocks: int) -> None:
    """Is the body of a process of its own: prints a line with the first message, and the time (monotonic) when
    `num_blocks` have come since the cache was cleared."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    socket.subscribe(b"")
    count, is_first = 0, True
    while count < num_blocks:
        for event in msgspec.msgpack.decode(socket.recv_multipart()[2])[1]:
            count = 0 if event["type"] == "AllBlocksCleared" else count + len(event.get("block_hashes", ()))
        if is_first:
            is_first = False
            print("subscribed", flush=True)
    print(time.monotonic(), flush=True)
    context.destroy(0)


# -- peers ----------------------------------------------------------------------------------------------------------

PEER_TOKENS = 4096
PEER_NAMES = ("quire", "vllm", "llamacpp")


def measure_peers(model: str, directory: Path, names: Sequence[str], limit_s: float, *, is_once: bool) -> None:
    """Each engine answers a prompt, is killed, is started again, and answers it again. `is_once`: one start of each;
    what a start before it has left in `directory` is its past."""
    if not is_once:
        shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    results_file = directory / "results.json"
    results: dict[str, list[list[float]]] = json.loads(results_file.read_text()) if results_file.exists() else {}
    place = Place(DEFAULT_HOME, tuple(sorted(os.sched_getaffinity(0))), kv_cache_gib=4.0)
    print(f"| {PEER_TOKENS} tokens | first token | after a restart | start and first token then |\n|---|--:|--:|--:|")
    for name in names:
        why = PEERS[name].missing(place, model)
        starts = results.setdefault(name, [])
        while why is None and len(starts) < 2:
            try:
                starts.append(list(run_peer(place, name, model, directory, limit_s)))
            except RuntimeError as e:
                why = str(e)
            results_file.write_text(json.dumps(results))
            if is_once:
                break
        if why is not None or len(starts) < 2:
            print(f"| {PEERS[name].title} | {why or f'{starts[0][0]:.2f} s'} | | |", flush=True)
            continue
        (cold, _), (warm, load_s) = starts
        print(f"| {PEERS[name].title} | {cold:.2f} s | {warm:.2f} s | {load_s + warm:.1f} s |", flush=True)
    if not is_once:
        shutil.rmtree(directory, ignore_errors=True)


def run_peer(place: Place, name: str, model: str, directory: Path, limit_s: float) -> tuple[float, float]:
    """Returns the seconds to the first token, and those of loading. The engine is killed then. Raises RuntimeError if
    it fails, or has not started or answered after `limit_s`."""
    peer = PEERS[name]
    command = [*peer.driver_command(place, model), "--max-model-len", str(PEER_TOKENS + 64)]
    settings: dict[str, Any] = {"llm": {}}
    if name == "quire":
        settings["llm"] = {"kv_store": str(directory / "store"), "kv_store_size": STORE_BYTES}
    slot_file = {"slot_file": str(directory / "slot.bin")} if name == "llamacpp" else {}
    environment = {**peer.full_environment(place), "VERSUS_SETTINGS": json.dumps(settings)}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip

    def read() -> dict[str, Any]:
        alarm = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
        alarm.start()
        line = process.stdout.readline() if process.stdout is not None else ""
        alarm.cancel()
        answer: dict[str, Any] = json.loads(line or f'{{"error": "no answer in {limit_s:g} s, or it has ended"}}')
        if "error" in answer:
            raise RuntimeError(f"{peer.title}: {answer['error']}")
        return answer

    assert process.stdin is not None
    try:
        load_s = read()["load_s"]
        found = 0.0
        for tokens, seed, more in ((64, 5, {}), (PEER_TOKENS, 6, slot_file)):  # the first pays for more than its prompt
            prompt = make_prompt(tokens, seed)["prompt_token_ids"]
            process.stdin.write(json.dumps({"requests": [[prompt, 2]], "prefix": 0, **more}) + "\n")
            process.stdin.flush()
            found = read()["ttft_s"]
        time.sleep(2.0)  # the last blocks are stored
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return found, load_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=("kill", "faults", "saves", "index", "steps", "events", "peers", [])
    )
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--model", default="half")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="those of the part faults")
    parser.add_argument("--peers", default=",".join(PEER_NAMES), help="of `peers`, by commas")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for a start of `peers`, and for each answer")
    parser.add_argument("--once", action="store_true", help="one start of each of `peers`; the next is the restart")
    parser.add_argument("--faulty", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--subscribe", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    directory = args.dir or Path("kv-goals-benchmark")
    if args.subscribe is not None:
        subscribe(args.subscribe[1], int(args.subscribe[0]))
        return
    if args.faulty:
        serve_faulty(Path(args.model), args.dir)
        return
    if "kill" in args.parts:
        asyncio.run(measure_kill(find_checkpoint(args.model), directory))
    if "faults" in args.parts:
        measure_faults(find_checkpoint(args.model), directory, args.faults)
    if "saves" in args.parts:
        measure_saves(find_checkpoint(args.model), directory)
    if "index" in args.parts:
        measure_index(directory)
    if "steps" in args.parts:
        measure_steps(directory)
    if "events" in args.parts:
        measure_events(directory)
    if "peers" in args.parts:
        measure_peers(args.model, directory, args.peers.split(","), args.limit_s, is_once=args.once)


if __name__ == "__main__":
    main()

"""Measures the cost of a dashboard snapshot to the engine's loop, for caches of several sizes full of requests.

    python benchmarks/snapshot_cost.py

Prints the CPU time of `Scheduler.make_snapshot`, median and worst of 200, and the size of the snapshot.
"""

from __future__ import annotations

import time

import msgspec

from quire.config.engine import SchedulerConfig
from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.request import Request
from quire.engine.sched.scheduler import Scheduler
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

BLOCK_SIZE = 16
REPEATS = 200
CASES = ((1_000, 8), (10_000, 16), (10_000, 256), (100_000, 256))
"""Pairs of (blocks, requests)."""


def make_full_scheduler(num_blocks: int, num_requests: int) -> Scheduler:
    """Returns a scheduler with all blocks in use, by equal requests that have computed their prompts."""
    num_tokens = (num_blocks - 1) // num_requests * BLOCK_SIZE - 1
    group = KVCacheGroupSpec(["layer"], FullAttentionSpec(BLOCK_SIZE, 1, 8, "float32"))
    scheduler = Scheduler(
        KVCacheConfig(num_blocks, [], [group]),
        SchedulerConfig(max_num_batched_tokens=num_blocks * BLOCK_SIZE, max_num_seqs=num_requests),
        max_model_len=num_tokens + 2,
        enable_caching=True,
        log_stats=False,
    )
    hasher = make_block_hasher(BLOCK_SIZE)
    for number in range(num_requests):
        prompt = [number, *range(num_tokens - 1)]
        request = EngineCoreRequest(f"request-{number}", prompt, SamplingParams(), None, arrival_time=float(number))
        scheduler.add_request(Request(request, hasher))
    scheduler.schedule()
    return scheduler


def main() -> None:
    print(f"{'blocks':>9} {'in use':>9} {'requests':>9} {'median ms':>10} {'worst ms':>9} {'KiB':>7}")
    for num_blocks, num_requests in CASES:
        scheduler = make_full_scheduler(num_blocks, num_requests)
        times = []
        for _ in range(REPEATS):
            start = time.thread_time()
            snapshot = scheduler.make_snapshot()
            times.append(1000 * (time.thread_time() - start))
        times.sort()
        size = len(msgspec.msgpack.encode(snapshot)) / 1024
        num_used = num_blocks - 1 - snapshot.blocks.num_free
        counts = f"{num_blocks:>9,} {num_used:>9,} {num_requests:>9,}"
        print(f"{counts} {times[REPEATS // 2]:>10.2f} {times[-1]:>9.2f} {size:>7.0f}")


if __name__ == "__main__":
    main()

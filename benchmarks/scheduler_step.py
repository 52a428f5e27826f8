"""Measures the scheduler's step: schedule + update_from_output at a constant number of decoding requests.

No model runs: the result of each step is made up. Times are CPU times of this process, so that a busy machine matters
less. Half of the runs let all requests cross a block boundary in the same step, the worst case; the other half spread
them. With --blocked-prefix N the head of the waiting queue is too large to be admitted; its look-up in every step finds
N tokens that a running request has cached.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from quire.config.engine import SchedulerConfig
from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.request import Request
from quire.engine.sched.scheduler import Scheduler
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.execution import ModelRunnerOutput
from quire.wire.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

BLOCK_SIZE = 16
PROMPT_LEN = 128
OUTPUT_LEN = 1472
"""Largest number of steps."""


def make_request(name: str, prompt: list[int]) -> Request:
    """Returns a request that never ends."""
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    return Request(EngineCoreRequest(name, prompt, params, None, time.time()), make_block_hasher(BLOCK_SIZE))


def make_decoding_scheduler(num_requests: int, spread: bool, blocked_prefix: int) -> tuple[Scheduler, list[str]]:
    """Returns a scheduler whose requests have computed their prompts, and their ids."""
    group = KVCacheGroupSpec(["layer"], FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64))
    num_blocks = (num_requests * (PROMPT_LEN + OUTPUT_LEN) + blocked_prefix) // BLOCK_SIZE
    scheduler = Scheduler(
        KVCacheConfig(num_blocks, [], [group]),
        SchedulerConfig(
            max_num_batched_tokens=num_requests * PROMPT_LEN * 2 + blocked_prefix,
            max_num_seqs=num_requests + bool(blocked_prefix),
        ),
        max_model_len=2 * blocked_prefix + num_blocks * BLOCK_SIZE + 2,
        enable_caching=True,
        log_stats=True,
    )
    for i in range(num_requests):
        length = PROMPT_LEN + (i % BLOCK_SIZE if spread else 0) + (blocked_prefix if i == 0 else 0)
        scheduler.add_request(make_request(f"request-{i}", list(range(i * 1_000_000, i * 1_000_000 + length))))
    output = scheduler.schedule()
    req_ids = list(output.num_scheduled_tokens)
    scheduler.update_from_output(output, ModelRunnerOutput(req_ids, [[5] for _ in req_ids]))
    if blocked_prefix:
        tail = list(range(-num_blocks * BLOCK_SIZE, 0))
        scheduler.add_request(make_request("blocked", [*range(blocked_prefix), *tail]))
    return scheduler, req_ids


def measure(num_requests: int, num_steps: int, spread: bool, blocked_prefix: int) -> list[float]:
    """Returns the CPU seconds of each step."""
    scheduler, req_ids = make_decoding_scheduler(num_requests, spread, blocked_prefix)
    gc.collect()
    gc.freeze()
    seconds = []
    for _ in range(num_steps):
        result = ModelRunnerOutput(req_ids, [[5] for _ in req_ids])
        start = time.process_time()
        scheduler.update_from_output(scheduler.schedule(), result)
        seconds.append(time.process_time() - start)
    assert scheduler.get_request_counts() == (num_requests, int(blocked_prefix > 0))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--blocked-prefix", type=int, default=0, metavar="N")
    args = parser.parse_args()
    for spread in (False, True):
        ms = [s * 1e3 for s in measure(args.requests, args.steps, spread, args.blocked_prefix)]
        boundaries = "spread" if spread else "aligned"
        print(
            f"{args.requests} decoding requests, block boundaries {boundaries}: "
            f"mean {statistics.mean(ms):.2f} ms, median {statistics.median(ms):.2f} ms, worst {max(ms):.2f} ms"
        )


if __name__ == "__main__":
    main()

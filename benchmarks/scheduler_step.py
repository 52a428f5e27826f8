"""What the scheduler costs per step: schedule + update_from_output at a constant number of decoding requests.

No model runs: the result of each step is made up. CPU time of this process, so that a busy machine matters less.
Half of the runs let all requests cross a block boundary in the same step, the worst case; the other half spread them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from quire.config.scheduler import SchedulerConfig
from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.request import Request
from quire.engine.sched.scheduler import Scheduler
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.execution import ModelRunnerOutput
from quire.wire.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

BLOCK_SIZE = 16
PROMPT_LEN = 128


def make_decoding_scheduler(num_requests: int, spread: bool) -> tuple[Scheduler, list[str]]:
    """A scheduler whose requests have computed their prompts, and their ids."""
    group = KVCacheGroupSpec(["layer"], FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64))
    scheduler = Scheduler(
        KVCacheConfig(100 * num_requests, [], [group]),
        SchedulerConfig(max_num_batched_tokens=num_requests * PROMPT_LEN * 2, max_num_seqs=num_requests),
        max_model_len=1600,
        enable_caching=True,
        log_stats=True,
    )
    hasher = make_block_hasher(BLOCK_SIZE)
    for i in range(num_requests):
        length = PROMPT_LEN + (i % BLOCK_SIZE if spread else 0)
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        prompt = list(range(i * 1000, i * 1000 + length))
        scheduler.add_request(Request(EngineCoreRequest(f"request-{i}", prompt, params, None, time.time()), hasher))
    output = scheduler.schedule()
    req_ids = list(output.num_scheduled_tokens)
    scheduler.update_from_output(output, ModelRunnerOutput(req_ids, [[5] for _ in req_ids]))
    return scheduler, req_ids


def measure(num_requests: int, num_steps: int, spread: bool) -> list[float]:
    """CPU seconds of each step."""
    scheduler, req_ids = make_decoding_scheduler(num_requests, spread)
    gc.collect()
    gc.freeze()
    seconds = []
    for _ in range(num_steps):
        result = ModelRunnerOutput(req_ids, [[5] for _ in req_ids])
        start = time.process_time()
        scheduler.update_from_output(scheduler.schedule(), result)
        seconds.append(time.process_time() - start)
    assert len(scheduler.running) == num_requests
    return seconds


def main() -> None:
    """Print mean, median and worst milliseconds per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=320)
    args = parser.parse_args()
    for spread in (False, True):
        ms = [s * 1e3 for s in measure(args.requests, args.steps, spread)]
        boundaries = "spread" if spread else "aligned"
        print(
            f"{args.requests} decoding requests, block boundaries {boundaries}: "
            f"mean {statistics.mean(ms):.2f} ms, median {statistics.median(ms):.2f} ms, worst {max(ms):.2f} ms"
        )


if __name__ == "__main__":
    main()

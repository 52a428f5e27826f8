"""OpenVINO GenAI: its continuous-batching pipeline on the CPU device, bfloat16, KV cache in the plugin's default type.

Where prompts share a prefix, the first one's prefill is let finish before the others are handed in: the pipeline shares
only what has been computed, and would otherwise compute the prefix for each. That is in its favour.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from driver import Request, Result, Run, Setting, check_lengths, main


def load(setting: Setting) -> tuple[str, Run]:
    """Loads the pipeline."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = round(setting.kv_cache_gib)
    scheduler.max_num_seqs = setting.max_num_seqs
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": setting.threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(setting.model, scheduler, "CPU", properties)
    next_id = iter(range(1, 1 << 40))

    def run(requests: list[Request], prefix: int) -> Result:
        handles: list[Any] = []
        start = time.perf_counter()
        for ids, length in requests:
            if prefix and len(handles) == 1:
                while not handles[0].can_read():
                    pipeline.step()
            prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
            handles.append(pipeline.add_request(next(next_id), prompt, _config(length)))
        first = last = start
        while pipeline.has_non_finished_requests():
            pipeline.step()
            last = time.perf_counter()
            if first == start and handles[0].can_read():
                first = last
        check_lengths([sum(len(o.generated_ids) for o in handle.read_all()) for handle in handles], requests)
        if len(requests) > 1:
            return Result(last - start)
        return Result(last - start, first - start, (last - first) / max(1, requests[0][1] - 1))

    version = openvino_genai.__version__.split("-")[0]
    return f"openvino-genai {version}", run


def _config(length: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = length
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    sys.exit(main(load))

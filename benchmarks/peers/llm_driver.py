"""Quire and vLLM: one driver, as they have one interface. The interpreter decides: whose package it has is run.

Prompts are token ids and nothing is detokenized. One request is stepped by hand and timed token by token; many go
through `LLM.generate`. What is not given here is each engine's default, or in VERSUS_SETTINGS, a JSON object: `llm` and
`params` (arguments of `LLM` and of `SamplingParams`), and `one_by_one` (true: many requests are streams, too).
`adapters` of a line has a directory for each request, or null.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from driver import Request, Result, Run, Setting, check_lengths, main, timed

if os.environ.get("VERSUS_PACKAGE") == "vllm":
    import vllm as package
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind
else:
    import quire as package
    from quire import LLM, SamplingParams
    from quire.lora_request import LoRARequest
    from quire.sampling_params import RequestOutputKind

SETTINGS: dict[str, Any] = json.loads(os.environ.get("VERSUS_SETTINGS", "{}"))


def load(setting: Setting) -> tuple[str, Run]:
    """Loads the engine."""
    options: dict[str, Any] = dict(SETTINGS.get("llm", {}))
    if package.__name__ == "quire":  # vLLM's size is in the environment: VLLM_CPU_KVCACHE_SPACE
        options["kv_cache_memory_bytes"] = int(setting.kv_cache_gib * 2**30)
    llm = LLM(
        setting.model,
        dtype=setting.dtype,
        max_model_len=setting.max_model_len,
        max_num_seqs=setting.max_num_seqs,
        skip_tokenizer_init=True,
        **options,
    )

    ids: dict[str, int] = {}

    def run(requests: list[Request], prefix: int, adapters: Sequence[str | None] = ()) -> Result:
        named = [p and LoRARequest(p, ids.setdefault(p, len(ids) + 1), p) for p in adapters or [None] * len(requests)]
        if len(requests) > 1 and SETTINGS.get("one_by_one"):
            streams = [_stream(llm.llm_engine, *pair) for pair in zip(requests, named, strict=True)]
            return Result(sum(stream.wall_s for stream in streams))
        return _stream(llm.llm_engine, requests[0], named[0]) if len(requests) == 1 else _generate(llm, requests, named)

    return f"{package.__name__} {package.__version__}", run


def _params(length: int, kind: RequestOutputKind) -> SamplingParams:
    full = {"temperature": 0.0, "max_tokens": length, "min_tokens": length, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**full, **SETTINGS.get("params", {}), "output_kind": kind})


def _check(got: list[int], requests: list[Request]) -> None:
    if SETTINGS.get("params", {}).get("ignore_eos", True):
        check_lengths(got, requests)


def _generate(llm: LLM, requests: list[Request], adapters: list[Any]) -> Result:
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids, _ in requests]
    params = [_params(length, RequestOutputKind.FINAL_ONLY) for _, length in requests]
    start = time.perf_counter()
    given = {"lora_request": adapters} if any(adapters) else {}
    outputs = llm.generate(prompts, params, use_tqdm=False, **given)
    wall_s = time.perf_counter() - start
    _check([len(o.outputs[0].token_ids) for o in outputs], requests)
    return Result(wall_s)


def _stream(engine: Any, request: Request, adapter: Any) -> Result:
    ids, length = request
    params = _params(length, RequestOutputKind.DELTA)
    start = time.perf_counter()
    engine.add_request(f"stream-{start}", {"prompt_token_ids": ids}, params, lora_request=adapter)
    stamps: list[float] = []
    num_tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids:
                stamps.append(time.perf_counter())
                num_tokens += len(output.outputs[0].token_ids)
    _check([num_tokens], [request])
    return timed(start, stamps, num_tokens)


if __name__ == "__main__":
    sys.exit(main(load))

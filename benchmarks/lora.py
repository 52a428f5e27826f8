"""LoRA adapters beside the model alone, and vLLM's, against goals, in one table.

    benchmarks/peers/setup models vllm                     # L5 needs vLLM, the others the checkpoints
    python -m benchmarks.lora [--goals L1,L4] [--models tiny] [--update-docs]
    python -m benchmarks.lora --from-json a.json b.json    # the table of earlier runs

| goal | what |
|---|---|
| L1 | an engine with `--enable-lora` and no adapter in the batch, beside one without |
| L2 | decode with 64 requests of 1, 8 and 64 adapters, beside requests without, in one engine |
| L3 | one request: decode, and a prompt of 512 tokens, with an adapter and without |
| L4 | the load of an adapter, idle and beside 64 streams; what those streams notice |
| L5 | decode with 16 requests of 8 adapters and a prompt of 512 tokens with one, beside vLLM |

Adapters have rank 16 on all linear layers, in bfloat16 with random factors, and lie in the page cache. Engines are
processes of their own, frozen while another is measured; turns go back and forth, as in `benchmarks.speculation`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.models import CACHE, SHAPES
from benchmarks.speculation import Bench, Goals, Row, in_words, per_token, ratios, report_goals, whole
from benchmarks.versus.engine import Engine, Repetition, machine_cpu_s
from quire import AsyncLLM, EngineArgs, LoRARequest, SamplingParams
from quire.cli.bench.workloads import BenchRequest, IdRange, uniform_requests
from quire.sampling_params import RequestOutputKind

RANK = 16
BATCH = 64
ADAPTERS = CACHE / "adapters"
LORA = {"enable_lora": True, "lora_memory_bytes": 3 << 30}
VLLM_LORA = {"enable_lora": True, "max_loras": 8, "max_lora_rank": RANK}
DECODE_LEN = {"tiny": 128, "half": 32}
"""Tokens of an answer: turns of about a second or two."""
WINDOW_S = 4.0
"""Seconds for which streams are watched with loads, and as long without."""
SETTLE_S = 1.0
"""Seconds before the first window."""
STREAM_LEN = 1100
"""Tokens of those streams: more than the windows last, and all of them fit into a KV cache of 1 GiB."""


# -- adapters ---------------------------------------------------------------------------------------------------------


def linear_sizes(shape: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of the linear layers of a decoder layer."""
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    head = shape.get("head_dim", hidden // heads)
    keys = shape["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (hidden, heads * head),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (heads * head, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def random_factors(shape: Mapping[str, Any], rank: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of an adapter on all linear layers, in PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(shape["num_hidden_layers"]):
        for name, (size_in, size_out) in linear_sizes(shape).items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, size_in, generator=generator).mul_(size_in**-0.5)
            b = torch.randn(size_out, rank, generator=generator).mul_(0.02)
            yield f"{module}.lora_A.weight", a.bfloat16()
            yield f"{module}.lora_B.weight", b.bfloat16()


def make_adapters(model: str, count: int, directory: Path = ADAPTERS) -> list[str]:
    """Returns the paths of adapters of a model of `benchmarks.models`. Those that are not there are written."""
    paths = [directory / f"{model}-{RANK}" / str(i) for i in range(count)]
    for seed, path in enumerate(paths):
        if path.exists():
            continue
        new = path.with_name(f"{path.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        targets = [name.rpartition(".")[2] for name in linear_sizes(SHAPES[model])]
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
        (new / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))
        save_file(dict(random_factors(SHAPES[model], RANK, seed)), new / "adapter_model.safetensors")
        new.rename(path)
    return [str(path) for path in paths]


# -- turns ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """An engine whose requests take turns through `adapters`; without any, they name none."""

    engine: Engine
    adapters: Sequence[str] = ()

    @property
    def log(self) -> Path:
        return self.engine.log

    def run(self, requests: Sequence[BenchRequest], prefix: int, limit_s: float) -> Repetition:
        if not self.adapters:
            return self.engine.run(requests, prefix, limit_s)
        named = [self.adapters[i % len(self.adapters)] for i in range(len(requests))]
        return self.engine.run(requests, prefix, limit_s, adapters=named)

    def close(self) -> None:
        self.engine.close()


def decode(model: str, count: int) -> Callable[[int], list[BenchRequest]]:
    """Returns requests that are the same in all turns: but for one token, their prompts come from the prefix cache."""
    requests = uniform_requests(0, IdRange(), count, 17, DECODE_LEN[model])
    return lambda turn: requests


def prompts(length: int) -> Callable[[int], list[BenchRequest]]:
    """Returns one request with a new prompt for each turn, to be answered with one token."""
    return lambda turn: uniform_requests(turn + 1, IdRange(), 1, length, 1)


def slower(name: str, what: str, base: list[Repetition], other: list[Repetition], seconds: Any, most: float) -> Row:
    """Returns by how many percent `other` is slower than `base`."""
    values = [100 * (1 / ratio - 1) for ratio in ratios(base, other, seconds)]
    return Row(name, what, values, most, True, " %", in_words(base, other, seconds))


# -- goals ------------------------------------------------------------------------------------------------------------


def l1(bench: Bench) -> list[Row]:
    """Compares engines with and without the flag."""
    rows = []
    for model in bench.options.models:
        engines = [bench.engine(model), bench.engine(model, llm=LORA)]
        for count, seconds in ((1, per_token), (BATCH, whole)):
            off, on = bench.turns(engines, decode(model, count), is_fresh=True)
            what = f"`{model}`, `--enable-lora` without adapters, decode, batch {count}"
            rows.append(slower("L1", what, off, on, seconds, 1.0))
        for engine in engines:
            engine.close()
    return rows


def l2(bench: Bench) -> list[Row]:
    """Decodes with 1, 8 and 64 adapters."""
    rows = []
    for model in bench.options.models:
        adapters = make_adapters(model, BATCH)
        engine = bench.engine(model, llm=LORA)
        limits = {1: 6.0, 8: 12.0, BATCH: 40.0}
        arms = [Arm(engine), *(Arm(engine, adapters[:n]) for n in limits)]
        base, *others = bench.turns(arms, decode(model, BATCH))
        for (n, most), times in zip(limits.items(), others, strict=True):
            rows.append(slower("L2", f"`{model}`, decode, batch {BATCH}, adapters: {n}", base, times, whole, most))
        engine.close()
    return rows


def l3(bench: Bench) -> list[Row]:
    """Runs one request with an adapter."""
    rows = []
    for model in bench.options.models:
        engine = bench.engine(model, llm=LORA)
        arms = [Arm(engine), Arm(engine, make_adapters(model, 1))]
        off, on = bench.turns(arms, decode(model, 1), 2 * bench.reps)
        rows.append(slower("L3", f"`{model}`, one request, one adapter, decode", off, on, per_token, 6.0))
        off, on = bench.turns(arms, prompts(512), 2 * bench.reps)
        rows.append(slower("L3", f"`{model}`, one adapter, prompt of 512 tokens", off, on, whole, 8.0))
        engine.close()
    return rows


def l4(bench: Bench) -> list[Row]:
    """Loads adapters in an engine of this process."""
    before, start = machine_cpu_s() - _own_cpu_s(), time.perf_counter()
    loads = asyncio.run(_watch_loads(bench))
    share = (machine_cpu_s() - _own_cpu_s() - before) / (time.perf_counter() - start) / len(bench.options.cpus)
    bench.neighbours = max(0.0, share)
    return loads.rows()


@dataclass
class Loads:
    """Seconds of loads, and between tokens of all streams, in windows with loads and without."""

    megabytes: float
    idle: list[float]
    busy: list[float]
    gaps: list[tuple[list[float], list[float]]]
    """Pairs of windows: without, with loads."""

    def rows(self) -> list[Row]:
        """Returns the table's rows."""
        size = f"`half`, load of {self.megabytes:.1f} MB"
        p99 = [percentile_99(b) / percentile_99(a) for a, b in self.gaps]
        added = [1e3 * (max(b) - max(a)) for a, b in self.gaps]
        both = [1e3 * statistics.median(percentile_99(pair[i]) for pair in self.gaps) for i in (0, 1)]
        most = [1e3 * max(max(pair[i]) for pair in self.gaps) for i in (0, 1)]
        return [
            Row("L4", f"{size}, idle", [1e3 * s for s in self.idle], 40.0, True, " ms", _worst(self.idle)),
            Row("L4", f"{size} beside {BATCH} streams", [1e3 * s for s in self.busy], 300.0, True, " ms",
                _worst(self.busy)),
            Row("L4", "p99 between tokens of the streams meanwhile", p99, 1.1, True,
                detail=f"{both[0]:.1f} → {both[1]:.1f} ms"),
            Row("L4", "largest gap of the streams meanwhile, added", added, 5.0, True, " ms",
                f"of all: {most[0]:.1f} → {most[1]:.1f} ms"),
        ]  # fmt: skip


def percentile_99(values: Sequence[float]) -> float:
    """Returns the value that one of a hundred exceeds."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _worst(seconds: list[float]) -> str:
    return f"{len(seconds)} loads, slowest {1e3 * max(seconds):.0f} ms" if seconds else ""


async def _watch_loads(bench: Bench) -> Loads:
    paths = make_adapters("half", 8)
    files = Path(paths[0]) / "adapter_model.safetensors"
    for path in paths:
        (Path(path) / files.name).read_bytes()  # into the page cache
    args = EngineArgs(
        str(bench.options.home / "models" / "half"), dtype="bfloat16", max_model_len=2048, skip_tokenizer_init=True,
        kv_cache_memory_bytes=int(bench.options.kv_cache_gib * 2**30), **LORA,
    )  # fmt: skip
    numbers = iter(range(1, 1 << 20))
    async with AsyncLLM.from_engine_args(args) as llm:

        async def load(path: str) -> float:
            request = LoRARequest(f"adapter {(number := next(numbers))}", number, path)
            start = time.perf_counter()
            await llm.add_lora(request)
            taken = time.perf_counter() - start
            await llm.remove_lora(number)
            return taken

        await load(paths[0])
        idle = []
        for path in paths * 2:
            idle.append(await load(path))
            await asyncio.sleep(SETTLE_S / 5)
        watch = _Streams(llm)
        streams = [asyncio.create_task(watch.run(r)) for r in uniform_requests(0, IdRange(), BATCH, 17, STREAM_LEN)]
        await watch.until_all_run()
        busy: list[float] = []
        gaps = []
        for _ in range(bench.reps):
            watch.gaps = quiet = []
            await asyncio.sleep(WINDOW_S)
            watch.gaps = disturbed = []
            end = time.perf_counter() + WINDOW_S
            while time.perf_counter() < end:
                busy.append(await load(paths[len(busy) % len(paths)]))
            gaps.append((quiet, disturbed))
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return Loads(files.stat().st_size / 1e6, idle, busy, gaps)


class _Streams:
    """Requests whose tokens are timed as they arrive."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.gaps: list[float] = []
        self._llm = llm
        self._num_running = 0
        self._all_run = asyncio.Event()

    async def until_all_run(self) -> None:
        """Waits for the first token of every stream, and a while longer."""
        await self._all_run.wait()
        await asyncio.sleep(SETTLE_S)

    async def run(self, request: BenchRequest) -> None:
        """Answers one request to its end."""
        params = SamplingParams(
            temperature=0,
            max_tokens=request.output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        last = 0.0
        prompt: Any = {"prompt_token_ids": request.prompt_token_ids}
        async for _ in self._llm.generate(prompt, params, request_id=f"stream-{id(request)}"):
            now = time.perf_counter()
            if last:
                self.gaps.append(now - last)
            else:
                self._num_running += 1
                if self._num_running == BATCH:
                    self._all_run.set()
            last = now


def _own_cpu_s() -> float:
    """Returns the processor seconds of this process and of those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def l5(bench: Bench) -> list[Row]:
    """Compares with vLLM."""
    adapters = make_adapters("half", 8)
    theirs, ours = bench.engine("half", llm=VLLM_LORA, peer="vllm"), bench.engine("half", llm=LORA)
    rows = []
    for what, arms, requests, goal in (
        ("decode, batch 16, adapters: 8", [Arm(theirs, adapters), Arm(ours, adapters)], decode("half", 16), 3.0),
        ("one adapter, prompt of 512 tokens", [Arm(theirs, adapters[:1]), Arm(ours, adapters[:1])], prompts(512), 5.0),
    ):
        a, b = bench.turns(arms, requests)
        medians = [1e3 * statistics.median(map(whole, each)) for each in (a, b)]
        detail = f"vLLM {medians[0]:,.0f}, Quire {medians[1]:,.0f} ms"
        rows.append(Row("L5", f"`half`, {what}, beside vLLM", ratios(a, b, whole), goal, detail=detail))
    return rows


GOALS: Goals = {"L1": l1, "L2": l2, "L3": l3, "L4": l4, "L5": l5}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,half", type=lambda text: text.split(","), help="of L1 to L3")
    return report_goals(parser, argv, GOALS, "lora")


if __name__ == "__main__":
    sys.exit(main())

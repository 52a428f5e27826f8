"""Quire and vLLM in turns, on a random checkpoint of every native decoder.

    benchmarks/peers/setup vllm
    python -m benchmarks.families --output families.jsonl [--only llama qwen3] [--resume] [--update-docs]
    python -m benchmarks.families --output families.jsonl --table

A checkpoint has the family's tiny test config at a modest size: 768 wide, 4 layers, 36 to 145 million parameters,
bfloat16. Both engines stay loaded and take turns, the other one frozen; a ratio is the median of the ratios of
neighbouring repetitions. One JSON line per family and engine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import re
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.versus.__main__ import PAGE
from benchmarks.versus.comparison import say
from benchmarks.versus.engine import Engine, EngineError
from benchmarks.versus.figures import IDS
from benchmarks.versus.peers import DEFAULT_HOME, PEERS, Peer, Place
from benchmarks.versus.table import update_page
from quire.cli.bench.workloads import WARMUP_REP, uniform_requests
from quire.cli.machine import cpu_facts
from quire.testing.tiny_models import FAMILIES, FAMILY_CONFIGS, make_tiny_checkpoint

SERVED = (
    *("llama", "qwen3", "qwen2", "qwen3_moe", "gpt_oss", "gemma3_text", "mistral", "gemma2", "glm4", "phi3"),
    *("deepseek_v3", "deepseek_v2", "cohere2", "cohere", "olmo2", "granite", "ernie4_5", "starcoder2", "gpt2", "gptj"),
    *("gpt_neox", "falcon", "opt", "bloom", "mpt", "stablelm", "phi", "exaone4", "mixtral", "glm4_moe", "qwen2_moe"),
)
"""Families that are measured first; the rest follows."""
STREAMS = (1, 16)
LENGTH = 64
"""Tokens in, and out, of every request."""

BASE: Mapping[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(NUM_EXPERTS, 32),
    **dict.fromkeys(CHOSEN, 4),
    **dict.fromkeys(("n_inner", "ffn_dim", "ffn_hidden_size"), 3072),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), 512),
    "attention_types": [[["global", "local"], 2]],
    "attention_heads": 12,
    "d_model": 768,
    "global_head_dim": 256,
    "head_dim": 128,
    "hidden_size_per_layer_input": 128,
    "intermediate_size_mlp": 2048,
    "kv_lora_rank": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 256,
    "moe_layer_end_index": 3,
    "n_group": 4,
    "num_attention_heads_per_layer": [12, 8, 12, 8],
    "num_global_key_value_heads": 2,
    "num_heads": 12,
    "num_layers": 4,
    "prefix_dense_intermediate_size": 2048,
    "q_lora_rank": 384,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rotary_dim": 32,
    "shared_expert_intermediate_size": 256,
    "shared_intermediate_size": 256,
    "topk_group": 2,
    "vocab_size_per_layer_input": 16384,
    "v_head_dim": 128,
    "word_embed_proj_dim": 768,
}
"""Values of keys that a family's tiny config has."""
_GEMMA = {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "query_pre_attn_scalar": 256}
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
OTHERS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "vaultgemma"), _GEMMA),
    "gpt_oss": {"head_dim": 64, "intermediate_size": 768, "num_local_experts": 16},
    "deepseek_v3": _SIGMOID,
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6},
    "glm4_moe_lite": {**_SIGMOID, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "helium": {"head_dim": 64},  # heads together are as wide as the model
    "qwen2": {"use_sliding_window": False},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
}


def sizes(family: str) -> dict[str, Any]:
    """Returns what replaces keys of the family's tiny config."""
    tiny = FAMILY_CONFIGS[family]
    size = {**BASE, **{key: SIZES[key] for key, value in tiny.items() if key in SIZES and value is not None}}
    if tiny.get("num_key_value_heads") == tiny.get("num_attention_heads", 4):
        size["num_key_value_heads"] = size["num_attention_heads"]
    if any(key in tiny for key in NUM_EXPERTS) and "moe_intermediate_size" not in tiny:
        size["intermediate_size"] = 256
    rope = tiny.get("rope_parameters", {})
    if "original_max_position_embeddings" in rope:
        size["rope_parameters"] = {**rope, "original_max_position_embeddings": 512}
    return {**size, **OTHERS.get(family, {})}


def make_checkpoint(family: str, folder: Path) -> int:
    """Writes the family's checkpoint, unless it exists; returns its number of parameters."""
    if not (folder / "config.json").exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        make_tiny_checkpoint(part, family, dtype="bfloat16", **sizes(family))
        part.rename(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2


def cause(engine: Engine, error: EngineError) -> str:
    """Returns the last exception in the engine's log that is not the driver's own, else the error."""
    lines = engine.log.read_text(errors="replace").splitlines()
    found = [m[1] for m in (re.search(r"\b(\w+(?:Error|Exception): .+)", line) for line in lines) if m]
    own = [text for text in found if "See root cause" not in text and "Engine core" not in text]
    return " ".join((own or [str(error)])[-1].split())[:300]


def start(engines: Iterable[Engine]) -> dict[str, str]:
    """Loads all and returns why an engine could not be."""
    failures = {}
    for engine in engines:
        try:
            engine.start()
            say(f"{engine.peer.name}: loaded in {engine.load_s:.0f} s")
        except EngineError as e:
            failures[engine.peer.name] = cause(engine, e)
            say(f"{engine.peer.name}: {failures[engine.peer.name]}")
    return failures


def measure(engines: Iterable[Engine], reps: int, limit_s: float) -> dict[str, dict[str, list[float]]]:
    """Returns seconds by engine and number of streams; one warm-up each, then turns, every other one backwards."""
    engines = list(engines)
    seconds: dict[str, dict[str, list[float]]] = {e.peer.name: {str(n): [] for n in STREAMS} for e in engines}
    for count in STREAMS:
        for rep in [WARMUP_REP, *range(reps)]:
            for engine in engines if rep % 2 == 0 else reversed(engines):
                result = engine.run(uniform_requests(rep, IDS, count, LENGTH, LENGTH, 5), 0, limit_s)
                if rep != WARMUP_REP:
                    seconds[engine.peer.name][str(count)].append(result.wall_s)
    return seconds


def eager(peer: Peer) -> Peer:
    """Returns vLLM without torch.compile."""
    return dataclasses.replace(peer, environment=lambda place: {**peer.environment(place), "TORCHDYNAMO_DISABLE": "1"})


def run_family(family: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the family's lines, one per engine."""
    place = Place(options.home, tuple(sorted(os.sched_getaffinity(0))), options.kv_cache_gib)
    name = f"family-{family}"
    (options.home / "models").mkdir(parents=True, exist_ok=True)
    parameters = make_checkpoint(family, options.home / "models" / name)
    with contextlib.ExitStack() as stack:

        def load(peer: Peer) -> tuple[Engine, str]:
            engine = Engine(peer, place, name, options.home / "logs" / options.output.stem)
            stack.callback(engine.close)
            return engine, start([engine]).get(peer.name, "")

        quire, quire_failed = load(PEERS["quire"])
        vllm, vllm_failed = load(PEERS["vllm"])
        is_eager = False
        if vllm_failed and re.search(r"inductor|dynamo|compile|Backend", vllm_failed, re.IGNORECASE):
            vllm, eager_failed = load(eager(PEERS["vllm"]))
            is_eager, vllm_failed = not eager_failed, eager_failed and vllm_failed
        failures = {"quire": quire_failed, "vllm": vllm_failed}
        seconds: dict[str, dict[str, list[float]]] = {}
        loaded = [engine for engine in (quire, vllm) if not failures[engine.peer.name]]
        try:
            seconds = measure(loaded, options.reps, options.limit_s)
        except EngineError as e:
            failures["vllm"] = failures["vllm"] or cause(vllm, e)  # of Quire's the message would say so
        return [
            {
                "family": family,
                "engine": engine.peer.name,
                "version": engine.version,
                "parameters": parameters,
                "eager": is_eager and engine is vllm,
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "machine": f"{cpu_facts()['cpu']}, {place.num_threads} cores",
                "load_s": engine.load_s,
                "failure": failures[engine.peer.name],
                "seconds": seconds.get(engine.peer.name, {}),
            }
            for engine in (quire, vllm)
        ]


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Returns how many times faster the first is: the median over neighbouring repetitions."""
    return statistics.median(t / o for o, t in zip(ours, theirs, strict=True))


def format_table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Returns the text for the page: conditions, the table, the losses, and what vLLM does not run."""
    by_family: dict[str, dict[str, Any]] = {}
    for line in lines:
        own = by_family.setdefault(line["family"], {})
        before = own.get(line["engine"], {}).get("seconds", {})
        merged = {count: before.get(count, []) + values for count, values in line["seconds"].items()}
        own[line["engine"]] = {**line, "seconds": merged or before}
    rows, refused, ratios = [], [], {}
    for family, own in sorted(by_family.items()):
        quire, vllm = own["quire"], own["vllm"]
        if not (quire["seconds"] and vllm["seconds"]):
            refused.append(f"| {family} | {vllm['failure'] or 'Quire: ' + quire['failure']} |".replace("\n", " "))
            continue
        cells = [family + (" (eager)" if vllm["eager"] else ""), f"{quire['parameters'] / 1e6:.0f} M"]
        for count in map(str, STREAMS):
            ours, theirs = quire["seconds"][count], vllm["seconds"][count]
            ratios[family, count] = value = ratio(ours, theirs)
            bold = "" if value >= 1 else "**"
            cells += [f"{statistics.median(s) * 1e3:.0f}" for s in (ours, theirs)] + [f"{bold}{value:.2f}×{bold}"]
        rows.append("| " + " | ".join(cells) + " |")
    first = next(iter(by_family.values()))
    middle = ", ".join(
        f"{statistics.median(v for (_, c), v in ratios.items() if c == count):.2f}× with {count}"
        for count in map(str, STREAMS)
    )
    losses = [f"{family} ({count}: {value:.2f}×)" for (family, count), value in ratios.items() if value < 1]
    head = (
        f"{max(o['quire']['date'] for o in by_family.values())}. {first['quire']['machine']}, bfloat16, "
        f"{first['quire']['version']}, {first['vllm']['version'] or 'vllm'}.\n"
        f"{len(rows)} of {len(by_family)} families were run by both; median of the ratios: {middle}."
    )
    work = [f"Quire, {count} × {LENGTH} + {LENGTH}, ms | vLLM | ratio" for count in STREAMS]
    table = [
        f"| family | size | {' | '.join(work)} |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *rows,
    ]
    words = f"Quire loses: {', '.join(losses)}." if losses else "Quire loses none of these."
    unable = ["| vLLM does not run it | its words |\n|---|---|\n" + "\n".join(refused)] if refused else []
    return "\n\n".join([head, "\n".join(table), words, *unable])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, metavar="FAMILY", help="default: all native decoders")
    parser.add_argument(
        "--output", type=Path, default=Path("families.jsonl"), help="lines are appended; a family's repetitions add up"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what the output has")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--update-docs", action="store_true", help="put the table into docs/performance.md")
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="where benchmarks/peers/setup put vLLM")
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--kv-cache-gib", type=float, default=1.0)
    parser.add_argument("--limit-s", type=float, default=120.0, help="of one repetition")
    options = parser.parse_args()
    read = functools.partial(_read, options.output)
    done = {line["family"] for line in read()} if options.resume else set()
    wanted = options.only or list(dict.fromkeys([*SERVED, *FAMILIES]))
    for family in [] if options.table else [family for family in wanted if family not in done]:
        say(family)
        lines = run_family(family, options)
        with options.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        say(format_table(lines).splitlines()[-3] if all(line["seconds"] for line in lines) else "no ratio")
    text = format_table(read())
    print(text)
    if options.update_docs:
        update_page(PAGE, text, "families")
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a result file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())

"""`quire info`: the size of a model and whether it fits this machine, before loading it and without torch.

A model of the hub that is not in the cache is not downloaded: its configuration and the headers of its weights are.

The KV cache is sized by the functions of the engine; the free memory it starts from is today's less the weights.
"""

from __future__ import annotations

import json
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.machine import read_speed
from quire.cli.option_groups import engine_options
from quire.cli.terminal import human_bytes, human_count
from quire.config.adapter import CONFIG_FILE, AdapterIndex
from quire.config.attention_layout import CachedLayer, attention_windows, cached_layers
from quire.config.checkpoint import CheckpointIndex
from quire.config.engine import EngineConfig
from quire.config.engine_args import FLAGS, EngineArgs
from quire.config.hf_config import HFConfig
from quire.config.hub import Download, is_hub_id, make_outline, plan_download
from quire.config.lora import LoRAConfig
from quire.config.model import DEMO_MODEL, DRAFT_MODEL, ModelConfig, resolve_dtype_name
from quire.config.model_impl import TRANSFORMERS
from quire.config.quantization import quantization_method, read_stored_scheme, weight_memory
from quire.config.tensor_names import TRANSPOSED, names_of, renamed
from quire.config.tokenizer_json import read_tokenizer_json
from quire.engine.kv_cache.sizing import make_kv_cache_configs, max_concurrency
from quire.errors import ClientError, ConfigError
from quire.wire.kv_cache import (
    DTYPE_BYTES,
    AnyKVCacheSpec,
    ChunkedSpec,
    FullAttentionSpec,
    LatentSpec,
    SlidingWindowSpec,
)
from quire.worker.host import available_cpu_memory, cpu_kv_cache_bytes, useful_kv_cache_bytes

EXIT_PROBLEM = 2
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that hold the number of experts."""
CACHED_BYTES = 256 << 20
"""A processor's cache may hold smaller weights; memory sets them no limit."""


def command_line() -> CommandLine:
    return CommandLine(
        "quire info",
        "Print a model's size, memory, blocks and limits on this machine, without loading it.",
        [Option(name="json", help="Print one JSON object.", is_switch=True, default=False), *engine_options()],
        Positional("model_name", "The model, as in --model."),
        "Exit code 2 if the model could not be served as asked.",
    )


def run(args: Arguments) -> int:
    """Prints the report. Returns 2 if the model could not be served as asked."""
    named = {"model": args["model_name"]} if args["model_name"] is not None else {}
    flags = {**named, **args.given_among(FLAGS)}
    engine_flags = EngineArgs(**flags)
    directory = Path(engine_flags.model).expanduser()
    if (directory / CONFIG_FILE).exists() and not (directory / "config.json").exists():
        return _print(args, describe_adapter(directory, LoRAConfig(**engine_flags.section(LoRAConfig))))
    plan = _plan(engine_flags)
    if plan is None or not plan.missing:
        report = make_report(EngineArgs(**flags).create_engine_config())
    else:
        plan.check_weights()
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_outline(plan, flags.get("hf_token"), Path(scratch))
            flags = {"served_model_name": plan.model, **flags, "model": str(folder)}
            report = make_report(EngineArgs(**flags).create_engine_config(), plan)
    return _print(args, report)


def _print(args: Arguments, report: Facts) -> int:
    print(json.dumps(report, indent=2) if args["json"] else format_report(report))
    return EXIT_PROBLEM if report["problems"] else 0


def describe_adapter(directory: Path, limits: LoRAConfig) -> Facts:
    """Returns the report on a LoRA adapter. It is not compared with a model: only the server of one can."""
    facts: Facts = {"directory": str(directory.resolve())}
    try:
        index = AdapterIndex.read(directory, limits)
    except ClientError as e:
        return {"adapter": facts, "problems": [str(e)]}
    modules = sorted({factors.module.rpartition(".")[2] for factors in index.factors})
    facts |= {
        "of_model": index.config.base_model,
        "rank": index.rank,
        "modules": ", ".join(modules),
        "matrices": len(index.factors),
        "parameters": sum(math.prod(t.shape) for f in index.factors for t in (f.a, f.b)),
        "stored_bytes": sum(t.nbytes for f in index.factors for t in (f.a, f.b)),
        "memory_bytes": index.estimated_bytes(DTYPE_BYTES["bfloat16"]),
        "begins_at": ", ".join(map(str, index.config.invocation)) or None,
        "notes": "; ".join(index.notes) or None,
    }
    return {"adapter": facts, "problems": []}


def _plan(flags: EngineArgs) -> Download | None:
    """Returns what a download of the model would fetch; None for a model that is not the hub's."""
    model = flags.model
    if model in (DEMO_MODEL, DRAFT_MODEL) or Path(model).expanduser().exists() or not is_hub_id(model):
        return None
    return plan_download(model, flags.revision, flags.hf_token, flags.download_dir)


def format_report(report: dict[str, Any]) -> str:
    """Formats the report as text."""
    lines = []
    for section, facts in report.items():
        if isinstance(facts, dict) and facts:
            lines.append(f"{section.replace('_', ' ')}:")
            lines += [f"  {name.replace('_', ' '):<24}{_shown(name, value)}" for name, value in facts.items()]
    lines += [f"problem: {problem}" for problem in report["problems"]]
    return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {human_bytes(count)}" for key, count in value.items())
    if name.endswith("bytes") or name == "bytes_per_token":
        return human_bytes(value)
    if isinstance(value, int) and not name.endswith("token"):
        return human_count(value) if name.endswith("parameters") else f"{value:,}"
    return str(value)


Facts = dict[str, Any]


def make_report(config: EngineConfig, plan: Download | None = None) -> Facts:
    """Returns sections of facts, fit for JSON. Obstacles to serving the model are listed under "problems".

    With a `plan` the model was not downloaded, and `config` is that of its outline.
    """
    model = config.model_config
    problems: list[str] = []
    report: Facts = {
        "model": {
            "name": model.name,
            "directory": None if plan is not None else str(model.model_dir),
            "architecture": model.hf_config.architecture or None,
            "does": ", ".join(model.pooling.tasks) if model.pooling is not None else "generate",
            "supported": not model.implementation.refusal,
            "implementation": model.implementation.name,
            "because": model.implementation.why,
        }
    }
    if plan is not None:
        report["download"] = {
            "files": len(plan.missing),
            "bytes": plan.missing_bytes,
            "to": str(plan.cache),
            "free_disk_bytes": plan.free_bytes,
        }
        problems += plan.obstacles()
    for name, section in (
        ("weights", _weights),
        ("shape", _shape),
        ("kv_cache", _kv_cache),
        ("capacity", _capacity),
        ("speed", _speed),
        ("sampling_defaults", _sampling_defaults),
        ("tokenizer", _tokenizer),
    ):
        try:
            report[name] = section(config, report)
        except ConfigError as e:
            if model.implementation.name != TRANSFORMERS or section is _weights:  # else: known once it is loaded
                problems.append(str(e))
    report["problems"] = list(dict.fromkeys(_unsupported(model) + problems))
    return report


def kv_cache_specs(hf: HFConfig, block_size: int, dtype: str) -> dict[str, AnyKVCacheSpec]:
    """Returns the cache of each layer as the worker will report it."""
    return {f"layer {i}": _cache_spec(layer, block_size, dtype) for i, layer in cached_layers(hf).items()}


def _cache_spec(layer: CachedLayer, block_size: int, dtype: str) -> AnyKVCacheSpec:
    sizes = (block_size, layer.num_kv_heads, layer.head_size, dtype)
    if layer.is_latent:
        return LatentSpec(*sizes)
    if layer.chunk is not None:
        return ChunkedSpec(*sizes, layer.chunk)
    return FullAttentionSpec(*sizes) if layer.window is None else SlidingWindowSpec(*sizes, layer.window)


def _unsupported(model: ModelConfig) -> list[str]:
    hf = model.hf_config
    problems = []
    if model.implementation.refusal:
        problems.append(model.implementation.refusal)
    try:
        stored = hf.get("quantization_config")
        quantization_method(model.quantization, stored, hf.path)
        if stored:
            read_stored_scheme(stored, hf.path)
    except ConfigError as e:
        problems.append(str(e))
    return problems


def _weights(config: EngineConfig, report: Facts) -> Facts:
    model = config.model_config
    dtype = resolve_dtype_name(model, "cpu")
    if config.load_config.load_format == "dummy":
        return {"dtype": dtype, "parameters": None, "memory_bytes": None, "stored_bytes": {}}
    index = CheckpointIndex.from_dir(model.model_dir)
    stored: dict[str, int] = {}
    for tensor in index.tensors.values():
        stored[tensor.dtype] = stored.get(tensor.dtype, 0) + tensor.nbytes
    hf = model.hf_config
    config_of = hf.get("quantization_config")
    method = quantization_method(model.quantization, config_of, hf.path)
    memory = weight_memory(
        index,
        DTYPE_BYTES[dtype],
        is_tied=hf.tie_word_embeddings,
        method=method,
        stored=read_stored_scheme(config_of, hf.path) if config_of else None,
        rename=partial(renamed, all_names=names_of(hf)),
        transposed=TRANSPOSED.get(hf.family),
    )
    return {
        "files": len({t.file for t in index.tensors.values()}),
        "tensors": len(index.tensors),
        "parameters": memory.parameters,
        "stored_bytes": stored,
        "dtype": dtype,
        "quantization": method,
        "quantized_parameters": memory.quantized_parameters,
        "memory_bytes": memory.num_bytes,
    }


def _shape(config: EngineConfig, report: Facts) -> Facts:
    hf = config.model_config.hf_config
    windows = [window for window in attention_windows(hf) if window is not None]
    return {
        "layers": hf.num_hidden_layers,
        "sliding_window_layers": len(windows),
        "sliding_window": max(windows, default=None),
        "hidden_size": hf.hidden_size,
        "attention_heads": hf.num_attention_heads,
        "kv_heads": hf.num_key_value_heads,
        "head_size": hf.head_dim,
        "vocabulary": hf.vocab_size,
        "context_length": hf.context_len,
    }


def _kv_cache(config: EngineConfig, report: Facts) -> Facts:
    specs = kv_cache_specs(config.model_config.hf_config, config.cache_config.block_size, _cache_dtype(config))
    block_bytes = sum(spec.page_size_bytes for spec in specs.values())
    return {
        "dtype": _cache_dtype(config),
        "block_size": config.cache_config.block_size,
        "bytes_per_token": block_bytes // config.cache_config.block_size,
    }


def _cache_dtype(config: EngineConfig) -> str:
    asked = config.cache_config.cache_dtype
    return resolve_dtype_name(config.model_config, "cpu") if asked == "auto" else asked


def _capacity(config: EngineConfig, report: Facts) -> Facts:
    """Returns the capacity on a CPU; that of a GPU is known only after loading."""
    if config.device_config.device == "cuda" or "weights" not in report:
        return {}
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    if model.hf_config.is_encoder:  # computes texts whole and caches nothing
        return {
            "free_memory_bytes": available_cpu_memory(),
            "max_model_len": model.model_len,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        }
    specs = kv_cache_specs(model.hf_config, cache.block_size, _cache_dtype(config))
    free = available_cpu_memory()
    kv_bytes = cache.kv_cache_memory_bytes
    if kv_bytes is None or kv_bytes < 0:
        block_bytes = sum(spec.page_size_bytes for spec in specs.values())
        useful = useful_kv_cache_bytes(model.model_len, scheduler.max_num_seqs or 1, cache.block_size, block_bytes)
        kv_bytes = cpu_kv_cache_bytes(max(0, free - (report["weights"]["memory_bytes"] or 0)), useful)
    step_tokens = scheduler.max_num_scheduled_tokens
    (sized, *_), model_len = make_kv_cache_configs(
        cache, [specs], [kv_bytes], model.model_len, model.max_model_len == -1, step_tokens
    )
    concurrency = max_concurrency(sized, model_len, step_tokens)
    return {
        "free_memory_bytes": free,
        "cache_bytes": sum(tensor.size for tensor in sized.kv_cache_tensors),
        "blocks": sized.num_blocks,
        "tokens": int(concurrency * model_len),
        "max_model_len": model_len,
        "max_concurrency": round(concurrency, 2),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }


def _speed(config: EngineConfig, report: Facts) -> Facts:
    """Returns the limit that reading the weights sets to one request on a CPU; none where no native kernel is."""
    model = config.model_config
    memory = report.get("weights", {}).get("memory_bytes")
    if config.device_config.device == "cuda" or not memory or model.pooling is not None:
        return {}
    tensors = CheckpointIndex.from_dir(model.model_dir).tensors.values()
    hf = model.hf_config
    chosen = hf.get("num_experts_per_tok") or hf.get("moe_topk") or 0
    experts = next((n for name in EXPERT_COUNTS if (n := hf.get(name))), 0)
    idle = (1 - chosen / experts) * sum(t.nbytes for t in tensors if ".experts." in t.name) if experts else 0
    if not hf.tie_word_embeddings:
        idle += sum(t.nbytes for t in tensors if t.name.endswith(("embed_tokens.weight", "wte.weight")))
    needed = memory * (1 - idle / sum(t.nbytes for t in tensors))
    speed = read_speed() if needed >= CACHED_BYTES else None
    if speed is None:
        return {}
    return {
        "memory_gb_per_s": round(speed / 1e9, 1),
        "read_per_token_bytes": int(needed),
        "tokens_per_s_at_most": round(speed / needed, 1),
    }


def _sampling_defaults(config: EngineConfig, report: Facts) -> Facts:
    return dict(config.model_config.sampling_defaults)


def _tokenizer(config: EngineConfig, report: Facts) -> Facts:
    model = config.model_config
    settings = _read_json(model.tokenizer_dir / "tokenizer_config.json")
    found = read_tokenizer_json(model.tokenizer_dir, settings)
    tokenizer: Facts = json.loads(found.text) if found is not None else {}
    settings = {**(found.special_tokens if found is not None else {}), **settings}
    kind = tokenizer.get("model") or {}
    return {
        "file": found.path.name if found is not None else None,
        "kind": kind.get("type"),
        "vocabulary": len(kind.get("vocab") or ()) or None,
        "added_tokens": len(tokenizer.get("added_tokens") or ()),
        **{name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token")},
        "chat_template": bool(
            model.chat_template
            or settings.get("chat_template")
            or (model.tokenizer_dir / "chat_template.jinja").exists()
        ),
    }


def _read_json(path: Path) -> Facts:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value

"""The configuration of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.flags import flag, parse_human_int


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The switch of adapters, and their bounds."""

    enable_lora: bool = flag(False, "Serve LoRA adapters: requests may name one.")
    max_loras: int | None = flag(
        None,
        "Different adapters among the requests that run at once. Default: no limit.",
        parse=int,
        minimum=1,
    )
    max_lora_rank: int | None = flag(
        None,
        "Largest rank of an adapter; a bound only, it costs nothing. Default: 512.",
        parse=int,
        minimum=1,
        maximum=512,
    )
    max_cpu_loras: int | None = flag(
        None,
        "Adapters kept in memory; the least recently used goes first. Default: as many as --lora-memory-bytes holds.",
        parse=int,
        minimum=1,
    )
    lora_dtype: str = flag(
        "auto", "Type of adapters' weights; auto follows the model.", choices=("auto", "bfloat16", "float32")
    )
    lora_target_modules: tuple[str, ...] = flag(
        (), "Modules an adapter may change (suffixes or full names); adapters with others are refused.", takes_many=True
    )
    lora_memory_bytes: int | None = flag(
        None,
        "Memory of adapters (1G, 512M). Default: 1 GiB, at most a tenth of the KV cache's memory.",
        parse=parse_human_int,
        minimum=0,
    )
    lora_dir: tuple[str, ...] = flag(
        (),
        "Directories of adapters: each directory below one is an adapter named by its relative path.",
        takes_many=True,
    )

"""Environment variables, one row each: name, type, default, meaning.

Read at call time, so tests can set them; `ENV_VARS` is what `quire collect-env` and the docs print.
A variable that starts with ``QUIRE_`` and is not listed here is an operator's mistake: `check_environment`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from quire.errors import ConfigError, nearest


@dataclass(frozen=True)
class EnvVar:
    """One variable. `default` is its text form; empty means unset."""

    name: str
    default: str
    help: str
    vllm_name: str = ""
    """vLLM's name of the same setting, which is read where `name` is not set."""

    @property
    def is_set(self) -> bool:
        """True if the environment has it, by either name."""
        return self.name in os.environ or self.vllm_name in os.environ

    def get(self) -> str:
        """Returns its value, or the default."""
        return os.environ.get(self.name, os.environ.get(self.vllm_name, self.default))

    def flag(self) -> bool:
        """Returns its value as a switch: True for 1, true, yes and on."""
        return self.get().strip().lower() in {"1", "true", "yes", "on"}

    def number(self) -> float:
        """Returns its value as a number. Raises ConfigError."""
        text = self.get()
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{self.name}={text!r} is not a number; {self.help}") from None


LOGGING_LEVEL = EnvVar("QUIRE_LOGGING_LEVEL", "INFO", "Log level: DEBUG, INFO, WARNING or ERROR.", "VLLM_LOGGING_LEVEL")
LOG_FORMAT = EnvVar("QUIRE_LOG_FORMAT", "text", "Form of the log: text, or json (one object a line).")
CPU_KVCACHE_SPACE = EnvVar(
    "QUIRE_CPU_KVCACHE_SPACE",
    "0",
    "GiB of memory for the KV cache on CPU; 0 sizes it from free memory. --kv-cache-memory-bytes wins.",
    "VLLM_CPU_KVCACHE_SPACE",
)
CPU_KERNELS = EnvVar(
    "QUIRE_CPU_KERNELS",
    "auto",
    "Kernels on a CPU: auto (the best there are), torch (the reference), or an instruction set: amx, avx512_bf16, "
    "avx512, avx2, portable.",
)
PP_LAYER_PARTITION = EnvVar(
    "QUIRE_PP_LAYER_PARTITION",
    "",
    "Numbers of layers of the stages of --pipeline-parallel-size, as 10,12; empty divides them evenly.",
    "VLLM_PP_LAYER_PARTITION",
)
DISABLE_REQUEST_ID_RANDOMIZATION = EnvVar(
    "QUIRE_DISABLE_REQUEST_ID_RANDOMIZATION",
    "0",
    "1 keeps the user's request id as the internal id. For debugging: duplicates then collide.",
)
MAX_N_SEQUENCES = EnvVar("QUIRE_MAX_N_SEQUENCES", "16384", "Largest `n` a request may ask for.", "VLLM_MAX_N_SEQUENCES")
LOG_STATS_INTERVAL = EnvVar(
    "QUIRE_LOG_STATS_INTERVAL", "10", "Seconds between two statistics log lines.", "VLLM_LOG_STATS_INTERVAL"
)
COMPUTE_NANS_IN_LOGITS = EnvVar(
    "QUIRE_COMPUTE_NANS_IN_LOGITS",
    "0",
    "1 counts NaNs in the logits of each request (costs a pass over them).",
    "VLLM_COMPUTE_NANS_IN_LOGITS",
)
ENABLE_MULTIPROCESSING = EnvVar(
    "QUIRE_ENABLE_MULTIPROCESSING",
    "1",
    "0 runs the engine core in the process of its user instead of one of its own.",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)
ENGINE_READY_TIMEOUT_S = EnvVar(
    "QUIRE_ENGINE_READY_TIMEOUT_S",
    "600",
    "Longest start of an engine core, in seconds.",
    "VLLM_ENGINE_READY_TIMEOUT_S",
)
RAY_DP_PACK_STRATEGY = EnvVar(
    "QUIRE_RAY_DP_PACK_STRATEGY",
    "strict",
    "Engines of a Ray node: as many as --data-parallel-size-local says (strict), or as many as fit (fill); span: the "
    "workers of each are placed by themselves. Stages of an engine whose workers Ray places: on one node (strict, "
    "fill), or on several (span).",
    "VLLM_RAY_DP_PACK_STRATEGY",
)
LEAN_TORCH = EnvVar(
    "QUIRE_LEAN_TORCH",
    "1",
    "0 has an engine core import all of torch at its start; 1 leaves what serving does not use for its first use.",
)
CACHE_ROOT = EnvVar(
    "QUIRE_CACHE_ROOT",
    "",
    "Directory of what Quire keeps between runs, all of which may be deleted at any time; empty is quire in "
    "XDG_CACHE_HOME or ~/.cache.",
)
WEIGHT_CACHE_GIB = EnvVar(
    "QUIRE_WEIGHT_CACHE_GIB",
    "64",
    "Most GiB that packed weights may take in the cache directory; the ones used longest ago go first. 0 keeps none.",
)
KV_STORE_KEY_FILE = EnvVar(
    "QUIRE_KV_STORE_KEY_FILE",
    "",
    "File of 32 random bytes under which the records of --kv-store are tagged, for several hosts that share a "
    "directory; empty is the file key in the directory, which is made if there is none.",
)
STARTUP_REPORT = EnvVar(
    "QUIRE_STARTUP_REPORT",
    "",
    "A file to which an engine's frontend writes how its start went (JSON), once its first output is there.",
)
ALLOW_LONG_MAX_MODEL_LEN = EnvVar(
    "QUIRE_ALLOW_LONG_MAX_MODEL_LEN",
    "0",
    "1 accepts a --max-model-len beyond the context length of the model's config.json.",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
)
API_KEY = EnvVar(
    "QUIRE_API_KEY",
    "",
    "A key that clients of `quire serve` must show, beside those of --api-key; commands with --url show it.",
    "VLLM_API_KEY",
)
ALLOW_RUNTIME_LORA_UPDATING = EnvVar(
    "QUIRE_ALLOW_RUNTIME_LORA_UPDATING",
    "0",
    "1 has /v1/load_lora_adapter and /v1/unload_lora_adapter on the public port, too, for adapters in a --lora-dir.",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
)
LORA_RESOLVER_CACHE_DIR = EnvVar(
    "QUIRE_LORA_RESOLVER_CACHE_DIR",
    "",
    "A directory of adapters, as another --lora-dir, where adapters are enabled.",
    "VLLM_LORA_RESOLVER_CACHE_DIR",
)
KV_EVENTS_USE_INT_BLOCK_HASHES = EnvVar(
    "QUIRE_KV_EVENTS_USE_INT_BLOCK_HASHES",
    "1",
    "0 names blocks in KV cache events by whole digests, instead of their last 8 bytes as a number.",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
)
FAILPOINTS = EnvVar(
    "QUIRE_FAILPOINTS",
    "",
    "Faults to inject for tests, as quire.testing.failpoints describes; empty costs nothing.",
)

ENV_VARS: tuple[EnvVar, ...] = tuple(v for v in list(globals().values()) if isinstance(v, EnvVar))


def check_environment() -> None:
    """Raises ConfigError for an unknown QUIRE_* variable: a misspelt one would be ignored silently."""
    known = {v.name for v in ENV_VARS}
    for name in os.environ:
        if name.startswith("QUIRE_") and name not in known:
            hint = nearest(name, known, "`quire collect-env` lists the known ones")
            raise ConfigError(f"environment variable {name} is not known to Quire; {hint}")

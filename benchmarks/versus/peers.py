"""The engines of a comparison: where each one's interpreter and checkpoints lie, and how its driver and server start.

Everything lies under one folder, the home: `HOME/models/NAME` (checkpoints), `HOME/NAME/bin/python` (a peer's virtual
environment), as `benchmarks/peers/setup` makes it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PEERS_FOLDER = Path(__file__).resolve().parents[1] / "peers"
LLM_DRIVER = "llm_driver.py"
DEFAULT_HOME = Path(os.environ.get("PEERS_HOME") or Path.home() / ".cache" / "quire-peers")


@dataclass(frozen=True)
class Place:
    """The conditions of a run: the home, the CPUs of every engine, the memory for the KV cache, and the tensor-parallel
    workers that share the CPUs."""

    home: Path
    cpus: tuple[int, ...]
    kv_cache_gib: float = 2.0
    num_workers: int = 1

    @property
    def num_threads(self) -> int:
        return len(self.cpus)


@dataclass(frozen=True)
class Peer:
    """One engine. `checkpoint` and `server` take (place, model); `server` also a port. None: it has no server here."""

    name: str
    title: str
    driver: str
    checkpoint: Callable[[Place, str], Path]
    environment: Callable[[Place], dict[str, str]] = lambda place: {}
    server: Callable[[Place, str, int], list[str]] | None = None

    def python(self, place: Place) -> Path:
        """Returns the peer's interpreter; Quire's is this one."""
        return Path(sys.executable) if self.name == "quire" else place.home / self.name / "bin" / "python"

    def missing(self, place: Place, model: str) -> str | None:
        """Returns what has to be installed before the peer can be measured; None if nothing."""
        if place.num_workers > 1 and self.driver != LLM_DRIVER:
            return "has no tensor parallelism here"
        if not self.python(place).exists():
            return f"not installed: benchmarks/peers/setup {self.name} (looked for {self.python(place)})"
        checkpoint = self.checkpoint(place, model)
        if not checkpoint.exists():
            target = "models" if checkpoint.parent.name == "models" else self.name
            return f"no checkpoint {checkpoint}: benchmarks/peers/setup {target}"
        return None

    def driver_command(self, place: Place, model: str) -> list[str]:
        """Returns the command that starts the peer's driver."""
        return [
            str(self.python(place)), str(PEERS_FOLDER / self.driver),
            "--model", str(self.checkpoint(place, model)),
            "--threads", str(place.num_threads), "--kv-cache-gib", str(place.kv_cache_gib),
        ]  # fmt: skip

    def full_environment(self, place: Place) -> dict[str, str]:
        """Returns this process's environment, what all engines share, and the peer's own."""
        shared = {
            "OMP_NUM_THREADS": str(place.num_threads // place.num_workers),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if place.num_workers > 1:
            shared["VERSUS_SETTINGS"] = json.dumps({"llm": {"tensor_parallel_size": place.num_workers}})
        return {**os.environ, **shared, **self.environment(place)}


def _checkpoint(place: Place, model: str) -> Path:
    return place.home / "models" / model


def _quire_server(place: Place, model: str, port: int) -> list[str]:
    kv_cache = ["--kv-cache-memory-bytes", str(int(place.kv_cache_gib * 2**30))]
    return [sys.executable, "-m", "quire", "serve", *_server_flags(place, model, port), *kv_cache]


def _vllm_server(place: Place, model: str, port: int) -> list[str]:
    return [str(place.home / "vllm" / "bin" / "vllm"), "serve", *_server_flags(place, model, port)]


def _server_flags(place: Place, model: str, port: int) -> list[str]:
    return [
        str(_checkpoint(place, model)), "--served-model-name", model, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "256",
        "--tensor-parallel-size", str(place.num_workers),
    ]  # fmt: skip


def _vllm_environment(place: Place) -> dict[str, str]:
    """Returns the preloads of vLLM's CPU guide, and all cores: of two, its own choice would leave one idle."""
    each = place.num_threads // place.num_workers
    parts = [place.cpus[i * each :][:each] for i in range(place.num_workers)]
    preloads = sorted((place.home / "deb").glob("usr/lib/*/libtcmalloc_minimal.so.4"))
    preloads += [path for path in (place.home / "vllm" / "lib" / "libiomp5.so",) if path.exists()]
    return {
        "VERSUS_PACKAGE": "vllm",
        "LD_PRELOAD": ":".join(map(str, preloads)),
        "VLLM_CPU_KVCACHE_SPACE": str(round(place.kv_cache_gib)),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, own)) for own in parts),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("quire", "Quire", LLM_DRIVER, _checkpoint, server=_quire_server),
        Peer("vllm", "vLLM", LLM_DRIVER, _checkpoint, _vllm_environment, _vllm_server),
        Peer("openvino", "OpenVINO GenAI", "openvino_driver.py", lambda p, m: p.home / "models-ov" / m),
        Peer("llamacpp", "llama.cpp", "llamacpp_driver.py", lambda p, m: p.home / "models-gguf" / f"{m}.gguf"),
        Peer("hf", "transformers", "transformers_driver.py", _checkpoint),
    )
}
"""All engines. Quire is the first, with which the others are compared."""

"""The identity of a worker's blocks: all that decides their bytes besides tokens. See `kv_store/fingerprint.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quire.worker
from quire.config.checkpoint import CheckpointIndex
from quire.config.engine import EngineConfig
from quire.config.model import resolve_dtype_name
from quire.kv_store.fingerprint import FileDigests, make_fingerprint
from quire.worker.kv_cache import KVCacheMemory


def compute_fingerprint(
    config: EngineConfig,
    memory: KVCacheMemory,
    model_dir: Path,
    digests: FileDigests,
    loaded_ns: int,
    is_stopped: Callable[[], bool],
) -> bytes:
    """Returns the fingerprint of blocks that are computed with the weights of `model_dir`, which were read after
    `loaded_ns`. Hashes weights that were not hashed before.

    Raises OSError, and what `FileDigests.digest_files` raises.
    """
    model, drafting = config.model_config, config.speculative_config.drafting
    weights: dict[str, Any] = {"seed": model.seed}  # of random weights
    if config.load_config.load_format != "dummy":
        weights = {"model": _digest_weights(model_dir, digests, loaded_ns, is_stopped)}
    if drafting is not None and drafting.model is not None:
        draft_dir = drafting.model.model_dir
        weights["drafter"] = _digest_weights(draft_dir, digests, loaded_ns, is_stopped)
        weights["drafter_config"] = drafting.model.hf_config.raw
    facts = {
        "weights": weights,
        "config": model.hf_config.raw,
        "dtype": resolve_dtype_name(model, "cpu"),
        "quantization": model.quantization,
        "implementation": model.implementation.name,
        "attention": memory.backend.name,
        **memory.backend.kernels.identity,
        "code": _digest_code(),
        "layers": [_describe_layer(memory, name) for name in memory.layer_groups],
    }
    return make_fingerprint(json.loads(json.dumps(facts, default=str)))


def _describe_layer(memory: KVCacheMemory, name: str) -> list[Any]:
    group, keys = memory.layer_groups[name], memory.caches[name].key
    return [name, group, repr(memory.specs[group]), str(keys.dtype), list(keys.shape[1:])]


def _digest_weights(
    directory: Path, digests: FileDigests, loaded_ns: int, is_stopped: Callable[[], bool]
) -> dict[str, str]:
    files = sorted({info.file for info in CheckpointIndex.from_dir(directory).tensors.values()})
    return digests.digest_files(files, loaded_ns, is_stopped)


def _digest_code() -> str:
    """Returns the digest of the code that computes."""
    digest = hashlib.sha256()
    root = Path(quire.worker.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(b"%s\n%s" % (str(file.relative_to(root)).encode(), hashlib.sha256(file.read_bytes()).digest()))
    return digest.hexdigest()

"""A short text of all that decides the bits of a worker's logits.

Engines with the same `numerics_id` give the same logits for the same tokens, whatever machine they are on, so a stream
may go on at any of them. The number of workers is not part of it: the native kernels compute the same for any number.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch

from quire.config.checkpoint import CheckpointIndex
from quire.errors import ModelLoadError

NUM_SAMPLES = 64
"""Places of each file that are read."""
SAMPLE_BYTES = 4096


def digest_weights(model_dir: Path) -> str:
    """Returns a digest of a checkpoint: the names, types, shapes and places of all tensors, and a sample of the bytes
    of each file. Copies of a checkpoint have the same one. Reading everything would take as long as loading it."""
    digest = hashlib.sha256()
    try:
        tensors = CheckpointIndex.from_dir(model_dir).tensors
        files: dict[Path, None] = {}
        for name, info in sorted(tensors.items()):
            digest.update(f"{name} {info.dtype} {info.shape} {info.offset}\n".encode())
            files[info.file] = None
        for path in files:
            size = path.stat().st_size
            with path.open("rb") as file:
                for i in range(NUM_SAMPLES):
                    file.seek(i * max(0, size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
    except (ModelLoadError, OSError):
        return "unknown"
    return digest.hexdigest()[:16]


def make_numerics_id(
    device: torch.device, pack_format: str | None, types: tuple[object, ...], backend: str, weights: str
) -> str:
    """Returns the text. `pack_format` names native kernels and instruction set; None: torch computes."""
    kernels = pack_format or f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return "; ".join((where, kernels, *map(str, types), f"{backend} attention", f"weights {weights}"))

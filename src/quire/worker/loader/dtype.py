"""Which type the model computes in."""

from __future__ import annotations

import torch

from quire.config.checkpoint import CheckpointIndex
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.logger import init_logger

logger = init_logger(__name__)

_BY_FLAG = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}
_BY_CHECKPOINT = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}


def resolve_dtype(model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype asked for; with "auto" the checkpoint's own, except that float16 runs as bfloat16 on CPU.

    CPUs have units for bfloat16 and convert float16 one by one. Raises ModelLoadError for a type Quire cannot run.
    """
    if model_config.dtype != "auto":
        return _BY_FLAG[model_config.dtype]
    name = model_config.hf_config.dtype or _stored_dtype(model_config)
    dtype = _BY_FLAG.get(name)
    if dtype is None:
        raise ModelLoadError(
            f"{model_config.hf_config.path} gives the dtype {name!r}, which cannot be run; "
            "choose bfloat16, float16 or float32 with --dtype"
        )
    if dtype is torch.float16 and device.type == "cpu":
        logger.info("The checkpoint is float16; on CPU it runs as bfloat16 (--dtype float16 keeps it)")
        return torch.bfloat16
    return dtype


def _stored_dtype(model_config: ModelConfig) -> str:
    """What most of the weights are, for a config.json that does not say."""
    stored = CheckpointIndex.from_dir(model_config.model_dir).main_dtype
    return _BY_CHECKPOINT.get(stored, stored)

"""Which type a model computes in. A name, not a torch dtype: who asks may have no torch."""

from __future__ import annotations

from quire.config.checkpoint import CheckpointIndex
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.logger import init_logger

logger = init_logger(__name__)

_CANONICAL = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
_BY_CHECKPOINT = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}


def resolve_dtype_name(model_config: ModelConfig, device_type: str) -> str:
    """The dtype asked for; with "auto" the checkpoint's own, except that float16 runs as bfloat16 on "cpu".

    CPUs have units for bfloat16 and convert float16 one by one. Raises ModelLoadError for a type Quire cannot run.
    """
    if model_config.dtype != "auto":
        return _CANONICAL[model_config.dtype]
    stored = model_config.hf_config.dtype or _stored_dtype(model_config)
    name = _CANONICAL.get(stored)
    if name is None:
        raise ModelLoadError(
            f"{model_config.hf_config.path} gives the dtype {stored!r}, which cannot be run; "
            "choose bfloat16, float16 or float32 with --dtype"
        )
    if name == "float16" and device_type == "cpu":
        logger.info("The checkpoint is float16; on CPU it runs as bfloat16 (--dtype float16 keeps it)")
        return "bfloat16"
    return name


def _stored_dtype(model_config: ModelConfig) -> str:
    """What most of the weights are, for a config.json that does not say."""
    stored = CheckpointIndex.from_dir(model_config.model_dir).main_dtype
    return _BY_CHECKPOINT.get(stored, stored)

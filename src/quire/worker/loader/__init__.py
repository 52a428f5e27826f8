"""From a checkpoint on disk to a model in memory."""

from quire.worker.loader.dtype import resolve_dtype
from quire.worker.loader.load import load_model

__all__ = ["load_model", "resolve_dtype"]

"""From a checkpoint on disk to a model in memory, and back again."""

from quire.worker.loader.load import Placement, load_head, load_model
from quire.worker.loader.packed import WeightCache
from quire.worker.loader.weights import LoadedModel, ModelWeights, load_weights

__all__ = [
    "LoadedModel",
    "ModelWeights",
    "Placement",
    "WeightCache",
    "load_head",
    "load_model",
    "load_weights",
]

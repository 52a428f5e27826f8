"""The weights of a running model: freed, restored, replaced."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.config.engine import LoadConfig
from quire.config.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig
from quire.config.model import ModelConfig
from quire.config.model_impl import TRANSFORMERS
from quire.config.quantization import quantization_method
from quire.config.speculators import HEAD, read_head
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.logger import init_logger
from quire.resolve import resolve
from quire.worker.layers.weights import Prepared, allocate
from quire.worker.loader.load import Placement, fill_weights, find_tensors, load_model
from quire.worker.loader.packed import WeightCache
from quire.worker.loader.stored import Stored

logger = init_logger(__name__)

_META = torch.device("meta")
NOT_THE_MODELS = frozenset(
    {
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range"),
        "quantization_config",
        *("bos_token_id", "eos_token_id", "pad_token_id"),
        *("rope_theta", "rope_scaling", "rope_parameters"),
    }
)
"""Keys of config.json that may differ between two checkpoints of one model: notes, the storage of weights, keys for the
frontend (which keeps those the engine was started with), and rotary embeddings, which have several spellings and are
compared as a whole."""


class ModelWeights:
    """The weights of `model`: their source, and their state in memory. The module tree stays the same.

    A freed weight leaves its shape on torch's meta device, and its kernels are dropped: a forward pass raises.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        load_config: LoadConfig,
        placement: Placement,
        cache: WeightCache | None = None,
    ) -> None:
        self._model = model
        self._config = model_config
        self._placement = placement
        self._cache = cache
        self._source: Path | None = None if load_config.load_format == "dummy" else model_config.model_dir
        """A checkpoint directory; None for noise."""
        self._former = self._source
        """The one before the last `replace`."""
        self._offloaded: dict[str, Tensor] | None = None
        self._are_whole = True
        """True if the model can run: its weights are neither freed nor half read."""

    def follow(self, former: ModelWeights) -> None:
        """Takes over the state of the weights before these, whose modules the model has: they may be given back."""
        self._source, self._are_whole = former._source, former._are_whole

    @property
    def source(self) -> Path | None:
        """Directory of the checkpoint; None for noise."""
        return self._source

    @property
    def _live_in_main_memory(self) -> bool:
        return self._placement.device.type == "cpu"

    def offload(self) -> None:
        """Moves the weights to main memory. On a CPU they are there, and stay."""
        if self._live_in_main_memory or not self._are_whole:
            return
        if any(parameter.is_meta for parameter in self._model.parameters()):
            self.drop()  # packed by kernels: reading them again is quicker than unpacking
            return
        self._offloaded = {name: parameter.data.cpu() for name, parameter in self._model.named_parameters()}
        self._release()

    def drop(self) -> None:
        """Frees the weights, and an offloaded copy."""
        if self._cache is not None:
            self._cache.cancel()
        self._offloaded = None
        self._release()

    def restore(self) -> None:
        """Restores the weights from main memory, or reads them again. Raises ModelLoadError."""
        if self._are_whole:
            return
        if self._offloaded is None:
            self._load(self._source)
            return
        self._allocate(self._placement.device)
        for name, parameter in self._model.named_parameters():
            parameter.data.copy_(self._offloaded[name])
        for module in self._model.modules():
            if isinstance(module, Prepared):
                module.prepare(self._placement.kernels)
        self._offloaded = None
        self._are_whole = True

    def check(self, directory: Path) -> None:
        """Raises ModelLoadError unless checkpoint `directory` fits this model: tensors, shapes, architecture."""
        self._find(directory)

    def replace(self, directory: Path | None = None) -> None:
        """Reads the weights of another checkpoint into this model; None: reads its own again. Raises ModelLoadError.

        Works in place, without a second copy. If reading fails half-way, `restore` reads the former weights.
        """
        self._former = self._source
        self._load(self._source if directory is None else directory)
        self._source = self._source if directory is None else directory

    def undo(self) -> bool:
        """Makes the checkpoint of before the last `replace` its own again: `replace` and `restore` read it. Returns
        whether it was another."""
        is_other, self._source = self._source != self._former, self._former
        self._are_whole = self._are_whole and not is_other
        return is_other

    def _load(self, source: Path | None) -> None:
        start = time.monotonic()
        stored = None if source is None else self._find(source)
        self._are_whole, self._offloaded = False, None
        fill_weights(self._model, stored, self._config.seed, self._placement, self._cache)
        self._are_whole = True
        logger.info("Weights of %s in place after %.2f s", source or "random noise", time.monotonic() - start)

    def _release(self) -> None:
        self._are_whole = False
        for module in self._model.modules():
            if isinstance(module, Prepared):
                module.discard()
        self._allocate(_META)

    def _allocate(self, device: torch.device) -> None:
        for module in self._model.modules():
            allocate(module, device, self._placement.dtype)

    def _find(self, directory: Path) -> Mapping[str, Stored]:
        if not directory.is_dir():
            raise ModelLoadError(f"{directory} is not a directory; weights come from a local checkpoint")
        hf = self._config.hf_config
        if (directory / "config.json").exists():
            hf = HFConfig.from_dir(directory, self._config.hf_overrides)
            method = self._config.hf_config.raw.get(HEAD)
            if method is not None and (head := read_head(hf.raw, hf.path, method=method)) is not None:
                hf = HFConfig(head.raw, hf.path)
            check_same_model(self._config.hf_config, hf)
            quantization_method(self._config.quantization, hf.get("quantization_config"), hf.path)
        return find_tensors(self._model, hf, directory)


def check_same_model(ours: HFConfig, other: HFConfig) -> None:
    """Raises ModelLoadError if two config.json describe models that compute something different.

    A key that only one of them has is not compared: transformers leaves out the family's defaults.
    """
    mine, theirs = _facts(ours), _facts(other)
    for key in sorted(mine.keys() & theirs.keys()):
        if mine[key] != theirs[key]:
            raise ModelLoadError(
                f"{other.path} has {key} = {theirs[key]!r}, the model that is loaded {mine[key]!r}: the weights of "
                "another model cannot take its place; start an engine for it"
            )


def _facts(hf: HFConfig) -> dict[str, Any]:
    facts = {key: value for key, value in hf.raw.items() if key not in NOT_THE_MODELS and "dropout" not in key}
    return facts | {f"rope of {kind}": hf.rope(kind) for kind in (FULL_ATTENTION, SLIDING_ATTENTION)}


FALLBACK = "quire.worker.fallback.load:load_fallback"
"""Imported on demand: it imports transformers."""


class LoadedModel(NamedTuple):
    """A model in memory."""

    model: nn.Module
    weights: ModelWeights
    """Or an object with its methods, where transformers' class runs."""
    cache: WeightCache


def load_weights(model: ModelConfig, load_config: LoadConfig, placement: Placement) -> LoadedModel:
    """Loads a model by its own code or by transformers'. Raises ModelLoadError or UnsupportedModelError."""
    cache = WeightCache(model, load_config, "" if placement.sharding is None else placement.sharding.name)
    if model.implementation.name == TRANSFORMERS:
        logger.info("the model is run by transformers' class: %s", model.implementation.why)
        fallback = resolve(FALLBACK)(model, load_config, placement)
        return LoadedModel(fallback.model, fallback, cache)
    if model.implementation.refusal:
        raise UnsupportedModelError(model.implementation.refusal)
    loaded = load_model(model, load_config, placement, cache)
    return LoadedModel(loaded, ModelWeights(loaded, model, load_config, placement, cache), cache)

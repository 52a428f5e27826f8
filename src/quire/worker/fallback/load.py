"""Loads a checkpoint into its class of transformers, never into code of the checkpoint, and then onto kernels."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from quire.config.checkpoint import CheckpointIndex
from quire.config.engine import LoadConfig
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.quantization import WEIGHT_BITS, scheme_of
from quire.errors import ModelLoadError, QuireError, UnsupportedModelError
from quire.logger import init_logger
from quire.worker.fallback import interface
from quire.worker.fallback.model import FallbackForCausalLM
from quire.worker.fallback.verdicts import verify
from quire.worker.loader.load import Noise, Placement
from quire.worker.loader.weights import check_same_model
from quire.worker.platform import release_free_memory

logger = init_logger(__name__)

BY_LENGTH = ("dynamic", "longrope")
"""Rotary scalings that transformers chooses by the longest text of a batch: a text's tokens would depend on others."""
NOT_TRANSFORMERS = ("quantization_config", "auto_map", "architectures", "model_type")
"""Keys of config.json that are not given to transformers' config class."""


class FallbackWeights:
    """The weights of a running model of transformers: freed, restored, replaced. See `ModelWeights`, whose methods
    these are."""

    def __init__(self, model_config: ModelConfig, load_config: LoadConfig, placement: Placement) -> None:
        self._config = model_config
        self._placement = placement
        self._source: Path | None = None if load_config.load_format == "dummy" else model_config.model_dir
        self._are_whole = False
        self._class, self._hf_config = find_class(model_config.implementation.class_name, model_config.hf_config)
        if model_config.implementation.needs_trial:
            verify(self._class, self._hf_config)
        self.model = FallbackForCausalLM()
        self._load(self._source)

    def offload(self) -> None:
        """Keeps the weights: a CPU has them in main memory; an accelerator's are read again."""
        if self._placement.device.type != "cpu":
            self.drop()

    def drop(self) -> None:
        """Frees the weights. Their shapes stay."""
        self._are_whole = False
        self.model.discard()
        release_free_memory(self._placement.device)

    def restore(self) -> None:
        """Reads the weights again, if they were freed. Raises ModelLoadError."""
        if not self._are_whole:
            self._load(self._source)

    def check(self, directory: Path) -> None:
        """Raises ModelLoadError unless checkpoint `directory` describes this model."""
        if not directory.is_dir():
            raise ModelLoadError(f"{directory} is not a directory; weights come from a local checkpoint")
        CheckpointIndex.from_dir(directory)
        if (directory / "config.json").exists():
            other = HFConfig.from_dir(directory, self._config.hf_overrides)
            check_same_model(self._config.hf_config, other)

    def replace(self, directory: Path | None = None) -> None:
        """Reads the weights of another checkpoint; None: its own again. Raises ModelLoadError."""
        source = self._source if directory is None else directory
        if source is not None:
            self.check(source)
        self.drop()
        self._load(source)
        self._source = source

    def _load(self, source: Path | None) -> None:
        start = time.monotonic()
        config, placement = self._config, self._placement
        quantization = config.quantization
        scheme = scheme_of(quantization) if quantization is not None and quantization in WEIGHT_BITS else None
        if source is None:
            causal = make_noise(self._class, self._hf_config, placement.dtype, config.seed)
        else:
            has_head = config.pooling is None
            causal = read_checkpoint(self._class, self._hf_config, placement.dtype, source, has_head=has_head)
        causal.to(placement.device)
        self.model.take(causal.eval(), placement.kernels, config.model_len, scheme)
        release_free_memory(placement.device)
        self._are_whole = True
        _report(self.model, source, placement, time.monotonic() - start)


def _report(model: FallbackForCausalLM, source: Path | None, placement: Placement, seconds: float) -> None:
    plain = sum(p.nbytes for p in model.causal.parameters() if not p.is_meta)
    gib = (model.packed_bytes + (0 if placement.kernels.keeps_weights else plain)) / 2**30
    name, what = type(model.causal).__name__, source or "random weights"
    dtype = str(placement.dtype).removeprefix("torch.")
    logger.info(
        "Loaded transformers' %s from %s: %.2f GiB of %s in %.2f s; its tokens are transformers' within rounding, and "
        "may depend on the batch in their last bits",
        name, what, gib, dtype, seconds,
    )  # fmt: skip
    if model.left:
        logger.info("%d of its matrices stay torch's: %s", len(model.left), ", ".join(model.left[:4]))


def find_class(name: str, hf: HFConfig) -> tuple[Any, Any]:
    """Returns transformers' class of this name, and the config that `hf` gives it. Raises UnsupportedModelError or
    ModelLoadError."""
    model_class: Any = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise UnsupportedModelError(
            f"architecture {hf.architecture!r} of {hf.path} is known neither to Quire nor to transformers "
            f"{transformers.__version__}; code of a checkpoint is never run"
        )
    values = {key: value for key, value in hf.raw.items() if key not in NOT_TRANSFORMERS}
    try:
        config_class: Any = model_class.config_class
        config = config_class.from_dict(values)
    except Exception as e:
        cause = str(e).partition("\n")[0]
        raise ModelLoadError(f"{hf.path} does not describe a {hf.architecture}: {type(e).__name__}: {cause}") from e
    _check_rotation(hf, config)
    return model_class, config


def _check_rotation(hf: HFConfig, config: Any) -> None:
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if each.get("rope_type") in BY_LENGTH:
            raise UnsupportedModelError(
                f"{hf.path} scales its rotary embedding by {each['rope_type']!r}, which transformers chooses by the "
                "longest text of a batch; only Quire's own classes run it"
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences transformers' progress bars and warnings inside the block."""
    log: Any = transformers.logging  # its functions have no types
    level = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        log.enable_progress_bar()


def make_noise(model_class: Any, config: Any, dtype: torch.dtype, seed: int) -> Any:
    """Returns a model with random weights, the same for the same seed."""
    with _quietly(), no_init_weights():
        causal = model_class._from_config(config, dtype=dtype, attn_implementation=interface.NAME)
        causal.tie_weights()
    Noise(seed).fill((name, parameter.data) for name, parameter in causal.named_parameters())
    return causal


def read_checkpoint(model_class: Any, config: Any, dtype: torch.dtype, directory: Path, *, has_head: bool) -> Any:
    """Returns a model with the weights of `directory`, which may lack a logits head that is not needed. Raises
    ModelLoadError naming what does not fit."""
    CheckpointIndex.from_dir(directory)
    try:
        with _quietly():
            causal, found = model_class.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=interface.NAME,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except QuireError:
        raise
    except Exception as e:
        cause = str(e).strip().partition("\n")[0]
        raise ModelLoadError(f"{directory} cannot be read as a {model_class.__name__}: {cause}") from e
    for kind, words in (
        ("missing_keys", "has no tensor {}, which the model needs"),
        ("unexpected_keys", "holds tensor {}, which the model that config.json describes has no place for"),
        ("mismatched_keys", "holds tensor {} in another shape than config.json says"),
    ):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in found[kind])
        if not has_head and kind == "missing_keys":
            names = [name for name in names if not name.startswith("lm_head.")]
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ModelLoadError(f"{directory} {words.format(names[0] + more)}")
    check_finite(causal, directory)
    return causal


def check_finite(causal: nn.Module, directory: Path) -> None:
    """Raises ModelLoadError unless all weights are finite."""
    for name, parameter in causal.named_parameters():
        if parameter.numel() and not all(bound.isfinite() for bound in torch.aminmax(parameter.data)):
            raise ModelLoadError(
                f"{directory}: tensor {name} holds NaN or infinity as {str(parameter.dtype).removeprefix('torch.')}; "
                "download the checkpoint again, or choose another --dtype"
            )


def load_fallback(model_config: ModelConfig, load_config: LoadConfig, placement: Placement) -> FallbackWeights:
    """Returns the weights of a model of transformers, loaded; `.model` runs them. Raises UnsupportedModelError or
    ModelLoadError."""
    if model_config.implementation.refusal:
        raise UnsupportedModelError(model_config.implementation.refusal)
    return FallbackWeights(model_config, load_config, placement)

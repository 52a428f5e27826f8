"""Which model is served: where its files come from, which type it computes in, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.checkpoint import CheckpointIndex
from quire.config.flags import flag, parse_human_int, parse_json_object
from quire.config.hf_config import HFConfig
from quire.config.hub import MODEL_FILES, TOKENIZER_FILES, fetch_model, is_hub_id
from quire.config.model_impl import CHOICES, ModelImpl
from quire.config.pooling import PoolingConfig
from quire.config.quantization import METHODS
from quire.errors import ModelLoadError
from quire.logger import init_logger

logger = init_logger(__name__)

DEMO_MODEL = "demo"
"""Name of the checkpoint that ships inside the package."""
DRAFT_MODEL = "demo-draft"
_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
"""The key of generation_config.json for each field of SamplingParams."""
ASSETS_DIR = Path(__file__).resolve().parent.parent / "assets"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model. `EngineArgs.create_engine_config` fills in the fields after `pooler_config`, not the user."""

    model: str = flag(DEMO_MODEL, "A local checkpoint directory, a hub id, or demo: the model inside the package.")
    tokenizer: str | None = flag(None, "Directory or hub id of the tokenizer; default is the model's.")
    tokenizer_mode: str = flag(
        "auto",
        "auto reads tokenizer.json, or another vocabulary file; hf goes through transformers.",
        choices=("auto", "hf"),
    )
    skip_tokenizer_init: bool = flag(False, "Load no tokenizer: prompts are token ids and no text comes back.")
    revision: str | None = flag(None, "Branch, tag or commit of the model on the hub.")
    tokenizer_revision: str | None = flag(None, "Branch, tag or commit of the tokenizer on the hub.")
    hf_token: str | None = flag(None, "Token for the hub; HF_TOKEN does the same, and no ps shows it.", metavar="TOKEN")
    dtype: str = flag(
        "auto",
        "Type of weights and activations. On CPU float16 checkpoints run as bfloat16.",
        choices=("auto", "bfloat16", "float16", "half", "float32", "float"),
    )
    seed: int = flag(0, "Seed from which requests without one are given theirs.", parse=int)
    max_model_len: int | None = flag(
        None,
        "Longest prompt + output in tokens; unset takes the model's, auto fits it to memory.",
        parse=parse_human_int,
        minimum=-1,
    )
    max_logprobs: int = flag(20, "Most logprobs a request may ask for; -1 for no limit.", parse=int, minimum=-1)
    served_model_name: str | list[str] | None = flag(
        None,
        "Name of the model, or several: requests may use any, answers and metrics have the first. Default is --model.",
        metavar="NAME",
        takes_many=True,
    )
    chat_template: str | None = flag(None, "File or text of a chat template that replaces the tokenizer's.")
    generation_config: str = flag(
        "auto", "Where default sampling parameters come from: auto (the model), vllm (none), or a directory."
    )
    override_generation_config: dict[str, Any] | None = flag(
        None, "JSON object of sampling defaults that win over the model's.", parse=parse_json_object, metavar="JSON"
    )
    hf_overrides: dict[str, Any] | None = flag(
        None, "JSON object laid over the model's config.json.", parse=parse_json_object, metavar="JSON"
    )
    quantization: str | None = flag(
        None,
        "int8 (activations, too) or int4 (weights only) quantizes at load; the others are checkpoints' own formats, "
        "which are found out.",
        choices=METHODS,
    )
    model_impl: str = flag(
        "auto",
        "Whose class runs the model: quire's own, or transformers' on Quire's cache and kernels; auto is Quire's "
        "if there is one, else a certified one of transformers.",
        choices=CHOICES,
    )
    enable_prompt_embeds: bool = flag(False, "Take prompts as embeddings, too (prompt_embeds).")
    runner: str = flag("auto", "What the model is for.", choices=("auto", "generate", "pooling"))
    convert: str = flag(
        "auto",
        "Make a pooling model of one that generates; auto makes one for embeddings with --runner pooling.",
        choices=("auto", "none", "embed", "classify"),
    )
    pooler_config: dict[str, Any] | None = flag(
        None,
        "JSON object of how to pool: pooling_type (CLS, LAST, MEAN; ALL, STEP), use_activation, dimensions, "
        "step_tag_id, returned_token_ids.",
        parse=parse_json_object,
        metavar="JSON",
    )

    model_dir: Path = Path()
    """The directory `model` was resolved to."""
    tokenizer_dir: Path = Path()
    hf_config: HFConfig = field(default_factory=lambda: HFConfig({}, Path()))
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json after `generation_config` and `override_generation_config`."""
    pooling: PoolingConfig | None = None
    """Pooling of the model; None for one that generates."""
    implementation: ModelImpl = field(default_factory=ModelImpl)
    """The code that runs the model: what `model_impl` became."""

    @property
    def model_len(self) -> int:
        """The context length asked for, or the model's own where none (or auto) is. The engine may fit it smaller."""
        if self.max_model_len is None or self.max_model_len == -1:
            limit = self.pooling.max_len if self.pooling is not None else None
            return self.hf_config.context_len if limit is None else min(limit, self.hf_config.context_len)
        return self.max_model_len

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Returns the SamplingParams fields that the model's generation_config.json sets."""
        values = {ours: self.generation_defaults.get(theirs) for ours, theirs in _SAMPLING_NAMES.items()}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def name(self) -> str:
        """Returns the model's name in answers and metrics."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names that requests may use for it."""
        names = self.served_model_name
        return (names,) if isinstance(names, str) else tuple(names or (self.model,))


_CANONICAL = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
_BY_CHECKPOINT = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}


def resolve_dtype_name(model_config: ModelConfig, device_type: str) -> str:
    """Returns the dtype asked for; with "auto" the checkpoint's own, except that float16 runs as bfloat16 on "cpu".

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
    """Returns the type of most weights, for a config.json without one."""
    stored = CheckpointIndex.from_dir(model_config.model_dir).main_dtype
    return _BY_CHECKPOINT.get(stored, stored)


def resolve_model_dir(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    token: str | None = None,
    tokenizer_only: bool = False,
) -> Path:
    """Returns the directory of `model`: a shipped name, a local directory, or a hub id (downloaded unless cached).

    Raises ModelLoadError when it is none of these or cannot be fetched; the message names both remedies.
    """
    if model in (DEMO_MODEL, DRAFT_MODEL) and not Path(model).is_dir():
        return ASSETS_DIR / model
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf" and path.is_file():
        raise ModelLoadError(
            f"{model} is a GGUF file; turn it into a checkpoint directory first: quire convert-gguf {model} DIRECTORY"
        )
    if path.is_file():
        raise ModelLoadError(f"{model} is a file; give the directory that holds config.json and the weights")
    if not is_hub_id(model):
        raise ModelLoadError(
            f"{model} is not a directory, and not a hub id either (those look like owner/name); "
            "check the path, or fetch a model with quire pull OWNER/NAME"
        )
    return fetch_model(model, revision, download_dir, token, TOKENIZER_FILES if tokenizer_only else MODEL_FILES)

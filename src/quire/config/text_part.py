"""The text model inside a repository that also reads images or sounds.

Its config.json has a `text_config` (older ones of Qwen2.5-VL have its keys beside `vision_config`), its architecture a
name that is not a text model's. Quire serves the text model: `text_part` returns the config of one. The tensors of the
other parts are not read (config/tensor_names.py), and requests with images are refused by the chat endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.checkpoint import CheckpointIndex
from quire.errors import ModelLoadError, UnsupportedModelError

REPOSITORIES: frozenset[str] = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
    }
)
"""Architectures whose text part answers a text as the whole does; tests compare each with transformers' whole model."""

TEXT_MODELS: Mapping[str, str] = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""Architectures by the text part's `model_type`."""

_SHARED = (
    *("dtype", "torch_dtype", "quantization_config", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Keys that hold for the text part where it has none of its own."""
_TIED = "tie_word_embeddings"
PART_OF = "quire_part_of"
"""Key with the repository's architecture in the config that `text_part` returns."""


def text_part(raw: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Returns the text model's config of a repository in REPOSITORIES; any other config as it is.

    `raw` is the content of the config.json at `path`. Raises UnsupportedModelError for a text model that is not known.
    """
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    if not isinstance(architecture, str) or architecture not in REPOSITORIES:
        return raw
    nested = raw.get("text_config")
    text = nested if isinstance(nested, dict) else raw
    model_type = text.get("model_type") or ("llama" if text is nested else "")
    if not isinstance(model_type, str) or model_type not in TEXT_MODELS:
        raise UnsupportedModelError(
            f"{path}: {architecture} has a text part of type {model_type!r}; known are {', '.join(sorted(TEXT_MODELS))}"
        )
    shared = {key: raw[key] for key in _SHARED if key in raw}
    tied = raw.get(_TIED, text.get(_TIED))
    if tied is None and (is_tied := _has_no_head(path.parent)) is not None:
        tied = is_tied
    part = {**shared, **text, "architectures": [TEXT_MODELS[model_type]], "model_type": model_type}
    return {**part, PART_OF: architecture, **({} if tied is None else {_TIED: tied})}


def _has_no_head(directory: Path) -> bool | None:
    """Returns True if a checkpoint has no logits head of its own, None if there is no checkpoint to look at.

    Defaults of the key differ between the releases of transformers that wrote such repositories.
    """
    try:
        names = CheckpointIndex.from_dir(directory).tensors
    except ModelLoadError:
        return None
    return not any(name.endswith("lm_head.weight") for name in names)

"""The table of models: the architecture a checkpoint names -> the class that runs it."""

from __future__ import annotations

import difflib
from typing import Any

from quire.errors import UnsupportedModelError
from quire.resolve import resolve

MODELS: dict[str, str] = {
    "Gemma2ForCausalLM": "quire.worker.models.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "quire.worker.models.gemma:Gemma3ForCausalLM",
    "GraniteForCausalLM": "quire.worker.models.granite:GraniteForCausalLM",
    "LlamaForCausalLM": "quire.worker.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "quire.worker.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "quire.worker.models.mistral:MixtralForCausalLM",
    "OPTForCausalLM": "quire.worker.models.opt:OPTForCausalLM",
    "Olmo2ForCausalLM": "quire.worker.models.olmo2:Olmo2ForCausalLM",
    "Phi3ForCausalLM": "quire.worker.models.phi3:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "quire.worker.models.qwen:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "quire.worker.models.qwen:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "quire.worker.models.qwen:Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM": "quire.worker.models.smollm3:SmolLM3ForCausalLM",
}
"""Imported on demand. To add a row: docs/recipes/add_a_model.md."""


def get_model_class(architecture: str) -> Any:
    """The class of `architecture`: `cls(hf_config)` is an nn.Module. Raises UnsupportedModelError naming near ones."""
    if architecture in MODELS:
        return resolve(MODELS[architecture])
    near = difflib.get_close_matches(architecture, MODELS, n=3)
    hint = f"similar ones are {', '.join(near)}" if near else f"known are {', '.join(sorted(MODELS))}"
    raise UnsupportedModelError(
        f"architecture {architecture!r} of config.json is not implemented; {hint}; "
        "docs/recipes/add_a_model.md shows how to add one"
    )

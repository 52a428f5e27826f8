"""The table of models: the architecture a checkpoint names -> the class that runs it."""

from __future__ import annotations

import difflib
from typing import Any

from quire.errors import UnsupportedModelError
from quire.resolve import resolve

MODELS: dict[str, str] = {
    "LlamaForCausalLM": "quire.worker.models.llama:LlamaForCausalLM",
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

"""A checkpoint's `config.json`, read once, in old and new spelling (spec/ecosystem.md §0, §6).

`HFConfig` gives the names every decoder has; what only one family has is read by that family's model file with `get`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer. `params` holds what the scaling of `rope_type` needs."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HFConfig:
    """The architecture of a checkpoint. `raw` is the JSON object (after `hf_overrides`); `path` is for messages."""

    raw: Mapping[str, Any]
    path: Path

    @staticmethod
    def from_dir(model_dir: Path, overrides: Mapping[str, Any] | None = None) -> HFConfig:
        """Read `model_dir/config.json`. Raises ModelLoadError naming the file."""
        path = model_dir / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelLoadError(f"{path} does not exist; is {model_dir} a Hugging Face checkpoint?") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            raise ModelLoadError(f"{path} is not valid JSON: {e}") from None
        if not isinstance(raw, dict):
            raise ModelLoadError(f"{path} holds a {type(raw).__name__}, not an object")
        return HFConfig({**raw, **(overrides or {})}, path)

    def get(self, key: str, default: Any = None) -> Any:
        """A key of the JSON object; a JSON null counts as absent."""
        value = self.raw.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        """A key that must be there. Raises ModelLoadError naming file and key."""
        value = self.raw.get(key)
        if value is None:
            raise ModelLoadError(f"{self.path} has no {key!r}, which {self.architecture} needs")
        return value

    @property
    def architecture(self) -> str:
        """The model class the checkpoint names."""
        names = self.raw.get("architectures") or []
        return str(names[0]) if names else ""

    @property
    def model_type(self) -> str:
        """transformers' short name of the family."""
        return str(self.get("model_type", ""))

    @property
    def vocab_size(self) -> int:
        return int(self.require("vocab_size"))

    @property
    def hidden_size(self) -> int:
        return int(self.require("hidden_size"))

    @property
    def num_hidden_layers(self) -> int:
        return int(self.require("num_hidden_layers"))

    @property
    def num_attention_heads(self) -> int:
        return int(self.require("num_attention_heads"))

    @property
    def num_key_value_heads(self) -> int:
        return int(self.get("num_key_value_heads", self.num_attention_heads))

    @property
    def head_dim(self) -> int:
        return int(self.get("head_dim", self.hidden_size // self.num_attention_heads))

    @property
    def max_position_embeddings(self) -> int:
        return int(self.get("max_position_embeddings", 2048))

    @property
    def tie_word_embeddings(self) -> bool:
        return bool(self.get("tie_word_embeddings", False))

    @property
    def dtype(self) -> str | None:
        """The checkpoint's type: float32, bfloat16, float16; None if it does not say."""
        value = self.get("dtype", self.get("torch_dtype"))
        return None if value is None else str(value).removeprefix("torch.")

    @property
    def eos_token_ids(self) -> list[int]:
        """All end-of-sequence ids, first one first."""
        value = self.get("eos_token_id", [])
        return [int(v) for v in value] if isinstance(value, list) else [int(value)]

    @property
    def bos_token_id(self) -> int | None:
        value = self.get("bos_token_id")
        return None if value is None else int(value)

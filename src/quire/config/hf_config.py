"""A checkpoint's `config.json`, read once, in old and new spelling.

`HFConfig` has the keys that every decoder has; a family's model file reads its other keys with `get`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.checkpoint import read_object
from quire.config.family_defaults import FAMILY_DEFAULTS, FAMILY_KEYS
from quire.config.text_part import PART_OF, text_part
from quire.errors import ModelLoadError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

ENCODER_STEMS = frozenset({"Bert", "ModernBert", "Roberta", "XLMRoberta"})
"""Architectures, without the name of their head, whose tokens see one another in both directions."""
_LEARNED_POSITIONS = frozenset({"BioGpt", "GPT2", "GPTBigCode", "GPTNeo", "OPT"})
_ROBERTA_STEMS = frozenset({"Roberta", "XLMRoberta"})
_ARCHITECTURE = re.compile(
    r"(?P<stem>\w+?)(?P<head>ForCausalLM|ForMaskedLM|ForSequenceClassification|ForTokenClassification"
    r"|ForRewardModel|ForProcessRewardModel|LMHeadModel|Model)"
)

MAX_SIZE = 1 << 27
"""Largest size of a layer, a vocabulary or a context: a larger one was made to exhaust the process that loads it."""
MAX_COUNTS = {"num_hidden_layers": 4096, "num_experts": 4096, "num_local_experts": 4096, "num_attention_heads": 1 << 16}
"""Largest numbers of parts that are made one by one."""
MAX_CONTEXT_LEN = 1 << 31
"""Tokens of the longest context a config.json may give: rotary tables have a row for each."""
_SCALED_FROM_ORIGINAL = ("llama3", "longrope", "yarn")


def split_architecture(name: str) -> tuple[str, str]:
    """Returns ("Qwen3", "ForCausalLM") for "Qwen3ForCausalLM"; ("", name) if it has none of the known heads."""
    found = _ARCHITECTURE.fullmatch(name)
    if found is None:
        return "", name
    return found["stem"], "ForCausalLM" if found["head"] == "LMHeadModel" else found["head"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer. `params` holds the parameters of the scaling `rope_type`."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HFConfig:
    """The architecture of a checkpoint. `raw` is the JSON object (after `hf_overrides`); `path` is for messages.

    `max_model_len` is the longest sequence the engine will run, 0 for the model's own limit: rotary tables have that
    length, and the scalings that depend on a length (dynamic, longrope) are fixed to it.
    """

    raw: Mapping[str, Any]
    path: Path
    max_model_len: int = 0

    @staticmethod
    def from_dir(model_dir: Path, overrides: Mapping[str, Any] | None = None) -> HFConfig:
        """Reads `model_dir/config.json`, of a model that also reads images its text part. Raises ModelLoadError naming
        the file, UnsupportedModelError as `text_part` does."""
        path = model_dir / "config.json"
        raw = read_object(model_dir, path.name)
        if raw is None:
            adapter = read_object(model_dir, "adapter_config.json")
            if adapter is not None:
                base = adapter.get("base_model_name_or_path") or "its base model"
                raise ModelLoadError(f"{model_dir} is a LoRA adapter, not a model; give the model it adapts ({base})")
            raise ModelLoadError(f"{path} does not exist; is {model_dir} a Hugging Face checkpoint?")
        return HFConfig(text_part({**raw, **(overrides or {})}, path), path)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a key of the JSON object, else the family's default, else `default`; a JSON null counts as
        `default`."""
        name = FAMILY_KEYS.get(self.model_type, {}).get(key, key)
        name = name if name in self.raw else key
        value = self.raw.get(name) if name in self.raw else FAMILY_DEFAULTS.get(self.model_type, {}).get(key)
        if isinstance(value, float) and math.isnan(value):
            raise ModelLoadError(f"{self.path} has {key!r} = NaN, which nothing can be computed with")
        return default if value is None else value

    def require(self, key: str) -> Any:
        """Returns a key that must exist. Raises ModelLoadError naming file and key."""
        value = self.get(key)
        if value is None:
            raise ModelLoadError(f"{self.path} has no {key!r}, which {self.architecture or 'every model'} needs")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer of a plausible size. Raises ModelLoadError naming file, key and value."""
        value = self.require(key) if default is None else self.get(key, default)
        most = MAX_COUNTS.get(key, MAX_SIZE)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 1 <= value <= most or value != int(value):
            shown = repr(value)[:60]
            raise ModelLoadError(f"{self.path} has {key!r} = {shown}, which must be a positive integer, at most {most}")
        return int(value)

    @property
    def architecture(self) -> str:
        """Architecture that the checkpoint names."""
        names = self.raw.get("architectures") or []
        return str(names[0]) if names else ""

    @property
    def part_of(self) -> str:
        """Architecture of the repository whose text part this is; empty if it is the whole."""
        return str(self.raw.get(PART_OF) or "")

    @property
    def stem(self) -> str:
        """Architecture without the name of the head; empty if the head is not a known one."""
        return split_architecture(self.architecture)[0]

    @property
    def is_encoder(self) -> bool:
        """Returns whether its tokens attend to one another in both directions."""
        return self.stem in ENCODER_STEMS

    @property
    def family(self) -> str:
        """Returns the architecture's name in the tables of families, which does not depend on the checkpoint's head: a
        decoder has the name with a logits head, an encoder the name without a head."""
        if self.is_encoder:
            return f"{self.stem}Model"
        return f"{self.stem}ForCausalLM" if self.stem else self.architecture

    @property
    def model_type(self) -> str:
        """transformers' short name of the family."""
        return str(self.raw.get("model_type") or "")

    @property
    def vocab_size(self) -> int:
        return self.size("vocab_size")

    @property
    def hidden_size(self) -> int:
        return self.size("hidden_size")

    @property
    def num_hidden_layers(self) -> int:
        return self.size("num_hidden_layers")

    @property
    def num_attention_heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def num_key_value_heads(self) -> int:
        if self.get("multi_query", False) and not self.get("new_decoder_architecture", False):
            return 1  # Falcon, GPT-BigCode
        count, num_heads = self.size("num_key_value_heads", self.num_attention_heads), self.num_attention_heads
        if num_heads % count:
            raise ModelLoadError(f"{self.path} has {num_heads} attention heads, no multiple of its {count} kv heads")
        return count

    @property
    def head_dim(self) -> int:
        return self.size("head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def max_position_embeddings(self) -> int:
        return self.size("max_position_embeddings", 2048)

    @property
    def position_offset(self) -> int:
        """Rows at the head of the position table that are no positions: RoBERTa counts from its padding's id on."""
        return int(self.get("pad_token_id", 1)) + 1 if self.stem in _ROBERTA_STEMS else 0

    @property
    def num_positions(self) -> int | None:
        """Number of learned positions, which no flag can exceed; None where positions are angles."""
        is_learned = (self.is_encoder and self.stem != "ModernBert") or self.stem in _LEARNED_POSITIONS
        return self.max_position_embeddings - self.position_offset if is_learned else None

    @property
    def context_len(self) -> int:
        """Tokens of the longest sequence: what the engine asked for, or the model's own limit.

        The limit is `max_position_embeddings`, stretched by the two rotary scalings whose configs give the length
        before scaling: linear (except Gemma 3's) and yarn.
        """
        if self.max_model_len:
            return self.max_model_len
        limit = float(self.max_position_embeddings - self.position_offset)
        rope = self.rope()
        factor = float(rope.params.get("factor") or 1.0)
        if rope.rope_type == "linear" and self.model_type != "gemma3_text":
            limit *= factor
        elif rope.rope_type == "yarn":
            limit = max(limit, rope.params["original_max_position_embeddings"] * factor)
        if limit > MAX_CONTEXT_LEN:
            raise ModelLoadError(f"{self.path} gives a context of {limit:g} tokens; the limit is {MAX_CONTEXT_LEN}")
        return int(limit)

    @property
    def longest_context_len(self) -> int:
        """Tokens of the longest sequence that may be asked for: `context_len`, or what dynamic scaling
        stretches it to."""
        rope = self.rope()
        factor = float(rope.params.get("factor") or 1.0) if rope.rope_type == "dynamic" else 1.0
        return int(min(self.context_len * factor, MAX_CONTEXT_LEN))

    @property
    def tie_word_embeddings(self) -> bool:
        return bool(self.get("tie_word_embeddings", False))

    @property
    def dtype(self) -> str | None:
        """The checkpoint's type: float32, bfloat16, float16; None if config.json names none."""
        value = self.get("dtype", self.get("torch_dtype"))
        return None if value is None else str(value).removeprefix("torch.")

    @property
    def eos_token_ids(self) -> list[int]:
        """All end-of-sequence ids."""
        return token_ids(self.get("eos_token_id", []), self.path)

    @property
    def bos_token_id(self) -> int | None:
        value = self.get("bos_token_id")
        return None if value is None else token_ids(value, self.path)[0]

    def rope(self, layer_type: str = FULL_ATTENTION) -> RopeConfig:
        """Returns the rotary embedding of one kind of layer.

        Reads `rope_parameters` (flat, or nested by layer type) and the older `rope_theta`, `rope_scaling`,
        `partial_rotary_factor`, `original_max_position_embeddings` and (Gemma 3's sliding layers)
        `rope_local_base_freq`. `rope_scaling` wins over `rope_parameters`, as in transformers.
        """
        params = self._rope_params(layer_type)
        is_local = layer_type == SLIDING_ATTENTION and self.get("rope_local_base_freq") is not None
        theta = self.get("rope_local_base_freq" if is_local else "rope_theta", 10000.0)
        rope_type = str(params.pop("rope_type", None) or params.pop("type", None) or "default")
        params.pop("type", None)
        if self.model_type == "phi3" and rope_type in ("su", "yarn"):  # the first name of longrope
            rope_type = "longrope"
        if rope_type == "mrope":  # several positions per token, which are equal for text
            rope_type = "default"
        if rope_type in _SCALED_FROM_ORIGINAL:
            original = self.get("original_max_position_embeddings", params.get("original_max_position_embeddings"))
            params["original_max_position_embeddings"] = original or self.max_position_embeddings
        partial = params.pop("partial_rotary_factor", None) or self.get("partial_rotary_factor", 1.0)
        theta = params.pop("rope_theta", None) or theta
        numbers = {"rope_theta": theta, "partial_rotary_factor": partial}
        numbers |= {key: params.get(key) or 1 for key in ("factor", "original_max_position_embeddings")}
        for key, value in numbers.items():
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ModelLoadError(f"{self.path} has rotary parameter {key!r} = {value!r}; it must be positive")
        if rope_type in ("longrope", "yarn") and not params.get("factor"):
            params["factor"] = self.max_position_embeddings / params["original_max_position_embeddings"]
        return RopeConfig(rope_type, float(theta), float(partial), params)

    def _rope_params(self, layer_type: str) -> dict[str, Any]:
        """Returns a copy of the JSON object for `layer_type`. Raises ModelLoadError if it is not an object."""
        params = self.get("rope_parameters", {})
        if isinstance(params, dict) and (SLIDING_ATTENTION in params or FULL_ATTENTION in params):
            params = params.get(layer_type) or {}
        has_local_rope = self.get("rope_local_base_freq") is not None or self.model_type == "olmo3"
        if self.get("rope_scaling") and not (has_local_rope and layer_type == SLIDING_ATTENTION):
            params = self.get("rope_scaling")
        if not isinstance(params, dict):
            raise ModelLoadError(f"{self.path} has rotary parameters {params!r}, which must be an object")
        return dict(params)


def token_ids(value: Any, source: Path) -> list[int]:
    """Returns a token id, or a list of them, as configuration files write them. Raises ModelLoadError naming
    `source`."""
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in ids):
        raise ModelLoadError(
            f"{source} names the special token {str(value)[:60]}, which must be an id or a list of ids"
        )
    return ids

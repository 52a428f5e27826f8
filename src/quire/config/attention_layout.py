"""Which layers of a checkpoint attend to a window of tokens only, read from config.json without building the model.

This is the only place with that knowledge: model files make their layers by it, `quire info` sizes the KV cache by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.config.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig
from quire.errors import ModelLoadError, UnsupportedModelError

IsSliding = Callable[[HFConfig, int], bool]


def rotates(hf: HFConfig, layer: int) -> bool:
    """Returns whether a layer of SmolLM3 or Llama 4 has a rotary embedding.

    `no_rope_layers` has a 1 for each that has one; without it, or if it is empty, every n-th layer has none.

    Raises ModelLoadError if the list is too short.
    """
    flags = hf.get("no_rope_layers")
    if flags is None or flags == []:
        return (layer + 1) % hf.size("no_rope_layer_interval") != 0
    if not isinstance(flags, list) or len(flags) < hf.num_hidden_layers:
        raise ModelLoadError(f"{hf.path} has no_rope_layers {flags!r}, which must be a list of {hf.num_hidden_layers}")
    return bool(flags[layer])


def _every(hf: HFConfig, layer: int) -> bool:
    return True


def _every_second(hf: HFConfig, layer: int) -> bool:
    return layer % 2 == 0


def _after_the_first(hf: HFConfig, layer: int) -> bool:
    return layer >= int(hf.get("max_window_layers", 0))


def _all_but_each_last(hf: HFConfig, layer: int) -> bool:
    return (layer + 1) % hf.size("sliding_window_pattern") != 0


def _even_before_the_last(hf: HFConfig, layer: int) -> bool:
    return layer % 2 == 0 and layer < int(hf.get("max_window_layers", 0))


def _never(hf: HFConfig, layer: int) -> bool:
    return False


def _near_by(hf: HFConfig, layer: int) -> bool:
    return layer % hf.size("global_attn_every_n_layers") != 0


def _all_but_each_fourth(hf: HFConfig, layer: int) -> bool:
    return (layer + 1) % 4 != 0


def _after_each_fourth(hf: HFConfig, layer: int) -> bool:
    return layer % 4 != 0


def _by_pattern(hf: HFConfig, layer: int) -> bool:
    """`sliding_window_pattern` is a number, or one letter per layer (L: window, G: none), repeated; the last layer has
    none."""
    pattern = hf.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return layer + 1 < hf.num_hidden_layers and pattern[layer % len(pattern)] == "L"
    return hf.get("sliding_window") is not None and _all_but_each_last(hf, layer)


def _all_but_each_sixth(hf: HFConfig, layer: int) -> bool:
    return (layer + 1) % 6 != 0


def _after_the_dense(hf: HFConfig, layer: int) -> bool:
    """Dense layers at the start have a pattern of their own."""
    num_dense = int(hf.get("first_k_dense_replace", 0))
    if layer < num_dense:
        return (layer + 1) % hf.size("prefix_dense_sliding_window_pattern", 1) != 0
    return _all_but_each_last(hf, layer - num_dense)


def _without_rotation(hf: HFConfig, layer: int) -> bool:
    return not rotates(hf, layer)


def _is_local(hf: HFConfig, layer: int) -> bool:
    """`attention_types` of GPT-Neo is a list of (kinds, repetitions)."""
    kinds = hf.get("attention_layers") or [kind for kinds, times in hf.get("attention_types") for kind in kinds * times]
    if len(kinds) < hf.num_hidden_layers or not set(kinds) <= {"global", "local"}:
        raise ModelLoadError(f"{hf.path} has attention layers {kinds!r}; {hf.num_hidden_layers} are needed")
    return bool(kinds[layer] == "local")


LATENT: frozenset[str] = frozenset(
    (
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "MiniCPM3ForCausalLM",
        "YoutuForCausalLM",
    )
)
"""Architectures with multi-head latent attention."""

CHUNKED: frozenset[str] = frozenset(("Llama4ForCausalLM",))
"""Architectures with layers that see their own chunk of the text."""

CHUNKED_ATTENTION = "chunked_attention"

UNIFORM: frozenset[str] = frozenset(
    (
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "PhimoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Starcoder2ForCausalLM",
    )
)
"""Architectures whose layers all have the window, if there is one, with any `layer_types`."""

MIXED: Mapping[str, IsSliding] = {
    "AfmoeForCausalLM": _all_but_each_last,
    "Cohere2ForCausalLM": _all_but_each_last,
    "Cohere2MoeForCausalLM": _after_the_dense,
    "CwmForCausalLM": _after_each_fourth,
    "Dots1ForCausalLM": _after_the_first,
    "Exaone4ForCausalLM": _by_pattern,
    "ExaoneMoeForCausalLM": _all_but_each_last,
    "GPTNeoForCausalLM": _is_local,
    "Gemma2ForCausalLM": _every_second,
    "Gemma3ForCausalLM": _all_but_each_last,
    "Gemma4ForCausalLM": _all_but_each_sixth,
    "Gemma4UnifiedForCausalLM": _all_but_each_sixth,
    "GptOssForCausalLM": _every_second,
    "GraniteMoeSWAForCausalLM": _after_each_fourth,
    "GraniteSWAForCausalLM": _after_each_fourth,
    "LagunaForCausalLM": _never,
    "MellumForCausalLM": _never,
    "MinistralForCausalLM": _every,
    "ModernBertModel": _near_by,
    "Olmo3ForCausalLM": _all_but_each_fourth,
    "Qwen2ForCausalLM": _after_the_first,
    "Qwen2MoeForCausalLM": _even_before_the_last,
    "Qwen3ForCausalLM": _after_the_first,
    "SmolLM3ForCausalLM": _without_rotation,
    "VaultGemmaForCausalLM": _every_second,
}
"""Architectures with and without a window by layer: the rule where config.json has no `layer_types`."""

LAST_IS_FULL: frozenset[str] = frozenset(("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"))
"""Architectures whose last layer has no window, whatever the list says."""


def layer_kinds(hf: HFConfig) -> list[str]:
    """Returns the kind of each layer, FULL_ATTENTION or SLIDING_ATTENTION; architectures in neither table have no
    windows.

    A sliding layer has a window only if config.json gives one: see `attention_windows`. Raises UnsupportedModelError
    for a kind that is not attention, ModelLoadError for a list of the wrong length.
    """
    count = hf.num_hidden_layers
    if hf.family in UNIFORM:
        return [SLIDING_ATTENTION] * count
    is_sliding = MIXED.get(hf.family)
    if is_sliding is None:
        return [FULL_ATTENTION] * count
    types = hf.get("layer_types")
    if types is None:
        types = [SLIDING_ATTENTION if is_sliding(hf, layer) else FULL_ATTENTION for layer in range(count)]
    *kinds, last = _checked_kinds(hf, types, SLIDING_ATTENTION)
    return [*kinds, FULL_ATTENTION if hf.family in LAST_IS_FULL else last]


def _checked_kinds(hf: HFConfig, kinds: Any, partial: str) -> list[str]:
    """Returns the kinds of the model's layers, each FULL_ATTENTION or `partial`. Raises as `layer_kinds` does."""
    count = hf.num_hidden_layers
    if not isinstance(kinds, list) or len(kinds) < count:
        raise ModelLoadError(f"{hf.path} has layer_types {kinds!r}, which must be a list of {count}")
    for kind in kinds[:count]:
        if kind not in (FULL_ATTENTION, partial):
            raise UnsupportedModelError(f"{hf.path} has a layer of type {kind!r}, which is not implemented")
    return kinds[:count]


def attention_windows(hf: HFConfig) -> list[int | None]:
    """Returns for each layer the number of tokens that a query attends to, its own included; None for all before it.

    Raises the errors of `layer_kinds`, and ModelLoadError for a window that is not a positive integer.
    """
    is_off = hf.get("sliding_window") is None or not hf.get("use_sliding_window", True)
    window = None if is_off else hf.size("sliding_window")
    return [window if kind == SLIDING_ATTENTION else None for kind in layer_kinds(hf)]


def attention_chunks(hf: HFConfig) -> list[int | None]:
    """Returns for each layer of Llama 4 the size of the chunks outside of which a query sees nothing; None for none.

    Raises UnsupportedModelError for another kind of layer, ModelLoadError for a list of the wrong length.
    """
    layers = range(hf.num_hidden_layers)
    default = [CHUNKED_ATTENTION if rotates(hf, layer) else FULL_ATTENTION for layer in layers]
    kinds = _checked_kinds(hf, hf.get("layer_types") or default, CHUNKED_ATTENTION)
    size = None if hf.get("attention_chunk_size") is None else hf.size("attention_chunk_size")
    return [size if kind == CHUNKED_ATTENTION else None for kind in kinds]


_OF_LAYERS = frozenset(("head_dim", "num_attention_heads", "num_key_value_heads"))


def layer_configs(hf: HFConfig) -> list[HFConfig]:
    """Returns the config of each layer, which is `hf` where heads do not differ between layers.

    `per_layer_config` has the keys that differ, by the number of the layer. Gemma 4's older configs have the heads of
    layers without a window under keys of their own, Laguna's a list of numbers of heads. Raises
    UnsupportedModelError for other keys.
    """
    own, heads = hf.get("per_layer_config"), hf.get("num_attention_heads_per_layer")
    if own is None and isinstance(heads, list):
        own = {str(i): {"num_attention_heads": count} for i, count in enumerate(heads)}
    if own is None:
        keys = {"head_dim": "global_head_dim"}
        if hf.get("attention_k_eq_v", False):
            keys["num_key_value_heads"] = "num_global_key_value_heads"
        wide = {key: hf.get(name) for key, name in keys.items() if hf.get(name) is not None}
        own = {str(i): wide for i, kind in enumerate(layer_kinds(hf)) if kind == FULL_ATTENTION and wide}
    if not isinstance(own, dict) or not all(
        isinstance(keys, dict) and keys.keys() <= _OF_LAYERS for keys in own.values()
    ):
        raise UnsupportedModelError(f"{hf.path} has per_layer_config {own!r}; only {sorted(_OF_LAYERS)} may differ")
    layers = map(str, range(hf.num_hidden_layers))
    return [replace(hf, raw={**hf.raw, **own[layer]}) if layer in own else hf for layer in layers]


def kv_sources(hf: HFConfig) -> list[int | None]:
    """Returns for each layer the number of the layer whose keys and values it reads; None if it has its own.

    The last `num_kv_shared_layers` read those of the last layer of their kind before them. Raises ModelLoadError if
    there is none.
    """
    kinds, num_shared = layer_kinds(hf), hf.get("num_kv_shared_layers", 0)
    if num_shared == 0:
        return [None] * len(kinds)
    own = kinds[: -hf.size("num_kv_shared_layers")]
    if missing := set(kinds) - set(own):
        raise ModelLoadError(f"{hf.path} has num_kv_shared_layers = {num_shared}, with no {missing} before them")
    return [None] * len(own) + [len(own) - 1 - own[::-1].index(kind) for kind in kinds[len(own) :]]


@dataclass(frozen=True)
class CachedLayer:
    """The keys and values that one layer stores for each token."""

    num_kv_heads: int
    head_size: int
    window: int | None = None
    """Tokens a query sees; None for all."""
    chunk: int | None = None
    """Size of the chunks outside of which it sees nothing; None for none."""
    is_latent: bool = False
    """Values are parts of keys."""


def cached_layers(hf: HFConfig) -> dict[int, CachedLayer]:
    """Returns what each layer stores, by the number of the layer; nothing for an encoder, or for a layer that reads
    another's. Raises as the functions above do."""
    if hf.is_encoder:
        return {}
    if hf.family in LATENT:
        latent = CachedLayer(1, hf.size("kv_lora_rank") + hf.size("qk_rope_head_dim"), is_latent=True)
        return dict.fromkeys(range(hf.num_hidden_layers), latent)
    if hf.family in CHUNKED:
        heads, size = hf.num_key_value_heads, hf.head_dim
        return {i: CachedLayer(heads, size, chunk=chunk) for i, chunk in enumerate(attention_chunks(hf))}
    windows, sources = attention_windows(hf), kv_sources(hf)
    return {
        i: CachedLayer(config.num_key_value_heads, config.head_dim, windows[i])
        for i, config in enumerate(layer_configs(hf))
        if sources[i] is None
    }

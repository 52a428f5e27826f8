"""Which layers of a checkpoint see a window of tokens only: told from config.json, without building the model.

The model files decide this for the engine; a test holds this table against them. An architecture that is not in it
counts as one without windows, which makes `quire info` ask for too much memory rather than too little.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.config.hf_config import SLIDING_ATTENTION, HFConfig
from quire.wire.kv_cache import AnyKVCacheSpec, FullAttentionSpec, SlidingWindowSpec

_IsSliding = Callable[[HFConfig, int], bool]


def _every(hf: HFConfig, layer: int) -> bool:
    return True


def _after_the_first(hf: HFConfig, layer: int) -> bool:
    return layer >= int(hf.get("max_window_layers", 0))


def _all_but_each_last(hf: HFConfig, layer: int) -> bool:
    return (layer + 1) % hf.size("sliding_window_pattern") != 0


def _without_rotation(hf: HFConfig, layer: int) -> bool:
    rotates = hf.get("no_rope_layers")
    return not rotates[layer] if rotates else (layer + 1) % hf.size("no_rope_layer_interval") == 0


_WINDOWED: dict[str, _IsSliding] = {
    "MistralForCausalLM": _every,
    "MixtralForCausalLM": _every,
    "Phi3ForCausalLM": _every,
    "Qwen3MoeForCausalLM": _every,
    "Qwen2ForCausalLM": _after_the_first,
    "Qwen3ForCausalLM": _after_the_first,
    "Gemma2ForCausalLM": lambda hf, layer: layer % 2 == 0,
    "SmolLM3ForCausalLM": _without_rotation,
    "Gemma3ForCausalLM": _all_but_each_last,
}
"""Architectures whose layers may have a window, and which do where config.json has no `layer_types`."""


def attention_windows(hf: HFConfig) -> list[int | None]:
    """The window of each layer in tokens; None where it sees everything before it."""
    layers = range(hf.num_hidden_layers)
    is_sliding = _WINDOWED.get(hf.architecture)
    if is_sliding is None or hf.get("sliding_window") is None or not hf.get("use_sliding_window", True):
        return [None for _ in layers]
    window, types = hf.size("sliding_window"), hf.get("layer_types")
    if types is not None and is_sliding is not _every:
        return [window if types[layer] == SLIDING_ATTENTION else None for layer in layers]
    return [window if is_sliding(hf, layer) else None for layer in layers]


def kv_cache_specs(hf: HFConfig, block_size: int, dtype: str) -> dict[str, AnyKVCacheSpec]:
    """What each layer keeps per token, as the worker will report it."""
    heads, size = hf.num_key_value_heads, hf.head_dim
    return {
        f"layer {i}": FullAttentionSpec(block_size, heads, size, dtype)
        if window is None
        else SlidingWindowSpec(block_size, heads, size, dtype, window)
        for i, window in enumerate(attention_windows(hf))
    }

"""Keyword arguments of vLLM's `LLM` that Quire has no counterpart for.

A script that passes one at its default runs unchanged; any other value is refused by name, because ignoring it would be
a lie. Names and defaults: spec/vllm.md §1.
"""

from __future__ import annotations

from typing import Any

from quire.config.engine_args import FLAGS
from quire.errors import ConfigError

UNSUPPORTED_DEFAULTS: dict[str, Any] = {
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "cpu_offload_gb": 0,
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "offload_params": None,
    "enable_lora": False,
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "disable_custom_all_reduce": False,
    "mm_processor_kwargs": None,
    "structured_outputs_config": None,
    "speculative_config": None,
    "attention_config": None,
    "compilation_config": None,
    "quantization_config": None,
    "logits_processors": None,
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
}
ALWAYS_SO = frozenset({"enforce_eager", "enable_sleep_mode"})
"""Switches whose either position describes what Quire does: it captures and compiles nothing, and can always sleep."""


def check_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords that are flags. Raises ConfigError for one that would have to be ignored."""
    if keywords.pop("trust_remote_code", False):
        raise ConfigError(
            "trust_remote_code=True: Quire never runs code that comes with a model; its architectures are built in "
            "(quire.worker.models), so leave it at False"
        )
    flags = {}
    for name, value in keywords.items():
        if name in FLAGS or name not in UNSUPPORTED_DEFAULTS.keys() | ALWAYS_SO:
            flags[name] = value
        elif name in UNSUPPORTED_DEFAULTS and value != UNSUPPORTED_DEFAULTS[name]:
            raise ConfigError(
                f"{name}={value!r} is not supported by this version of Quire; leave it at "
                f"{UNSUPPORTED_DEFAULTS[name]!r}"
            )
    return flags

"""Heads that draft, from the checkpoint to the output: tokens are those without them, whatever the head is worth.

A random head is hardly ever right. The others are constructed: the target's layers add nothing, so that its next token
depends on the last one alone, and the head passes the embedding of that token on to the same logits head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.testing.tiny_models import VOCAB_SIZE, make_tiny_checkpoint

SIZE, INNER, NUM_HEADS, DRAFTS = 48, 80, 4, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": SIZE, "intermediate_size": INNER,
    "num_hidden_layers": 1, "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS,
    "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip
EAGLE3 = {
    **CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 380, "norm_output": True,
    "eagle_aux_hidden_state_layer_ids": [0, 2],
}  # fmt: skip
PROMPTS = [[7, 100, 30, 200, 9], [5] * 40, list(range(10, 95)), [7, 100, 30, 200, 9, 11], [300], list(range(10, 80))]


def make_target(path: Path) -> Path:
    """A Llama whose layers add nothing."""
    make_tiny_checkpoint(path, "llama")
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
        if "norm" in name:
            tensor.fill_(1.0)
    embedding = tensors["model.embed_tokens.weight"]  # a norm does not change it
    tensors["model.embed_tokens.weight"] = embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt()
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def layer(wide: int, is_random: bool) -> dict[str, Tensor]:
    """A layer that passes on, from the first half of what it reads, what is at the same position; or a random one."""
    shapes = {
        **{f"self_attn.{p}_proj": (SIZE, wide) for p in "qkv"}, "self_attn.o_proj": (SIZE, SIZE),
        "mlp.gate_proj": (INNER, SIZE), "mlp.up_proj": (INNER, SIZE), "mlp.down_proj": (SIZE, INNER),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    tensors = {f"{n}.weight": torch.randn(*s, generator=generator) * 0.2 * is_random for n, s in shapes.items()}
    if not is_random:
        tensors["self_attn.v_proj.weight"] = torch.eye(SIZE, wide)
        tensors["self_attn.v_proj.bias"] = torch.zeros(SIZE)
        for part in "qk":  # the same vector everywhere: rotated, it is likest to itself where it stands
            tensors[f"self_attn.{part}_proj.bias"] = torch.full((SIZE,), 12.0)
    return {f"layers.0.{name}": tensor for name, tensor in tensors.items()}


def make_head(path: Path, target: Path, *, eagle3: bool, is_random: bool) -> Path:
    path.mkdir()
    one, theirs = torch.ones(SIZE), load_file(target / "model.safetensors")
    tensors = layer(2 * SIZE if eagle3 else SIZE, is_random) | {"layers.0.post_attention_layernorm.weight": one}
    if not eagle3:
        tensors["fc.weight"] = torch.eye(SIZE, 2 * SIZE)
    else:
        ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))[:380].sort().values
        tensors |= {f"layers.0.{name}.weight": one.clone() for name in ("input_layernorm", "hidden_norm")}
        tensors |= {"norm.weight": one.clone(), "lm_head.weight": theirs["lm_head.weight"][ids]}
        tapped = torch.randn(SIZE, 2 * SIZE, generator=torch.Generator().manual_seed(2)) * 0.2 * is_random
        tensors |= {"fc.weight": tapped, "d2t": ids - torch.arange(380)}
        tensors["layers.0.self_attn.o_proj.weight"] = 1000 * torch.eye(SIZE) if not is_random else torch.eye(SIZE)
    (path / "config.json").write_text(json.dumps(EAGLE3 if eagle3 else CONFIG))
    save_file(tensors, path / "model.safetensors")
    return path


def params() -> list[SamplingParams]:
    shared: Any = {"ignore_eos": True, "detokenize": False, "logprobs": 2}
    return [
        SamplingParams(temperature=t, seed=i, max_tokens=24 + i, **shared)
        for i, t in enumerate([0.0, 0.7, 0.0, 1.0, 0.0, 0.4])
    ]


def run(target: Path, head: Path | None, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    config = {"model": str(head), "num_speculative_tokens": DRAFTS, "adaptive": False}
    spec = {} if head is None else {"speculative_config": config}
    flags: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "disable_log_stats": False, "weight_cache": False}
    llm = LLM(str(target), **{**flags, **spec, **options})
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params(), use_tqdm=False) + llm.generate(prompts[:3], params()[:3], use_tqdm=False)
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    found = [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.num_cached_tokens) for o in outputs]
    return found, metrics


NUM = "vllm:spec_decode_num_"


@pytest.mark.parametrize("eagle3", [False, True])
@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "dtype": "bfloat16"},
        {"num_gpu_blocks_override": 14, "max_model_len": 128},  # too few for all: requests are preempted
    ],
)
def test_tokens_are_those_without_a_head(
    eagle3: bool, is_random: bool, options: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    head = make_head(tmp_path / ("EAGLE3-head" if eagle3 else "EAGLE-head"), target, eagle3=eagle3, is_random=is_random)
    expected, _ = run(target, None, **options)
    found, metrics = run(target, head, **options)
    if "num_gpu_blocks_override" in options:  # cached blocks are evicted at other times
        found, expected = [answer[:2] for answer in found], [answer[:2] for answer in expected]
    assert found == expected
    assert metrics[f"{NUM}draft_tokens"] > 100
    if not is_random:
        share = metrics[f"{NUM}accepted_tokens"] / metrics[f"{NUM}draft_tokens"]
        assert share > (0.6 if eagle3 else 0.9), share  # EAGLE-3's lacks four tokens

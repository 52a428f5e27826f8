"""Certification of one architecture: a tiny random model on Quire's paged cache beside the plain model.

Texts of 81 and 33 tokens run interleaved in chunks of 7, then token by token, on scattered blocks. Windows and chunks
of 16 are shorter than the texts, so that a window that Quire does not know changes the logits; positions that a model
takes from its cache object, and states that it keeps there, change them, too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import QuireError, UnsupportedModelError
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from quire.worker.attention.backend import AttentionBatch, Forward, ForwardContext, set_forward_context
from quire.worker.attention.layer import Attention
from quire.worker.attention.registry import make_attention_backend
from quire.worker.fallback.model import FallbackForCausalLM
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.registry import choose_kernels
from quire.worker.kv_cache import KVCacheMemory, allocate_kv_cache

TEXT_LENS = (81, 33)
CHUNK = 7
SINGLE = 4
"""Tokens at the end of a text that run one by one."""
BLOCK_SIZE, NUM_BLOCKS = 16, 41
ATTENTION = frozenset({"attention", "full_attention", "sliding_attention"})
"""Kinds of layers that keep nothing but keys and values."""
STATEFUL = "its layers keep recurrent states, which are not implemented yet"
TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit where that is above 1."""
_CPU = torch.device("cpu")


def certify(model_class: Any, config: Any) -> float:
    """Returns the largest difference of a logit between Quire's run of a model and transformers' own.

    Raises UnsupportedModelError where the model cannot run on Quire, or answers differently.
    """
    if (
        getattr(model_class, "_is_stateful", False)
        and not set(getattr(config, "layer_types", None) or [""]) <= ATTENTION
    ):
        raise UnsupportedModelError(STATEFUL)
    plain = make_random_model(model_class, config)
    texts = [torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length)) for length in TEXT_LENS]
    kernels = choose_kernels(_CPU, torch.float32, torch.get_num_threads())
    model = make_fallback(copy.deepcopy(plain), kernels)
    try:
        expected = [plain_logits(plain, text) for text in texts]
    except Exception as e:
        raise UnsupportedModelError(f"transformers itself cannot run it on a text alone: {_first_line(e)}") from e
    try:
        found = run_interleaved(model, kernels, texts)
    except Exception as e:
        raise UnsupportedModelError(f"it cannot run on flat batches: {_first_line(e)}") from e
    scale = max(1.0, max(float(logits.abs().max()) for logits in expected))
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / scale
    if not worst <= TOLERANCE:
        raise UnsupportedModelError(f"its logits differ from transformers' by {worst:.2g} of their size")
    if any(bool((a.argmax(-1) != b.argmax(-1)).any()) for a, b in zip(found, expected, strict=True)):
        raise UnsupportedModelError("its greedy tokens differ from transformers'")
    return worst


def make_random_model(model_class: Any, config: Any) -> Any:
    """Returns a model in float32 whose weights keep the size of activations, with norms and biases that matter."""
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).float().eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                near_one = parameter.data.mean() > 0.5
                parameter.data.uniform_(-0.2, 0.2).add_(1.0 if near_one else 0.0)
            elif "embed" in name and getattr(config, "tie_word_embeddings", False):
                parameter.data.normal_(std=0.4 * parameter.shape[-1] ** -0.5)
            else:
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return model


@torch.inference_mode()
def plain_logits(model: Any, text: Tensor) -> Tensor:
    """[num_tokens, vocab] logits of a text alone."""
    logits: Tensor = model(input_ids=text[None], use_cache=False).logits[0].float()
    return logits


def make_fallback(causal: Any, kernels: Kernels) -> FallbackForCausalLM:
    """Returns a model of transformers on Quire's kernels. Raises UnsupportedModelError."""
    try:
        return FallbackForCausalLM().take(causal, kernels, max(TEXT_LENS))
    except QuireError:
        raise
    except Exception as e:
        raise UnsupportedModelError(f"it cannot run on flat batches: {_first_line(e)}") from e


@torch.inference_mode()
def run_interleaved(model: FallbackForCausalLM, kernels: Kernels, texts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the logits of each text, whose chunks share steps with the others'."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    backend = make_attention_backend(_CPU, torch.float32, torch.float32, kernels)
    forward = backend.plan_steps(model)
    memory = allocate_kv_cache(_cache_config(layers), backend, _CPU)
    blocks = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(1)) + 1
    tables = [blocks[i :: len(texts)].to(torch.int32) for i in range(len(texts))]
    done, logits = [0] * len(texts), [[] for _ in texts]  # type: list[int], list[list[Tensor]]
    while any(n < len(text) for n, text in zip(done, texts, strict=True)):
        steps = [_next_step(n, len(text)) for n, text in zip(done, texts, strict=True)]
        live = [i for i, step in enumerate(steps) if step]
        ids = torch.cat([texts[i][done[i] : done[i] + steps[i]] for i in live])
        positions = torch.cat([torch.arange(done[i], done[i] + steps[i]) for i in live])
        slots = torch.cat(
            [
                tables[i].long()[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                for i in live
                for p in [torch.arange(done[i], done[i] + steps[i])]
            ]
        )
        query_lens = np.array([steps[i] for i in live], dtype=np.int64)
        seq_lens = np.array([done[i] + steps[i] for i in live], dtype=np.int64)
        batch = AttentionBatch(query_lens, seq_lens, torch.stack([tables[i] for i in live]), slots)
        hidden = _forward(forward, backend, memory, batch, ids, positions)
        for i, part in zip(live, torch.split(model.compute_logits(hidden), query_lens.tolist()), strict=True):
            logits[i].append(part.clone())
            done[i] += steps[i]
    return [torch.cat(parts) for parts in logits]


def _next_step(done: int, length: int) -> int:
    left = length - done
    return min(left, 1) if left <= SINGLE else min(CHUNK, left - SINGLE)


def _forward(
    forward: Forward,
    backend: Any,
    memory: KVCacheMemory,
    batch: AttentionBatch,
    ids: Tensor,
    positions: Tensor,
) -> Tensor:
    metadata = [backend.make_metadata(batch, spec) for spec in memory.specs]
    with set_forward_context(ForwardContext(backend, metadata, memory.layer_groups, memory.caches)):
        hidden = forward(ids, positions)
    assert isinstance(hidden, Tensor), "it has no taps"
    return hidden


def _cache_config(layers: Sequence[Attention]) -> KVCacheConfig:
    specs: dict[str, AnyKVCacheSpec] = {
        layer.layer_name: layer.kv_cache_spec(BLOCK_SIZE, torch.float32) for layer in layers
    }
    groups = [
        KVCacheGroupSpec([name for name, s in specs.items() if s == spec], spec)
        for spec in dict.fromkeys(specs.values())
    ]
    tensors = [KVCacheTensor(NUM_BLOCKS * spec.page_size_bytes, [name]) for name, spec in specs.items()]
    return KVCacheConfig(NUM_BLOCKS, tensors, groups)


def _first_line(error: BaseException) -> str:
    words = str(error).strip().partition("\n")[0][:160]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__

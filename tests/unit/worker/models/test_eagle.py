"""Heads that draft: the logits of every layout of checkpoint against a head of plain torch operations, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from quire.config.engine import LoadConfig
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.speculators import AUX_LAYERS, aux_layers, read_head
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.wire.kv_cache import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from quire.worker.attention.backend import AttentionBatch, ForwardContext, KVCache, set_forward_context
from quire.worker.attention.layer import Attention
from quire.worker.attention.native_backend import NativeAttentionBackend, StepPlanner
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.kv_cache import allocate_kv_cache
from quire.worker.loader import ModelWeights, Placement, load_head, load_model
from quire.worker.loader import load as load_module
from quire.worker.loader.shards import Ends
from quire.worker.models.eagle import EagleHead

from .oracle import CPU, DenseAttention, model_config_of

MakeCheckpoint = Callable[..., Path]
VOCAB, DRAFT_VOCAB, TARGET_SIZE, HEADS, KV_HEADS, INNER, THETA = 384, 100, 48, 4, 2, 80, 5000.0
LLAMA = {
    "hidden_size": TARGET_SIZE, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": THETA,
    "max_position_embeddings": 64, "hidden_act": "silu", "model_type": "llama", "torch_dtype": "float32",
}  # fmt: skip
EAGLE1 = {**LLAMA, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
EAGLE3 = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
IDS = {AUX_LAYERS: [0, 1, 2]}
NVIDIA = {
    **EAGLE3,
    "architectures": ["Eagle3LlamaForCausalLM"],
    "eagle_config": {AUX_LAYERS: [2, 0], "use_aux_hidden_state": True, "norm_before_fc": True},
}
SPECULATOR = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB,
    "transformer_layer_config": LLAMA, AUX_LAYERS: [0, 1, 2],
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "owner/target"}
    },
}  # fmt: skip


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)


def make_tensors(
    *, size: int = TARGET_SIZE, eagle3: bool, num_states: int = 3, biases: tuple[str, ...] = (),
    without: tuple[str, ...] = (), extra: tuple[str, ...] = (), layers: int = 1, draft_vocab: int = DRAFT_VOCAB
) -> dict[str, Tensor]:  # fmt: skip
    """Random weights of a head, by the names of `layers.0`."""
    g = torch.Generator().manual_seed(1)
    dim = size // HEADS
    tensors: dict[str, Tensor] = {"embed_tokens.weight": random(g, VOCAB, size)}
    tensors["fc.weight"] = random(g, size, num_states * TARGET_SIZE if eagle3 else 2 * size)
    for i in range(layers):
        wide, layer = (2 * size if eagle3 and i == 0 else size), f"layers.{i}"
        for name, rows, columns in [
            ("self_attn.q_proj", HEADS * dim, wide), ("self_attn.k_proj", KV_HEADS * dim, wide),
            ("self_attn.v_proj", KV_HEADS * dim, wide), ("self_attn.o_proj", size, HEADS * dim),
            ("mlp.gate_proj", INNER, size), ("mlp.up_proj", INNER, size), ("mlp.down_proj", size, INNER),
        ]:  # fmt: skip
            tensors[f"{layer}.{name}.weight"] = random(g, rows, columns)
        tensors[f"{layer}.post_attention_layernorm.weight"] = 1 + random(g, size)
        if eagle3 or i:
            tensors[f"{layer}.input_layernorm.weight"] = 1 + random(g, size)
        if eagle3 and i == 0:
            tensors[f"{layer}.hidden_norm.weight"] = 1 + random(g, size)
    if eagle3:
        tensors["norm.weight"] = 1 + random(g, size)
        tensors["lm_head.weight"] = random(g, draft_vocab, size)
        ids = torch.randperm(VOCAB, generator=g)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    for name in extra:
        tensors[name] = 1 + random(g, num_states * TARGET_SIZE if name.startswith("input_norm") else TARGET_SIZE)
    for name in biases:
        tensors[f"{name}.bias"] = random(g, len(tensors[f"{name}.weight"]))
    return {name: tensor for name, tensor in tensors.items() if name not in without}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def plain_layer(t: dict[str, Tensor], prefix: str, x: Tensor, residual: Tensor) -> Tensor:
    """One layer of a Llama on positions 0, 1, ...: x enters attention."""

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, t[f"{prefix}.{name}.weight"], t.get(f"{prefix}.{name}.bias"))

    n = len(x)
    q, k, v = (linear(f"self_attn.{p}_proj", x).view(n, -1, residual.shape[1] // HEADS).transpose(0, 1) for p in "qkv")
    dim = q.shape[-1]
    angles = torch.arange(n)[:, None] / THETA ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    q, k = (y * cos + torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1) * sin for y in (q, k))
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (k, v))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(n, -1)
    x = residual + linear("self_attn.o_proj", attended)
    normed = rms(x, t[f"{prefix}.post_attention_layernorm.weight"])
    inner = functional.silu(linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed)
    return x + linear("mlp.down_proj", inner)


def plain_head(
    t: dict[str, Tensor], target: dict[str, Tensor], ids: Tensor, states: Tensor, *, eagle3: bool,
    norm_before_residual: bool, norm_output: bool, combine: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns logits and the states to go on with."""
    own = t.get("embed_tokens.weight")
    shares = own is None or own.shape[1] == TARGET_SIZE
    x = functional.embedding(ids, target["model.embed_tokens.weight"] if shares or own is None else own)
    if not eagle3:
        x = functional.linear(torch.cat([x, states], -1), t["fc.weight"], t.get("fc.bias"))
        x = plain_layer(t, "layers.0", x, x)
    else:
        if combine:
            if "input_norm.weight" in t:
                states = rms(states, t["input_norm.weight"])
            if "fc_norm.0.weight" in t:
                parts = states.split(TARGET_SIZE, -1)
                states = torch.cat([rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
            if "fc.weight" in t:
                states = functional.linear(states, t["fc.weight"], t.get("fc.bias"))
        normed = rms(states, t["layers.0.hidden_norm.weight"])
        both = torch.cat([rms(x, t["layers.0.input_layernorm.weight"]), normed], -1)
        x = plain_layer(t, "layers.0", both, normed if norm_before_residual else states)
    if "layers.1.input_layernorm.weight" in t:
        x = plain_layer(t, "layers.1", rms(x, t["layers.1.input_layernorm.weight"]), x)
    normed = rms(x, t["norm.weight"]) if eagle3 else x
    head = t["lm_head.weight"] if eagle3 and "lm_head.weight" in t else target["lm_head.weight"]
    return functional.linear(normed, head), normed if norm_output else x


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], rename: Callable[[str], str] = str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({rename(name): tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def head_config(path: Path, name: str) -> ModelConfig:
    raw = json.loads((path / "config.json").read_text())
    head = read_head(raw, path / "config.json", name)
    assert head is not None
    return ModelConfig(model=name, model_dir=path, hf_config=HFConfig(head.raw, path / "config.json"))


def load(path: Path, target: Path, kernels: Kernels = TORCH_KERNELS, **fields: Any) -> EagleHead:
    target_config = model_config_of(target)
    placement, load_config = Placement(CPU, torch.float32, kernels), LoadConfig(weight_cache=False, **fields)
    model = load_model(target_config, load_config, placement)
    return load_head(head_config(path, "owner/EAGLE-x"), load_config, placement, model, target_config)


def run(head: EagleHead, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    names = [m.layer_name for m in head.modules() if isinstance(m, Attention)]
    caches = {name: KVCache(torch.empty(1), torch.empty(1)) for name in names}
    with set_forward_context(ForwardContext(DenseAttention(), [None], dict.fromkeys(names, 0), caches)):
        states, after = head(ids, torch.arange(len(ids)), hidden)
    return head.compute_logits(states), after


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


ALL_BIASES = ("fc", *(f"layers.0.self_attn.{p}_proj" for p in "qkvo"), "layers.0.mlp.down_proj",
              "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")  # fmt: skip
FC_NORMS = tuple(f"fc_norm.{i}.weight" for i in range(3))
LAST = {**EAGLE3, "eagle_config": {"use_aux_hidden_state": False}}
WIDE = {**EAGLE3, **IDS, "hidden_size": 64, "target_hidden_size": TARGET_SIZE}
SAME_VOCAB = {k: v for k, v in EAGLE3.items() if k != "draft_vocab_size"} | IDS
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[str], str]]] = {
    "eagle": (EAGLE1, {"eagle3": False}, str),
    "eagle with biases, without embedding": (
        {**EAGLE1, "bias": True}, {"eagle3": False, "biases": ALL_BIASES, "without": ("embed_tokens.weight",)}, str
    ),
    "eagle of two layers": ({**EAGLE1, "num_hidden_layers": 2}, {"eagle3": False, "layers": 2}, str),
    "eagle3": ({**EAGLE3, **IDS}, {"eagle3": True}, midlayer),
    "eagle3 of two layers": ({**EAGLE3, **IDS, "num_hidden_layers": 2}, {"eagle3": True, "layers": 2}, str),
    "eagle3 with biases": ({**EAGLE3, **IDS}, {"eagle3": True, "biases": ALL_BIASES}, lambda n: f"model.{midlayer(n)}"),
    "eagle3, other size": (WIDE, {"eagle3": True, "size": 64}, midlayer),
    "eagle3, norm before fc": (NVIDIA, {"eagle3": True, "num_states": 2, "extra": ("input_norm.weight",)}, str),
    "eagle3, norm of each state": ({**EAGLE3, **IDS, "fc_norm": True}, {"eagle3": True, "extra": FC_NORMS}, str),
    "eagle3, norm of output": ({**EAGLE3, **IDS, "norm_output": True}, {"eagle3": True}, midlayer),
    "eagle3 of last states": (LAST, {"eagle3": True, "without": ("fc.weight",)}, midlayer),
    "eagle3, target's head": (
        SAME_VOCAB, {"eagle3": True, "draft_vocab": VOCAB, "without": ("d2t", "t2d", "lm_head.weight")}, midlayer
    ),
    "speculator": (SPECULATOR, {"eagle3": True, "without": ("embed_tokens.weight",)}, str),
    "speculator, residual before norm": ({**SPECULATOR, "norm_before_residual": False}, {"eagle3": True}, str),
}  # fmt: skip


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest, library: NativeLibrary) -> Kernels:
    native = NativeKernels(Context(library, 1, library.instruction_sets()[0]))
    return native if request.param == "native" else TORCH_KERNELS


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_a_head_computes_what_plain_torch_does(
    layout: str, tiny_checkpoint: MakeCheckpoint, tmp_path: Path, kernels: Kernels
) -> None:
    config, options, rename = LAYOUTS[layout]
    target, tensors = tiny_checkpoint("llama"), make_tensors(**options)
    head = load(write(tmp_path / "head", config, tensors, rename), target, kernels)
    facts = {
        "eagle3": options["eagle3"],
        "norm_before_residual": layout == "speculator",
        "norm_output": layout == "eagle3, norm of output",
    }
    theirs = load_file(target / "model.safetensors")
    n, width = 9, TARGET_SIZE * max(1, len(head.taps))
    assert (head.taps == ()) == (not options["eagle3"] or layout == "eagle3 of last states")
    ids, states = torch.randint(VOCAB, (n,)), torch.randn(n, width)
    logits, after = run(head, ids, head.combine(states))
    expected, expected_after = plain_head(tensors, theirs, ids, states, **facts, combine=True)
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() < 1e-4
    assert (after - expected_after).abs().max() < 1e-4
    again, _ = run(head, ids, after)  # its own states in place of the target's
    expected, _ = plain_head(tensors, theirs, ids, expected_after, **facts, combine=False)
    assert (again - expected).abs().max() < 1e-4
    if "d2t" in tensors:
        assert head.token_ids is not None
        assert head.token_ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()
    else:
        assert head.token_ids is None


@pytest.mark.parametrize(("config", "eagle3"), [(EAGLE1, False), ({**EAGLE3, **IDS}, True)])
@torch.inference_mode()
def test_steps_of_a_head_are_planned(
    config: dict[str, Any], eagle3: bool, tiny_checkpoint: MakeCheckpoint, tmp_path: Path, library: NativeLibrary
) -> None:
    """Chunks have the bits of the whole."""
    kernels = NativeKernels(Context(library, 1, library.instruction_sets()[0]))
    backend = NativeAttentionBackend(kernels)
    tensors = make_tensors(eagle3=eagle3)
    head = load(write(tmp_path / f"head{eagle3}", config, tensors), tiny_checkpoint("llama"), kernels)
    layers = {m.layer_name: m for m in head.modules() if isinstance(m, Attention)}
    specs: Any = {name: layer.kv_cache_spec(16, torch.float32) for name, layer in layers.items()}
    groups = [KVCacheGroupSpec(list(specs), next(iter(specs.values())))]
    sizes = [KVCacheTensor(2 * spec.page_size_bytes, [name]) for name, spec in specs.items()]
    memory = allocate_kv_cache(KVCacheConfig(2, sizes, groups), backend, CPU)
    forward = backend.plan_steps(head)
    ids, hidden = torch.randint(VOCAB, (9,)), torch.randn(9, TARGET_SIZE)

    def step(run: Any, first: int, last: int) -> Any:
        lens = np.array([last - first]), np.array([last])
        slots = torch.arange(16 + first, 16 + last)
        batch = AttentionBatch(*lens, torch.tensor([[1]], dtype=torch.int32), slots)
        metadata = [backend.make_metadata(batch, memory.specs[0])]
        with set_forward_context(ForwardContext(backend, metadata, memory.layer_groups, memory.caches)):
            states = run(ids[first:last], torch.arange(first, last), hidden[first:last])
        return [x.clone() for x in states]

    whole = step(head, 0, 9)
    parts = [step(forward, *ends) for ends in ((0, 1), (1, 6), (6, 7), (7, 9))]
    assert isinstance(forward, StepPlanner)
    assert forward.is_planned
    for states, found in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(states, torch.cat(found))


def test_a_head_turns_as_far_as_its_target(tiny_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    head: Any = load(write(tmp_path / "h", {**EAGLE3, **IDS}, make_tensors(eagle3=True)), tiny_checkpoint("llama"))
    assert head.ropes["rope"].cos.shape[0] == 1024  # its own config.json says 64


@pytest.mark.parametrize("config", [{**EAGLE3, **IDS, "tie_word_embeddings": True}, SPECULATOR])
def test_weights_that_were_dropped_are_read_again(
    config: dict[str, Any], tiny_checkpoint: MakeCheckpoint, tmp_path: Path, library: NativeLibrary
) -> None:
    kernels = NativeKernels(Context(library, 1, library.instruction_sets()[0]))
    path = write(tmp_path / "h", config, make_tensors(eagle3=True))
    head = load(path, tiny_checkpoint("llama"), kernels)
    options = LoadConfig(weight_cache=False), Placement(CPU, torch.float32, kernels)
    weights = ModelWeights(head, head_config(path, "x"), *options)
    inputs = torch.tensor([1, 2]), torch.randn(2, TARGET_SIZE)
    expected, _ = run(head, *inputs)
    weights.drop()
    with pytest.raises(RuntimeError, match="were given back"):
        run(head, *inputs)
    weights.restore()
    assert torch.equal(run(head, *inputs)[0], expected)


def test_random_weights(tiny_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = write(tmp_path / "h", {**EAGLE3, **IDS}, {})
    head = load(path, tiny_checkpoint("llama"), load_format="dummy")
    assert head.token_ids is not None
    assert head.token_ids.tolist() == list(range(DRAFT_VOCAB))
    logits, _ = run(head, torch.tensor([1, 2]), head.combine(torch.randn(2, 3 * TARGET_SIZE)))
    assert logits.shape == (2, DRAFT_VOCAB)


SMALL = {"eagle3": True}
REFUSALS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({**EAGLE1, "hidden_size": 64}, {"eagle3": False, "size": 64}, {}, "'hidden_size' = 64, but the target's is 48"),
    ({**EAGLE1, "vocab_size": 100}, {"eagle3": False}, {}, "'vocab_size' = 100, but the target's is 384"),
    ({**EAGLE3, **IDS, "target_hidden_size": 64}, SMALL, {}, "'target_hidden_size' = 64, but the target's is 48"),
    ({**EAGLE3, **IDS, "draft_vocab_size": 500}, SMALL, {}, "'draft_vocab_size' = 500, more than the 384"),
    ({**EAGLE3, AUX_LAYERS: [0, 3]}, SMALL, {}, r"\[0, 3\]; they must be different layers of the target, which has 3"),
    ({**EAGLE3, AUX_LAYERS: [1, 1]}, SMALL, {}, r"\[1, 1\]; they must be different layers"),
    (
        {**EAGLE3, AUX_LAYERS: [0, 1]},
        SMALL,
        {},
        r"fc.weight has shape \[48, 144\], but",
    ),
    ({**EAGLE3, **IDS}, {**SMALL, "without": ("lm_head.weight",)}, {}, "no lm_head.weight, and the target's cannot"),
    ({**EAGLE3, **IDS}, {**SMALL, "without": ("norm.weight",)}, {}, "has no tensor norm.weight, which"),
    ({**EAGLE3, **IDS}, {**SMALL, "without": ("d2t",)}, {}, "has no tensor d2t, which a vocabulary of 100 needs"),
    ({**EAGLE3, **IDS}, SMALL, {"d2t": torch.zeros(9, dtype=torch.int64)}, r"d2t is I64\[9\]; it must be I64\[100\]"),
    ({**EAGLE3, **IDS}, SMALL, {"d2t": torch.full((100,), 300)}, "d2t does not lead to increasing ids"),
    ({**EAGLE3, **IDS}, SMALL, {"layers.0.gate.weight": torch.ones(3)}, "holds tensor .*layers.0.gate.weight"),
    ({**WIDE, "use_aux_hidden_state": False}, {**SMALL, "size": 64, "without": ("fc.weight",)}, {}, "no fc.weight"),
    (WIDE, {**SMALL, "size": 64, "without": ("embed_tokens.weight",)}, {}, "has no tensor embed_tokens.weight"),
    ({**EAGLE1, "num_hidden_layers": 2}, {"eagle3": False}, {}, "has no tensor layers.1"),
]


@pytest.mark.parametrize(("config", "options", "more", "message"), REFUSALS)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    config: dict[str, Any], options: dict[str, Any], more: dict[str, Tensor], message: str,
    tiny_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = write(tmp_path / "head", config, make_tensors(**options) | more)
    target_config = model_config_of(tiny_checkpoint("llama"))
    placement = Placement(CPU, torch.float32)
    model = load_model(target_config, LoadConfig(weight_cache=False), placement)

    def allocate(*_: object) -> None:
        raise AssertionError("memory was taken for a head that is wrong")

    monkeypatch.setattr(load_module, "allocate", allocate)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_head(head_config(path, "EAGLE-x"), LoadConfig(), placement, model, target_config)
    assert "\n" not in str(caught.value)


def test_a_target_whose_layers_cannot_be_read_is_refused(tiny_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = write(tmp_path / "head", {**EAGLE3, **IDS}, make_tensors(eagle3=True))
    with pytest.raises(UnsupportedModelError, match="reads the states of OPTForCausalLM, which only decoders"):
        load(path, tiny_checkpoint("opt"))


PATH = Path("config.json")


@pytest.mark.parametrize(
    ("raw", "name", "method"),
    [
        (EAGLE1, "yuhuili/EAGLE-llama2-chat-7B", "eagle"), (EAGLE1, "meta-llama/Llama-2-7b-chat-hf", None),
        (EAGLE1, "eagle-users/llama", None), (EAGLE1, "x/EAGLE3-y", "eagle3"), (EAGLE3, "x", "eagle3"),
        (NVIDIA, "x", "eagle3"), (SPECULATOR, "x", "eagle3"),
    ],
)  # fmt: skip
def test_heads_are_recognised(raw: dict[str, Any], name: str, method: str | None) -> None:
    head = read_head(raw, PATH, name)
    assert (None if head is None else head.method) == method


def test_a_speculator_names_its_verifier_and_its_drafts() -> None:
    head = read_head(SPECULATOR, PATH)
    assert head is not None
    assert (head.num_speculative_tokens, head.verifier) == (3, "owner/target")
    assert HFConfig(head.raw, PATH).hidden_size == TARGET_SIZE
    assert head.raw["norm_before_residual"] is True


def test_a_method_that_is_demanded_counts_more_than_a_name() -> None:
    head = read_head(EAGLE1, PATH, "/models/h", "eagle")
    assert head is not None
    assert head.method == "eagle"
    assert read_head(EAGLE1, PATH, "/models/EAGLE-h", "draft_model") is None


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        ({**SPECULATOR, "speculators_model_type": "mlp"}, UnsupportedModelError, "speculator of type 'mlp'; only 'eag"),
        ({**SPECULATOR, "transformer_layer_config": 3}, ModelLoadError, "'transformer_layer_config' = 3, which must"),
        ({**SPECULATOR, "speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}}, ModelLoadError,
         "'speculative_tokens' = 0, which must be a positive integer"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_read(raw: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_head(raw, PATH)


def test_layers_that_a_head_reads_if_it_does_not_say() -> None:
    head = read_head(EAGLE3, PATH)
    assert head is not None
    assert aux_layers(HFConfig(head.raw, PATH), HFConfig({"num_hidden_layers": 32}, PATH)) == (2, 16, 29)
    with pytest.raises(ModelLoadError, match=r"has no 'eagle_aux\w+', which then are \[2, 2, 1\]"):
        aux_layers(HFConfig(head.raw, PATH), HFConfig({"num_hidden_layers": 4}, PATH))


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_ends_of_a_target_are_whole_and_nothing_else(is_tied: bool, tiny_checkpoint: MakeCheckpoint) -> None:
    """The parts that a head shares with a target which is divided among workers."""
    config = model_config_of(tiny_checkpoint("llama", tie_word_embeddings=is_tied))
    whole: Any = load_model(config, LoadConfig(), Placement(CPU, torch.float32))
    ends: Any = load_model(config, LoadConfig(), Placement(CPU, torch.float32, sharding=Ends()))
    ids, hidden = torch.tensor([3, 0, 383]), torch.randn(3, TARGET_SIZE)
    assert torch.equal(ends.model.embed_tokens(ids), whole.model.embed_tokens(ids))
    assert torch.equal(ends.compute_logits(hidden), whole.compute_logits(hidden))
    assert not [name for name, _ in ends.named_parameters() if ".layers." in name]

"""Adapters' configs and headers: names, ranks and scales as PEFT computes them, and everything that is refused.

Faulty files are in tests/security/test_adapters.py; the tensors themselves in tests/e2e/test_lora_oracle.py.
"""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.config.adapter import AdapterConfig, AdapterIndex
from quire.config.adapter_targets import AdapterTarget, AdapterTargets, AllExperts, HeadTarget, NamePatterns
from quire.config.lora import LoRAConfig
from quire.errors import AdapterError, NotFoundError
from tests.adapters import PREFIX, SHAPES, tensors, write_adapter

ANY = LoRAConfig()
Q = "model.layers.0.self_attn.q_proj"


def targets_of(num_layers: int = 3) -> AdapterTargets:
    made = {}
    for layer in range(num_layers):
        for i, (name, (inputs, outputs)) in enumerate(SHAPES.items()):
            path = f"model.layers.{layer}.{name}"
            made[f"{path}.weight"] = AdapterTarget(f"site{layer}.{i}", 0, inputs, outputs)
    made["model.embed_tokens.weight"] = AdapterTarget("model.embed_tokens", 0, 384, 48, "embedding")
    made["lm_head.weight"] = AdapterTarget("lm_head", 0, 48, 384)
    return AdapterTargets(made, {"model.layers.0.mlp.gate": "which chooses experts"})


def renamed(old: str, new: str, content: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.replace(old, new): value for name, value in content.items()}


def test_an_adapter_that_peft_would_write(tmp_path: Path) -> None:
    index = AdapterIndex.read(write_adapter(tmp_path), ANY, targets_of())
    assert len(index.factors) == 9
    assert index.rank == 4
    assert {factors.scale for factors in index.factors} == {2.0}
    offsets = [factors.a.offset for factors in index.factors]
    assert offsets == sorted(offsets)
    data = (tmp_path / "adapter_model.safetensors").read_bytes()
    for factors in index.factors:
        a = load_file(tmp_path / "adapter_model.safetensors")[factors.a.name]
        start = index.data_start + factors.a.offset
        assert data[start : start + factors.a.nbytes] == a.tobytes()
    assert index.estimated_bytes(2) * 2 == index.estimated_bytes()
    assert index.estimated_bytes() >= sum(value.nbytes for value in tensors().values())


@pytest.mark.parametrize("spelling", ["without a prefix", "adapter's name", "bare decoder", "half precision"])
def test_other_spellings(tmp_path: Path, spelling: str) -> None:
    content = tensors()
    if spelling == "without a prefix":
        content = renamed(PREFIX, "", content)
    elif spelling == "adapter's name":
        content = renamed(".weight", ".default.weight", content)
    elif spelling == "bare decoder":
        content = renamed(f"{PREFIX}model.", PREFIX, content)
    else:
        content = {name: value.astype(np.float16) for name, value in content.items()}
    index = AdapterIndex.read(write_adapter(tmp_path, content), ANY, targets_of())
    assert len({factors.target for factors in index.factors}) == 9


def test_tables_and_heads_with_peft_s_copies_of_the_base(tmp_path: Path) -> None:
    content = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": np.ones((4, 384), np.float32),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": np.ones((48, 4), np.float32),
        f"{PREFIX}model.embed_tokens.base_layer.weight": np.ones((384, 48), np.float32),
        f"{PREFIX}lm_head.lora_A.weight": np.ones((4, 48), np.float32),
        f"{PREFIX}lm_head.lora_B.weight": np.ones((384, 4), np.float32),
        f"{PREFIX}lm_head.base_layer.weight": np.ones((384, 48), np.float32),
        f"{PREFIX}lm_head.base_layer.bias": np.ones(384, np.float32),
    }
    index = AdapterIndex.read(write_adapter(tmp_path, content), ANY, targets_of())
    kinds = {factors.module: factors.target.kind for factors in index.factors if factors.target is not None}
    assert kinds == {"model.embed_tokens": "embedding", "lm_head": "linear"}
    assert any("copies" in note for note in index.notes)
    content[f"{PREFIX}lm_head.base_layer.weight"] = np.ones((400, 48), np.float32)
    write_adapter(tmp_path, content)
    with pytest.raises(AdapterError, match=re.escape("[400, 48], the model's is [384, 48]")):
        AdapterIndex.read(tmp_path, ANY, targets_of())


# -- ranks and scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"r": 4, "lora_alpha": 8}, 2.0),
        ({"r": 16, "lora_alpha": 8.5}, 8.5 / 16),
        ({"r": 16, "lora_alpha": 8, "use_rslora": True}, 2.0),
        ({"r": 8, "lora_alpha": 1, "use_rslora": True}, 1 / math.sqrt(8)),
        ({"r": 4, "alpha_pattern": {"q_proj": 20}}, 5.0),
        ({"r": 4, "alpha_pattern": {"v_proj": 20}}, 2.0),
        ({"r": 64, "rank_pattern": {"q_proj": 4}}, 2.0),
        (
            {
                "r": 64,
                "rank_pattern": {"^model.layers.0.self_attn.q_proj": 4},
                "alpha_pattern": {"self_attn.q_proj": 2},
            },
            0.5,
        ),
        ({"r": 64, "rank_pattern": {r".*\.(0|1)\..*q_proj": 4, "q_proj": 7}, "use_rslora": True}, 4.0),
    ],
)
def test_scales_are_peft_s(tmp_path: Path, fields: dict[str, Any], scale: float) -> None:
    config = AdapterConfig.from_dir(write_adapter(tmp_path, tensors(4), **fields))
    assert config.scale_of(Q) == scale


PATTERNS = [
    *("q_proj", "self_attn.q_proj", "layers.1.self_attn.q_proj", "proj", "j", "model", "x.y", "gate-proj"),
    *(r"^model\.layers\.\d\..*q_proj$", r"(q|k)_proj", r"layers\.(1|2)\..*", r"[qk]_proj", r".*attn.*", r"\w+_proj"),
    *(r".*", "q_pro[j]", r"model.*|q_proj", r"(?:q_proj)", r"v?q_proj", r"^q_proj", r"layers\.1\d\.mlp\.[^q]*"),
]
MODULES = [
    *(f"model.layers.{i}.self_attn.{part}" for i in (0, 1, 12) for part in ("q_proj", "k_proj", "o_proj")),
    *("model.layers.12.mlp.gate-proj", "lm_head", "model", "model.embed_tokens", "q_proj", "xq_proj"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_what_peft_matches(pattern: str) -> None:
    other = NamePatterns({pattern: 1})
    for module in MODULES:
        expected = re.match(rf"(.*\.)?({pattern})$", module) is not None
        assert (other.find(module, 0) == 1) == expected, module


def test_the_first_pattern_counts() -> None:
    patterns = NamePatterns({r".*q.*": 1, "q_proj": 2, "self_attn.k_proj": 3, r".*k_proj": 4, "k_proj": 5})
    assert [patterns.find(f"m.self_attn.{part}", 0) for part in ("q_proj", "k_proj", "v_proj")] == [1, 3, 0]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a+)+$", "repeats something else"),
        (r"(a|aa)*", "repeats something else"),
        (r"a{2,}", "has more than names"),
        (r"a*?", "repeats something else"),
        (r"(?=a)a", "repeats something else"),
        (r"\bq", "has more than names"),
        (r"q\1", "has more than names"),
        (r"(q", "is no regular expression"),
        ("q_proj|" * 100, "has more than names"),
        ("q proj", "has more than names"),
    ],
)
def test_patterns_that_are_not_read(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        NamePatterns({pattern: 1})


@pytest.mark.parametrize("pattern", ["(a|a)" * 40 + "b", ".*" * 60 + "b", "a?" * 100 + "b", "[a-z]*" * 30 + "7"])
def test_no_pattern_takes_long(pattern: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, renamed("q_proj", "a" * 60, tensors()), rank_pattern={pattern: 4})
    start = time.process_time()
    with pytest.raises(AdapterError, match="too many or too wide"):
        AdapterIndex.read(tmp_path, ANY)
    assert time.process_time() - start < 1.0


# -- refusals ------------------------------------------------------------------------------------------------------

FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"peft_type": None}, "peft_type is missing"),
    ({"r": None}, "r is missing"),
    ({"lora_alpha": None}, "lora_alpha is missing"),
    ({"r": 0}, "ranks are from 1 to 512"),
    ({"r": -1}, "ranks are from 1 to 512"),
    ({"r": 2**40}, "ranks are from 1 to 512"),
    ({"r": "8"}, "r is '8': it must be a whole number"),
    ({"r": True}, "r is True: it must be a whole number"),
    ({"r": 4.0}, "r is 4.0: it must be a whole number"),
    ({"lora_alpha": math.nan}, "lora_alpha is nan: it must be finite"),
    ({"lora_alpha": math.inf}, "lora_alpha is inf: it must be finite"),
    ({"lora_alpha": 1e308}, "lora_alpha is 1e+308: it must be finite"),
    ({"lora_alpha": 10**400}, "it must be finite"),
    ({"lora_alpha": "16"}, "lora_alpha is '16': it must be a number"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj'] is 0"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern['q_proj'] is 'x'"),
    ({"alpha_pattern": [1]}, "alpha_pattern is [1]: it must be an object"),
    ({"rank_pattern": {f"k{i}": 4 for i in range(5000)}}, "5000 keys; at most 4096"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes': it must be true or false"),
    ({"use_dora": True}, "DoRA"),
    ({"alora_invocation_tokens": "<|start|>"}, "alora_invocation_tokens is '<|start|>': it must be a list of at most"),
    ({"alora_invocation_tokens": [1, -1]}, "it must be a list of at most 1024 token ids"),
    ({"alora_invocation_tokens": [1, 1 << 40]}, "it must be a list of at most 1024 token ids"),
    ({"alora_invocation_tokens": [1, True]}, "it must be a list of at most 1024 token ids"),
    ({"alora_invocation_tokens": [1] * 1025}, "it must be a list of at most 1024 token ids"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "olora"}, "changes the base model"),
    ({"init_lora_weights": "lora_ga"}, "changes the base model"),
    ({"init_lora_weights": "new"}, "init_lora_weights is 'new'"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"use_qalora": True}, "use_qalora"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"what_is_new": 1}, "what_is_new is 1: a field that Quire does not implement"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_fields_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_adapter(tmp_path, tensors(4), **fields)
    with pytest.raises(AdapterError, match=re.escape(message)) as caught:
        AdapterIndex.read(tmp_path, ANY)
    assert str(tmp_path / "adapter_config.json") in str(caught.value)
    assert (caught.value.status_code, caught.value.param) == (400, "lora_path")


@pytest.mark.parametrize(
    "fields",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"target_modules": "all-linear"},
        {"fan_in_fan_out": True},
        {"layers_to_transform": [0, 1, 2]},
        {"use_dora": False, "modules_to_save": []},
        {"eva_config": {"rho": 2.0}},
        {"what_is_new": False},
    ],
)
def test_fields_that_change_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert len(AdapterIndex.read(write_adapter(tmp_path, **fields), ANY, targets_of()).factors) == 9


def test_an_adapter_that_begins_at_an_invocation(tmp_path: Path) -> None:
    write_adapter(tmp_path, tensors(4), alora_invocation_tokens=[3, 1, 4])
    assert AdapterIndex.read(tmp_path, ANY).config.invocation == (3, 1, 4)
    write_adapter(tmp_path, tensors(4), alora_invocation_tokens=[])
    assert AdapterIndex.read(tmp_path, ANY).config.invocation == ()


def test_limits(tmp_path: Path) -> None:
    write_adapter(tmp_path, r=32)
    with pytest.raises(AdapterError, match="has rank 32; --max-lora-rank is 16"):
        AdapterIndex.read(tmp_path, LoRAConfig(max_lora_rank=16))
    AdapterIndex.read(tmp_path, LoRAConfig(max_lora_rank=32))
    with pytest.raises(AdapterError, match="--lora-target-modules allows q_proj, v_proj"):
        AdapterIndex.read(tmp_path, LoRAConfig(lora_target_modules=("q_proj", "v_proj")))
    AdapterIndex.read(tmp_path, LoRAConfig(lora_target_modules=("self_attn.q_proj", "v_proj", "down_proj")))


def test_modules_that_the_model_lacks(tmp_path: Path) -> None:
    content = tensors()
    for module, why in (
        ("model.layers.99.self_attn.q_proj", "does not have: did you mean q_proj?"),
        ("model.layers.0.self_attn.qkv_proj", "does not have"),
        ("model.layers.0.mlp.gate", "which chooses experts"),
    ):
        write_adapter(tmp_path, renamed(Q, module, content))
        with pytest.raises(AdapterError, match=re.escape(f"changes {module}")) as caught:
            AdapterIndex.read(tmp_path, ANY, targets_of())
        assert why in str(caught.value)
    write_adapter(
        tmp_path,
        renamed(".lora_A.weight", ".lora_embedding_A", renamed(".lora_B.weight", ".lora_embedding_B", content)),
    )
    with pytest.raises(AdapterError, match="are not named as those of a matrix"):
        AdapterIndex.read(tmp_path, ANY, targets_of())


EXPERTS = "model.layers.0.mlp.experts"
FIVE = AllExperts(5, 48, 20, f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj")


def expert_targets(experts: AllExperts = FIVE) -> AdapterTargets:
    every = AdapterTarget(EXPERTS, 0, 48, 20, "experts", experts)
    one = AdapterTarget(experts.down_site, 3, 20, 48)
    names = {f"{EXPERTS}.weight": every, f"{EXPERTS}.base_layer.weight": every, f"{EXPERTS}.3.down_proj.weight": one}
    return AdapterTargets(names)


def of_experts(module: str, a: tuple[int, int], b: tuple[int, int]) -> dict[str, np.ndarray]:
    name = f"{PREFIX}{module}"
    return {f"{name}.lora_A.weight": np.ones(a, np.float32), f"{name}.lora_B.weight": np.ones(b, np.float32)}


@pytest.mark.parametrize("module", [EXPERTS, f"{EXPERTS}.base_layer"])
def test_shapes_tell_which_matrix_of_the_experts_it_is(tmp_path: Path, module: str) -> None:
    for a, b, site, is_flipped in (
        ((20, 48), (40, 20), FIVE.gate_up_site, False),
        ((20, 20), (48, 20), FIVE.down_site, False),
        ((4, 48), (40, 20), FIVE.gate_up_site, False),  # A is shared
        ((20, 20), (48, 4), FIVE.down_site, False),  # B is
        ((20, 40), (48, 20), FIVE.gate_up_site, True),
    ):
        write_adapter(tmp_path, of_experts(module, a, b), target_parameters=["experts.gate_up_proj"])
        (factors,) = AdapterIndex.read(tmp_path, ANY, expert_targets()).factors
        assert factors.target is not None
        assert (factors.target.site, factors.rank, factors.is_flipped) == (site, 4, is_flipped)
        assert factors.packed_size >= 5 * (48 + 40) * 4 if site == FIVE.gate_up_site else 5 * (48 + 20) * 4
        assert AdapterIndex.read(tmp_path, ANY).rank == 4


def test_matrices_that_look_the_same_from_both_sides(tmp_path: Path) -> None:
    write_adapter(tmp_path, of_experts(EXPERTS, (20, 48), (48, 20)))
    for is_flipped in (False, True):
        experts = AllExperts(5, 48, 24, "first", "second", are_flipped=is_flipped)
        (factors,) = AdapterIndex.read(tmp_path, ANY, expert_targets(experts)).factors
        assert factors.target is not None
        assert (factors.target.site, factors.is_flipped) == ("first", is_flipped)


def test_factors_of_experts_that_do_not_fit(tmp_path: Path) -> None:
    for a, b, why in (
        ((20, 47), (40, 20), "fit no matrix of 5 experts"),
        ((24, 48), (40, 24), "do not have the rank 4"),
        ((20, 48), (40, 16), "do not have the rank 4"),
    ):
        write_adapter(tmp_path, of_experts(EXPERTS, a, b))
        with pytest.raises(AdapterError, match=why):
            AdapterIndex.read(tmp_path, ANY, expert_targets())
    all_and_one = of_experts(EXPERTS, (20, 20), (48, 20)) | of_experts(f"{EXPERTS}.3.down_proj", (4, 20), (48, 4))
    write_adapter(tmp_path, all_and_one)
    with pytest.raises(AdapterError, match="are the same matrix of the model"):
        AdapterIndex.read(tmp_path, ANY, expert_targets())
    write_adapter(tmp_path, of_experts(EXPERTS, (20, 48), (40, 20)))
    with pytest.raises(AdapterError, match="gate_up_proj has rank 4; --max-lora-rank is 3"):
        AdapterIndex.read(tmp_path, LoRAConfig(max_lora_rank=3), expert_targets())


def test_classifiers_and_their_bounds(tmp_path: Path) -> None:
    head = {f"{PREFIX}score.weight": np.ones((5, 48), np.float32), f"{PREFIX}score.bias": np.ones(5, np.float32)}
    write_adapter(tmp_path, tensors() | head, modules_to_save=["classifier", "score"])

    def read(num_labels: int | None, limit: int | None = None, inputs: int = 48) -> AdapterIndex:
        found = None if num_labels is None else HeadTarget("score", inputs, num_labels, False)
        targets = AdapterTargets(targets_of().targets, head=found)
        return AdapterIndex.read(tmp_path, LoRAConfig(max_lora_cls_labels=limit), targets)

    for num_labels, limit in ((5, None), (3, 5), (5, 2)):
        found = read(num_labels, limit).head
        assert found is not None
        assert (found.weight.shape, found.bias is not None) == ((5, 48), True)
    for num_labels, limit in ((3, None), (3, 4), (1, 8)):
        with pytest.raises(AdapterError, match=r"has 5 labels, the model's \d; --max-lora-cls-labels"):
            read(num_labels, limit)
    with pytest.raises(AdapterError, match="the model has none that an adapter can replace"):
        read(None)
    with pytest.raises(AdapterError, match="the model's has 40 inputs"):
        read(5, inputs=40)


def test_a_config_alone(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no directory") as caught:
        AdapterConfig.from_dir(tmp_path / "nowhere")
    assert caught.value.param == "lora_path"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(AdapterError, match="has no adapter_model"):
        AdapterConfig.from_dir(tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="r is missing"):
        AdapterConfig.from_dir(tmp_path)


def test_what_is_worth_a_note(tmp_path: Path) -> None:
    index = AdapterIndex.read(write_adapter(tmp_path, target_modules=["c_attn"]), ANY)
    assert any("names none of the modules" in note for note in index.notes)

"""Repositories that also read images: their text part has the logits that the whole has for a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli.info import make_report
from quire.config.engine_args import EngineArgs
from quire.config.hf_config import HFConfig
from quire.config.text_part import REPOSITORIES, TEXT_MODELS
from quire.errors import UnsupportedModelError
from quire.testing.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, randomize
from quire.worker.layers.weights import weight_bytes
from quire.worker.models.registry import MODELS

from .oracle import load, quire_logits
from .test_oracle import TOLERANCE, random_tokens

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "embed_dim": 32,
}
SECTIONS = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 4, 4]}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        {**TEXT, "query_pre_attn_scalar": 6, "sliding_window": 20, "layer_types": ["sliding_attention"] * 2},
        VISION,
        {"mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "gemma4",
        {
            **TEXT,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "sliding_window": 20,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
        {},
    ),
    "gemma4_unified": (
        "gemma4_unified",
        {**TEXT, "attention_k_eq_v": True, "global_head_dim": 32, "sliding_window": 20},
        {"mm_embed_dim": 32, "output_proj_dims": 32},
        {},
    ),
    "mistral3": ("mistral3", {**TEXT, "model_type": "mistral"}, VISION, {"tie_word_embeddings": False}),
    "mistral3, tied": ("mistral3", {**TEXT, "model_type": "mistral"}, VISION, {}),
    "llava": ("llava", {**TEXT, "model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}, {}),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {**TEXT, "head_dim": 16, "rope_parameters": {**SECTIONS, "mrope_section": [2, 3, 3]}},
        QWEN_VISION,
        {},
    ),
    "qwen3_vl": ("qwen3_vl", {**TEXT, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}}, QWEN_VISION, {}),
}


def make_repository(path: Path, model_type: str, text: dict[str, Any], vision: dict[str, Any], rest: Any) -> Any:
    """Writes a random checkpoint of the whole model; returns the model."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **rest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        randomize(model)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("case", CASES)
def test_the_text_part_has_the_logits_of_the_whole(case: str, tmp_path: Path) -> None:
    whole, token_ids = make_repository(tmp_path, *CASES[case]), random_tokens(70)
    with torch.inference_mode():
        expected = whole(torch.tensor([token_ids])).logits[0]
    hf = HFConfig.from_dir(tmp_path)
    assert hf.part_of in REPOSITORIES
    model = load(tmp_path)
    torch.testing.assert_close(quire_logits(model, token_ids), expected, rtol=0, atol=TOLERANCE)
    report = make_report(EngineArgs(str(tmp_path), dtype="float32").create_engine_config())
    assert report["weights"]["memory_bytes"] == weight_bytes(model), "parts for images count for nothing"


def test_the_older_layout_of_qwen2_vl(tmp_path: Path) -> None:
    """Its config.json has the keys of the text part at the top, its tensors the names of a text model."""
    from safetensors.torch import load_file, save_file

    whole = make_repository(tmp_path, *CASES["qwen2_5_vl"])
    token_ids = random_tokens(40)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps({**text, **config}))
    tensors = load_file(tmp_path / "model.safetensors")
    names = {name: name.replace("model.language_model", "model").replace("model.visual", "visual") for name in tensors}
    assert any(name.startswith("visual") for name in names.values())
    save_file({names[name]: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with torch.inference_mode():
        expected = whole(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(quire_logits(load(tmp_path), token_ids), expected, rtol=0, atol=TOLERANCE)


def test_an_unknown_text_part_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "rwkv"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"text part of type 'rwkv'; known are .*llama"):
        HFConfig.from_dir(tmp_path)


def test_text_models_are_named_as_models_are() -> None:
    """A row without an entry in the table of models is a family to come."""
    assert all(name.endswith("ForCausalLM") for name in TEXT_MODELS.values())
    assert {"Gemma3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"} <= set(TEXT_MODELS.values()) & set(MODELS)

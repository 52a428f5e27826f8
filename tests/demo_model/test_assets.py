"""The shipped checkpoints: complete, small, consistent, and loadable without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from quire.config.model import ASSETS_DIR

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL_MARKS = ("<tool_call>", "</tool_call>")
MEGABYTE = 1_000_000

both = pytest.mark.parametrize("folder", [ASSETS_DIR / "demo", ASSETS_DIR / "demo-draft"], ids=lambda path: path.name)


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def tensors(folder: Path) -> dict[str, tuple[list[int], str]]:
    with safe_open(folder / "model.safetensors", framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return {name: (one.get_shape(), one.get_dtype()) for name, one in slices.items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS_DIR / "demo" / "tokenizer.json"))


@both
def test_folder_is_complete(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES


def test_the_models_are_small() -> None:
    assert folder_size(ASSETS_DIR / "demo") <= 12 * MEGABYTE
    assert folder_size(ASSETS_DIR / "demo-draft") <= folder_size(ASSETS_DIR / "demo") / 3


@both
def test_weights_match_the_config(folder: Path) -> None:
    config = read(folder / "config.json")
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] * config["head_dim"] == hidden
    expected = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        expected |= {
            prefix + "self_attn.q_proj.weight": [hidden, hidden],
            prefix + "self_attn.k_proj.weight": [kv_size, hidden],
            prefix + "self_attn.v_proj.weight": [kv_size, hidden],
            prefix + "self_attn.o_proj.weight": [hidden, hidden],
            prefix + "mlp.gate_proj.weight": [inner, hidden],
            prefix + "mlp.up_proj.weight": [inner, hidden],
            prefix + "mlp.down_proj.weight": [hidden, inner],
            prefix + "input_layernorm.weight": [hidden],
            prefix + "post_attention_layernorm.weight": [hidden],
        }
    found = tensors(folder)
    assert {name: shape for name, (shape, _) in found.items()} == expected
    assert {dtype for _, dtype in found.values()} == {"BF16"}


@both
def test_ids_agree_between_the_files(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config, generation = read(folder / "config.json"), read(folder / "generation_config.json")
    settings = read(folder / "tokenizer_config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert config["eos_token_id"] == tokenizer.token_to_id(settings["eos_token"])
    assert generation["eos_token_id"] == [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert generation["pad_token_id"] == config["pad_token_id"] == tokenizer.token_to_id(settings["pad_token"])
    assert settings["model_max_length"] == config["max_position_embeddings"]
    for number, token in settings["added_tokens_decoder"].items():
        assert tokenizer.id_to_token(int(number)) == token["content"]


def test_draft_shares_the_vocabulary() -> None:
    main, draft = ((ASSETS_DIR / name / "tokenizer.json").read_bytes() for name in ("demo", "demo-draft"))
    assert main == draft


@given(text=st.text(max_size=200))
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("2026").tokens
    assert tokens == list("2026")


def test_marks_are_single_tokens(tokenizer: Tokenizer) -> None:
    for mark in SPECIALS + CALL_MARKS:
        assert tokenizer.encode(mark).tokens == [mark]


def test_call_marks_stay_in_the_text_that_clients_see(tokenizer: Tokenizer) -> None:
    text = '<tool_call>{"name": "add"}</tool_call><|im_end|>'
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")

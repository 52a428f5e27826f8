"""--speculative-config: what it resolves to, and every way in which it can be wrong."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.cli.option_groups import engine_args
from quire.cli.serve import command_line
from quire.config.engine import EngineConfig
from quire.config.engine_args import FLAGS, EngineArgs
from quire.config.model import ASSETS_DIR
from quire.config.server import decode_config, encode_config
from quire.config.speculative import METHODS, Drafting
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError

HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 128,
    "target_hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 3072,
    "draft_vocab_size": 1000,
    "max_position_embeddings": 1024,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


def make(**flags: Any) -> EngineConfig:
    return EngineArgs("demo", **flags).create_engine_config()


def drafting(keys: dict[str, Any] | None = None, **flags: Any) -> Drafting:
    found = make(speculative_config=keys, **flags).speculative_config.drafting
    assert found is not None
    return found


def ngram(**keys: Any) -> Drafting:
    return drafting({"method": "ngram", "num_speculative_tokens": 4, **keys})


def write(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def copy_draft(directory: Path, **changes: Any) -> Path:
    """Returns a copy of demo-draft without weights, its config.json changed."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS_DIR / "demo-draft" / name, directory / name)
    config = json.loads((directory / "config.json").read_text())
    write(directory, {**config, **changes})
    return directory


def test_no_flag_no_speculation() -> None:
    assert make().speculative_config.drafting is None
    assert make(speculative_config={}).speculative_config.drafting is None


def test_the_shipped_draft_model() -> None:
    config = make(spec_model="demo-draft", spec_tokens=4)
    found = config.speculative_config.drafting
    assert found is not None
    assert found.model is not None
    assert (found.method, found.num_speculative_tokens, found.max_model_len) == ("draft_model", 4, 2048)
    assert (found.model.name, found.model.hf_config.hidden_size) == ("demo-draft", 128)
    assert found.num_lookahead_tokens == 4
    assert decode_config(encode_config(config)) == config


def test_defaults_are_vllms() -> None:
    assert ngram() == Drafting(method="ngram", num_speculative_tokens=4)
    assert drafting({"method": "suffix"}) == Drafting(method="suffix", num_speculative_tokens=24)
    assert drafting({"method": "suffix", "suffix_decoding_max_tree_depth": 500}).num_speculative_tokens == 128


@pytest.mark.parametrize(
    ("given", "lookup"), [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2))]
)
def test_one_bound_of_the_lookup_is_the_other(given: dict[str, Any], lookup: tuple[int, int]) -> None:
    found = ngram(**given)
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == lookup


def test_every_key_arrives() -> None:
    keys = {
        "suffix_decoding_max_tree_depth": 8,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 2,
        "suffix_decoding_min_token_prob": 0.5,
        "suffix_decoding_max_bytes": 1 << 20,
        "adaptive": False,
        "max_model_len": 100,
    }
    found = ngram(**keys)
    assert {key: getattr(found, key) for key in keys} == keys


@pytest.mark.parametrize("drafter", ["ngram", "[ngram]"])
def test_a_model_may_be_the_name_of_a_method(drafter: str) -> None:
    assert drafting(spec_model=drafter, spec_tokens=3).method == "ngram"


@pytest.mark.parametrize("name", ["pkg.mod:Class", "pkg.mod.Class"])
def test_a_dotted_name_is_a_class(name: str) -> None:
    found = drafting(spec_model=name, spec_tokens=3)
    assert (found.method, found.drafter_cls) == ("custom_class", "pkg.mod:Class")


def test_keys_may_have_hyphens_and_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text('{"method": "ngram", "num-speculative-tokens": 7}')
    assert drafting(f"@{file}").num_speculative_tokens == 7  # type: ignore[arg-type]  # text, as on a command line
    for words in (
        ["-sc", file.read_text()],
        ["--speculative-config", f"@{file}"],
        ["--speculative-config.method=ngram", "--speculative-config.num_speculative_tokens", "7"],
        ["--spec-method", "ngram", "--spec-tokens", "7"],
        ["--speculative-model", "[ngram]", "--num-speculative-tokens", "7"],  # of vLLM's first engine
    ):
        found = engine_args(command_line().parse(["demo", *words])).create_engine_config()
        assert found.speculative_config.drafting == Drafting(method="ngram", num_speculative_tokens=7), words


def test_the_table_by_batch_size_is_capped() -> None:
    table = ngram(num_speculative_tokens_per_batch_size=[[1, 4, 9], [6, 9, 2], [10, 10, 0]])
    assert table.num_speculative_tokens_per_batch_size == ((1, 4, 4), (6, 9, 2), (10, 10, 0))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"spec_method": "ngrm", "spec_tokens": 2}, "unknown method 'ngrm'; did you mean ngram"),
        ({"spec_method": "ngram"}, "num_speculative_tokens is missing"),
        ({"spec_tokens": 2}, "there is no method; it may be ngram, suffix"),
        ({"spec_method": "draft_model", "spec_tokens": 2}, "there is no model"),
        ({"spec_method": "ngram", "spec_model": "demo-draft", "spec_tokens": 2}, "drafts without a model"),
        ({"spec_method": "custom_class", "spec_model": "a/b", "spec_tokens": 2}, "'a/b' is no class"),
        ({"spec_tokens": 0}, "--spec-tokens 0 is below the minimum of 1"),
        ({"spec_tokens": 129}, "--spec-tokens 129 is above the maximum of 128"),
        ({"speculative_config": {"num_speculative_tokens": 129}}, r"must be in \[1, 128\], got 129"),
        ({"speculative_config": {"num_speculative_tokens": "4"}}, "must be an integer, got '4'"),
        ({"speculative_config": {"metod": "ngram"}}, "unknown key 'metod'; did you mean method"),
        ({"speculative_config": {"zzz": 1}}, "unknown key 'zzz'; its keys are num_speculative_tokens"),
        ({"speculative_config": {"tensor_parallel_size": 1}}, "the drafter's is draft_tensor_parallel_size"),
        ({"speculative_config": {"draft_tensor_parallel_size": 2}}, r"must be in \[1, 1\], got 2"),
        ({"speculative_config": {"suffix_decoding_min_token_prob": 1.5}}, r"must be in \[0, 1\], got 1.5"),
        ({"speculative_config": {"adaptive": 1}}, "adaptive must be true or false"),
        ({"speculative_config": {"draft_sample_method": "wild"}}, "is not one of greedy, probabilistic"),
        (
            {"speculative_config": {"num-speculative-tokens": 3, "num_speculative_tokens": 3}},
            "num_speculative_tokens twice",
        ),
        ({"speculative_config": {"method": "ngram"}, "spec_method": "ngram"}, "has method 'ngram' already"),
        ({"speculative_config": {"model": "a/b"}, "spec_model": "a/b"}, "has model 'a/b' already"),
        ({"speculative_config": {"num_speculative_tokens": 3}, "spec_tokens": 3}, "num_speculative_tokens 3 already"),
        ({"speculative_config": "@/no/such/file"}, "is not a JSON object: .*No such file"),
        ({"per_request_spec_decode_metrics": "summary"}, "there is no speculation; give --speculative-config"),
        ({"spec_model": "some/eagle-x-dflash", "spec_tokens": 1}, "method dflash is not supported"),
    ],
)
def test_what_is_wrong_is_said(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**flags)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rejection_sample_method": "block"}, "compared with the token that is drawn"),
        ({"rejection_sample_method": "synthetic"}, "compared with the token that is drawn"),
        ({"synthetic_acceptance_length": 2}, "another text"),
        ({"use_heterogeneous_vocab": True}, "must have the model's tokens"),
        ({"parallel_drafting": True}, "not implemented"),
        ({"kv_cache_dtype": "fp8"}, "type of its activations"),
        ({"prompt_lookup_min": 6, "prompt_lookup_max": 2}, "prompt_lookup_min 6 is more than prompt_lookup_max 2"),
        ({"max_model_len": 4096}, "max_model_len 4096 is more than the 2048 tokens"),
        ({"num_speculative_tokens_per_batch_size": [[2, 4, 1]]}, r"\[2, 4, 1\] after 0; it must begin at 1"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 1], [4, 5, 1]]}, r"\[4, 5, 1\] after 4; .* not overlap"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, -1]]}, "drafts are 0 or more"),
        ({"num_speculative_tokens_per_batch_size": 5}, "has 5; write"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ngram(**keys)


@pytest.mark.parametrize(
    "method",
    ["ngram_gpu", "mtp", "deepseek_mtp", "medusa", "mlp_speculator", "dflash", "dspark", "extract_hidden_states"],
)
def test_methods_that_there_are_not_have_a_reason(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"method {method} is not supported: .{{20,}}"):
        drafting({"method": method, "num_speculative_tokens": 2})


def test_keys_that_tune_nothing_are_logged_and_those_that_ask_nothing_are_not(caplog: Any) -> None:
    ngram(rejection_sample_method="standard", draft_sample_method="probabilistic", enforce_eager=False)
    ngram(use_heterogeneous_vocab=False, kv_cache_dtype="auto", draft_tensor_parallel_size=1)
    assert "has no effect" not in caplog.text
    ngram(enforce_eager=True)
    assert "enforce_eager has no effect" in caplog.text


# -- drafters that are models ------------------------------------------------------------------------------------------


def test_a_drafter_has_a_context_of_its_own(tmp_path: Path) -> None:
    path = str(copy_draft(tmp_path, max_position_embeddings=512))
    assert drafting(spec_model=path, spec_tokens=2).max_model_len == 512
    assert drafting(spec_model=path, spec_tokens=2, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len 513 is more than the 512 tokens"):
        drafting({"max_model_len": 513}, spec_model=path, spec_tokens=2)


def test_a_drafter_inherits_what_is_not_given(tmp_path: Path) -> None:
    found = drafting(spec_model="demo-draft", spec_tokens=2, quantization="int8", dtype="float32").model
    assert found is not None
    assert (found.quantization, found.dtype) == ("int8", "float32")
    found = drafting({"quantization": "int4"}, spec_model="demo-draft", spec_tokens=2, quantization="int8").model
    assert found is not None
    assert found.quantization == "int4"


def test_predictions_per_call_are_the_default_and_the_unit(tmp_path: Path) -> None:
    path = str(copy_draft(tmp_path, n_predict=3))
    assert drafting(spec_model=path).num_speculative_tokens == 3
    assert drafting(spec_model=path, spec_tokens=6).num_speculative_tokens == 6
    with pytest.raises(ConfigError, match="4 is no multiple of the n_predict 3"):
        drafting(spec_model=path, spec_tokens=4)


def test_a_smaller_vocabulary_is_taken_and_another_is_not(tmp_path: Path) -> None:
    directory = copy_draft(tmp_path)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    del vocab[last]
    file.write_text(json.dumps(tokenizer))
    assert drafting(spec_model=str(directory), spec_tokens=2).method == "draft_model"
    one, other = list(vocab)[1500:1502]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=rf"has another vocabulary than demo: token {min(vocab[one], vocab[other])}"):
        drafting(spec_model=str(directory), spec_tokens=2)
    file.write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json has no vocabulary that can be read"):
        drafting(spec_model=str(directory), spec_tokens=2)


def test_pooling_models_neither_draft_nor_are_drafted_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="demo is a pooling model; only a model that generates"):
        make(runner="pooling", spec_method="ngram", spec_tokens=2)
    path = copy_draft(tmp_path, architectures=["LlamaModel"])
    with pytest.raises(ConfigError, match="is a pooling model, which drafts no tokens"):
        drafting(spec_model=str(path), spec_tokens=2)


def test_methods_are_found_in_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method medusa is not supported"):
        drafting(spec_model=write(tmp_path / "m", {"model_type": "medusa"}), spec_tokens=2)
    found = drafting(spec_model=write(tmp_path / "h", HEAD), spec_tokens=2)
    assert found.method == "eagle3"
    assert found.model is not None
    assert found.max_model_len == 2048
    with pytest.raises(ModelLoadError, match="the head was made for another model"):
        drafting(spec_model=write(tmp_path / "o", {**HEAD, "target_hidden_size": 99}), spec_tokens=2)
    with pytest.raises(UnsupportedModelError, match="is a speculator of type 'wild'"):
        drafting(spec_model=write(tmp_path / "w", {**HEAD, "speculators_model_type": "wild"}), spec_tokens=2)


def test_a_served_speculator_drafts_for_its_verifier(tmp_path: Path) -> None:
    speculators = {
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "demo"},
        },
    }
    path = write(tmp_path / "s", {**HEAD, **speculators})
    config = EngineArgs(path).create_engine_config()
    found = config.speculative_config.drafting
    assert found is not None
    assert found.model is not None
    assert (found.method, found.num_speculative_tokens, found.model.name) == ("eagle3", 5, path)
    assert (config.model_config.model_dir, config.model_config.name) == (ASSETS_DIR / "demo", path)
    with pytest.raises(ConfigError, match="is a drafter itself; leave one out"):
        EngineArgs(path, spec_model="demo-draft").create_engine_config()


def test_the_help_names_every_method() -> None:
    assert all(re.search(rf"\b{method}\b", FLAGS["spec_method"].help) for method in METHODS)

"""The pooling of a model, by its architecture, its files and the flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.hf_config import HFConfig
from quire.config.pooling import PoolingConfig
from quire.config.pooling_files import resolve_pooling
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError


def resolve(
    architecture: str,
    directory: Path = Path("/nowhere"),
    *,
    runner: str = "auto",
    convert: str = "auto",
    pooler_config: dict[str, Any] | None = None,
    **raw: Any,
) -> PoolingConfig | None:
    hf = HFConfig({"architectures": [architecture], "hidden_size": 48, **raw}, directory / "config.json")
    return resolve_pooling(hf, directory, runner=runner, convert=convert, pooler_config=pooler_config)


def must(architecture: str, *args: Any, **kwargs: Any) -> PoolingConfig:
    pooling = resolve(architecture, *args, **kwargs)
    assert pooling is not None
    return pooling


@pytest.mark.parametrize(
    ("architecture", "flags", "expected"),
    [
        ("LlamaForCausalLM", {}, None),
        ("LlamaForCausalLM", {"runner": "generate"}, None),
        ("Unheard of", {}, None),
        ("LlamaForCausalLM", {"runner": "pooling"}, ("embed", False, "last")),
        ("LlamaForCausalLM", {"convert": "embed"}, ("embed", False, "last")),
        ("LlamaForCausalLM", {"runner": "pooling", "convert": "classify"}, ("classify", False, "last")),
        ("LlamaModel", {}, ("embed", False, "last")),
        ("LlamaForSequenceClassification", {}, ("classify", False, "last")),
        ("LlamaForSequenceClassification", {"convert": "embed"}, ("embed", False, "last")),
        ("LlamaForTokenClassification", {"convert": "classify"}, ("token_classify", False, "last")),
        ("BertModel", {}, ("embed", True, "cls")),
        ("BertForMaskedLM", {"convert": "none"}, ("embed", True, "cls")),
        ("XLMRobertaForSequenceClassification", {}, ("classify", True, "cls")),
        ("ModernBertForTokenClassification", {}, ("token_classify", True, "cls")),
        ("Qwen2ForRewardModel", {}, ("token_classify", False, "last")),
        ("LlamaForProcessRewardModel", {}, ("token_classify", False, "last")),
    ],
)
def test_architecture_and_flags(
    architecture: str, flags: dict[str, Any], expected: tuple[str, bool, str] | None
) -> None:
    pooling = resolve(architecture, **flags)
    assert (None if pooling is None else (pooling.head, pooling.is_encoder, pooling.pooling_type)) == expected


@pytest.mark.parametrize(
    ("architecture", "flags", "message"),
    [
        ("BertModel", {"runner": "generate"}, "no head to generate with"),
        ("LlamaForSequenceClassification", {"runner": "generate"}, "no head to generate with"),
        ("LlamaForCausalLM", {"runner": "pooling", "convert": "none"}, "must be converted"),
        ("LlamaForCausalLM", {"runner": "generate", "convert": "embed"}, "--convert embed is for a pooling model"),
        ("LlamaForCausalLM", {"pooler_config": {"pooling_type": "CLS"}}, "--pooler-config is for a pooling model"),
        ("BertModel", {"pooler_config": {"pooling_type": "MAX"}}, "not one of CLS, LAST, MEAN, ALL, STEP"),
        ("BertModel", {"pooler_config": {"tok_pooling_type": "MEAN"}}, "not one of ALL, STEP"),
        ("BertModel", {"pooler_config": {"seq_pooling_type": "STEP"}}, "not one of CLS, LAST, MEAN$"),
        ("Qwen2ForProcessRewardModel", {"pooler_config": {"pooling_type": "STEP"}}, "STEP needs step_tag_id"),
        ("Qwen2ForProcessRewardModel", {"pooler_config": {"step_tag_id": "x"}}, "id of a token, got 'x'"),
        ("LlamaModel", {"pooler_config": {"returned_token_ids": [1, 2]}, "vocab_size": 9}, "needs a logits head"),
        (
            "LlamaForCausalLM",
            {"runner": "pooling", "pooler_config": {"returned_token_ids": [1, 9]}, "vocab_size": 9},
            r"below 9 .*, got \[1, 9\]",
        ),
        ("BertModel", {"pooler_config": {"normalize": 1}}, "true or false"),
        ("BertModel", {"pooler_config": {"dimensions": 49}}, "between 1 and 48"),
        ("BertModel", {"pooler_config": {"colour": "red"}}, "knows no 'colour'"),
    ],
)
def test_flags_that_do_not_fit(architecture: str, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(architecture, **flags)


def test_tasks_follow_from_the_head() -> None:
    assert must("BertModel").tasks == ("embed", "token_embed")
    assert must("BertForSequenceClassification").tasks == ("classify",)
    assert must("BertForSequenceClassification", id2label={"0": "fits"}).tasks == ("classify", "score")
    assert must("BertForTokenClassification").tasks == ("token_classify",)
    last, first = must("LlamaModel"), must("BertModel")
    assert [last.needs_all_tokens(task) for task in ("embed", "token_embed")] == [False, True]
    assert first.needs_all_tokens("embed")


def test_labels_and_their_activation() -> None:
    ten = must("BertForSequenceClassification", id2label={str(i): f"c{i}" for i in reversed(range(11))})
    assert ten.labels == tuple(f"c{i}" for i in range(11))
    for raw, activation in (
        ({}, "softmax"),
        ({"id2label": {"0": "x"}}, "sigmoid"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
    ):
        assert must("BertForSequenceClassification", **raw).activation == activation
    with pytest.raises(UnsupportedModelError, match=r"torch\.nn\.ReLU"):
        resolve("BertForSequenceClassification", sentence_transformers={"activation_fn": "torch.nn.ReLU"})
    with pytest.raises(ModelLoadError, match="does not say how it pools"):
        resolve("BertForSequenceClassification", id2label={"first": "x"})


def test_a_reward_model_has_one_score_per_token_or_step(tmp_path: Path) -> None:
    """One score per token unless the file names more; of steps two, at the token that the tokenizer has for them."""
    assert must("Qwen2ForRewardModel").labels == ("reward",)
    assert must("Qwen2ForRewardModel", id2label={"0": "a", "1": "b"}).labels == ("a", "b")
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 7, "content": "<extra_0>"}]}')
    steps = must("Qwen2ForProcessRewardModel", tmp_path)
    assert (steps.labels, steps.activation, steps.step_tag_id) == (("wrong", "right"), "softmax", 7)
    assert must("Qwen2ForProcessRewardModel", tmp_path, pooler_config={"step_tag_id": 3}).step_tag_id == 3
    assert must("Qwen2ForProcessRewardModel", tmp_path, pooler_config={"pooling_type": "ALL"}).step_tag_id is None
    with pytest.raises(UnsupportedModelError, match="reward models are decoders"):
        resolve("BertForRewardModel")


# -- sentence-transformers --------------------------------------------------------------------------------------------


def write(directory: Path, *modules: str, **files: Any) -> Path:
    listed = [{"type": f"sentence_transformers.models.{m}", "path": "" if m == "Transformer" else m} for m in modules]
    (directory / "modules.json").write_text(json.dumps(listed))
    for name, content in files.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(content))
    return directory


def test_a_decoder_with_modules_pools(tmp_path: Path) -> None:
    write(tmp_path, "Transformer", "Pooling", "Normalize", Pooling={"pooling_mode_lasttoken": True})
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 99}')
    pooling = must("Qwen3ForCausalLM", tmp_path)
    assert (pooling.pooling_type, pooling.activates, pooling.max_len) == ("last", True, 99)
    assert resolve("Qwen3ForCausalLM", tmp_path, runner="generate") is None


def test_the_newer_spelling_and_no_norm(tmp_path: Path) -> None:
    pooling = must("BertModel", write(tmp_path, "Transformer", "Pooling", Pooling={"pooling_mode": "mean"}))
    assert (pooling.pooling_type, pooling.activates) == ("mean", False)


@pytest.mark.parametrize(
    ("modules", "files", "error", "message"),
    [
        (
            ("Transformer", "Pooling"),
            {"Pooling": {"pooling_mode_max_tokens": True}},
            UnsupportedModelError,
            "max_tokens",
        ),
        (("Transformer", "Pooling"), {}, UnsupportedModelError, "pools by nothing"),
        (
            ("Pooling",),
            {"Pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},
            UnsupportedModelError,
            "cls_token, pooling_mode_mean",
        ),
        (("WordWeights",), {}, UnsupportedModelError, "'WordWeights'"),
        (("Dense",), {}, ModelLoadError, "no in_features"),
        (
            ("Dense",),
            {"Dense": {"in_features": 4, "out_features": 4, "activation_function": "torch.nn.Softsign"}},
            UnsupportedModelError,
            "'Softsign'",
        ),
    ],
)
def test_modules_that_cannot_be_followed(
    tmp_path: Path, modules: tuple[str, ...], files: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve("BertModel", write(tmp_path, *modules, **files))


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"type": "Pooling"}]'])
def test_a_list_of_modules_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    if text == "{}":
        assert must("BertModel", tmp_path).pooling_type == "cls"
        return
    with pytest.raises(ModelLoadError, match=r"modules\.json is not a list of modules"):
        resolve("BertModel", tmp_path)


def test_positions_of_roberta_begin_behind_its_padding() -> None:
    hf = HFConfig({"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta",
                   "max_position_embeddings": 514}, Path("config.json"))  # fmt: skip
    assert (hf.position_offset, hf.num_positions, hf.context_len) == (2, 512, 512)
    bert = HFConfig({"architectures": ["BertModel"], "model_type": "bert"}, Path("config.json"))
    assert (bert.position_offset, bert.num_positions, bert.family) == (0, 512, "BertModel")
    modern = HFConfig({"architectures": ["ModernBertModel"], "model_type": "modernbert"}, Path("config.json"))
    assert (modern.num_positions, modern.context_len) == (None, 8192)
    assert HFConfig({"architectures": ["Qwen3ForSequenceClassification"]}, Path("x")).family == "Qwen3ForCausalLM"

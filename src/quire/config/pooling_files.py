"""Reads a model's pooling from config.json, the modules.json of sentence-transformers beside it, and `--pooler-config`.

A model generates or pools, never both. The architecture decides (encoders cannot generate). `--runner` and `--convert`
turn a decoder into a pooling model, and `--pooler-config` changes how it pools.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.checkpoint import MAX_JSON_BYTES, read_object, read_text
from quire.config.hf_config import HFConfig, split_architecture
from quire.config.pooling import Activation, DenseConfig, Head, PoolingConfig, PoolingType
from quire.errors import ConfigError, ModelLoadError, QuireError, UnsupportedModelError

REWARD_KINDS = ("ForRewardModel", "ForProcessRewardModel")
"""Decoders whose classifier has a hidden layer: a score of every token, or the probability that a step is right."""
STEP_TOKEN = "<extra_0>"
"""Token after each step in the prompts of Qwen's process reward models."""
_HEAD_OF_KIND: Mapping[str, Head] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    **dict.fromkeys(REWARD_KINDS, "token_classify"),
}
_POOLING_MODES: Mapping[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
_ST_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_DENSE_ACTIVATIONS: Mapping[str, str | None] = {"Identity": None, "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu"}


def resolve_pooling(
    hf: HFConfig, model_dir: Path, *, runner: str, convert: str, pooler_config: Mapping[str, Any] | None
) -> PoolingConfig | None:
    """Returns the model's pooling, None if it generates. Raises ConfigError for flags that do not fit it,
    ModelLoadError and UnsupportedModelError for files that cannot be followed."""
    _, kind = split_architecture(hf.architecture)
    is_encoder = hf.is_encoder
    modules = _read_modules(model_dir)
    can_generate = not is_encoder and kind not in ("Model", *_HEAD_OF_KIND)
    if runner == "auto":
        pools = not can_generate or modules is not None or convert in ("embed", "classify")
        runner = "pooling" if pools else "generate"
    if runner == "generate":
        if not can_generate:
            raise ConfigError(
                f"--runner generate: {hf.architecture} has no head to generate with; use --runner pooling"
            )
        if pooler_config or convert in ("embed", "classify"):
            flag = f"--convert {convert}" if convert in ("embed", "classify") else "--pooler-config"
            raise ConfigError(f"{flag} is for a pooling model, and {hf.architecture} generates; use --runner pooling")
        return None
    if can_generate and convert == "none":
        raise ConfigError(
            f"--convert none: {hf.architecture} generates, and must be converted to pool; use --convert embed"
        )
    if is_encoder and kind in REWARD_KINDS:
        raise UnsupportedModelError(
            f"{hf.architecture}: reward models are decoders; an encoder with such a head is none"
        )
    overrides = dict(pooler_config or {})
    scored_ids = overrides.pop("returned_token_ids", None)
    head = _HEAD_OF_KIND.get(kind, "embed")
    if convert in ("embed", "classify"):
        head = "embed" if convert == "embed" else "classify" if head == "embed" else head
    try:
        if scored_ids is not None:
            pooling = scored_tokens(hf, scored_ids, can_generate=can_generate)
        elif head == "embed":
            pooling = _embedding(hf, model_dir, modules or [], is_encoder)
        else:
            pooling = _classification(hf, head, is_encoder)
            if kind in REWARD_KINDS:
                pooling = _reward(pooling, hf, model_dir, has_steps=kind == "ForProcessRewardModel")
            if hf.get("classifier_from_token") and not is_encoder:
                pooling = _from_tokens(pooling, hf, model_dir)
    except QuireError:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError) as e:  # any other fault of the files
        raise ModelLoadError(f"{model_dir} does not say how it pools: {type(e).__name__}: {e}") from e
    return override_pooling(pooling, overrides)


# -- embeddings -------------------------------------------------------------------------------------------------------


def _embedding(hf: HFConfig, model_dir: Path, modules: list[tuple[str, str]], is_encoder: bool) -> PoolingConfig:
    pooling_type: PoolingType = "cls" if is_encoder else "last"
    dense: list[DenseConfig] = []
    for module, path in modules:
        if module == "Pooling":
            pooling_type = _pooling_type(model_dir, path)
        elif module == "Dense":
            dense.append(_dense(model_dir, path))
        elif module not in ("Transformer", "Normalize"):
            raise UnsupportedModelError(
                f"{model_dir / 'modules.json'} has a module of type {module!r}, which is not implemented"
            )
    transformer = read_object(model_dir, "sentence_bert_config.json") or {}
    max_len = transformer.get("max_seq_length")
    dims = hf.get("matryoshka_dimensions")
    is_matryoshka = dims is not None or bool(hf.get("is_matryoshka", False))
    return PoolingConfig(
        head="embed",
        is_encoder=is_encoder,
        pooling_type=pooling_type,
        activates=not modules or any(module == "Normalize" for module, _ in modules),
        dense=tuple(dense),
        embedding_dim=dense[-1].out_features if dense else hf.hidden_size,
        matryoshka_dims=tuple(int(dim) for dim in dims or ()) if is_matryoshka else None,
        max_len=None if max_len is None else int(max_len),
        lowers_case=bool(transformer.get("do_lower_case", False)),
        prompts=_prompts(model_dir),
    )


def _prompts(model_dir: Path) -> tuple[tuple[str, str], ...]:
    prompts = (read_object(model_dir, "config_sentence_transformers.json") or {}).get("prompts") or {}
    return tuple((str(name), str(prefix)) for name, prefix in prompts.items())


def _read_modules(model_dir: Path) -> list[tuple[str, str]] | None:
    """Returns (class name, subdirectory) of each module of a sentence-transformers model; None if it is not one."""
    text = read_text(model_dir, "modules.json", MAX_JSON_BYTES)
    if text is None:
        return None
    try:
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in json.loads(text)]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ModelLoadError(f"{model_dir / 'modules.json'} is not a list of modules with type and path") from None


def _pooling_type(model_dir: Path, part: str) -> PoolingType:
    path, config = _read_part(model_dir, part)
    mode = config.get("pooling_mode")
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(mode, str) and not chosen:  # the newer spelling
        chosen = [{"cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken",
                   "mean": "pooling_mode_mean_tokens"}.get(mode, mode)]  # fmt: skip
    if len(chosen) != 1 or chosen[0] not in _POOLING_MODES:
        raise UnsupportedModelError(
            f"{path} pools by {', '.join(chosen) or 'nothing'}; it must be one of {', '.join(_POOLING_MODES)}"
        )
    return _POOLING_MODES[chosen[0]]


def _read_part(model_dir: Path, part: str) -> tuple[Path, dict[str, Any]]:
    """Returns (path of a module's config.json, its content)."""
    name = f"{part}/config.json"
    return model_dir / name, read_object(model_dir, name) or {}


def _dense(model_dir: Path, part: str) -> DenseConfig:
    path, config = _read_part(model_dir, part)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _DENSE_ACTIVATIONS:
        raise UnsupportedModelError(f"{path} has the activation {activation!r}, which is not implemented")
    try:
        sizes = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError):
        raise ModelLoadError(f"{path} has no in_features and out_features") from None
    return DenseConfig(
        directory=path.parent,
        in_features=sizes[0],
        out_features=sizes[1],
        bias=bool(config.get("bias", True)),
        activation=_DENSE_ACTIVATIONS[activation],
    )


# -- classification ---------------------------------------------------------------------------------------------------


def _classification(hf: HFConfig, head: Head, is_encoder: bool) -> PoolingConfig:
    labels = _labels(hf)
    pooling_type: PoolingType = "cls" if is_encoder else "last"
    if hf.get("classifier_pooling") == "mean":
        pooling_type = "mean"
    return PoolingConfig(
        head=head,
        is_encoder=is_encoder,
        pooling_type=pooling_type,
        activation=_activation(hf, len(labels)),
        labels=labels,
        has_segments=is_encoder and int(hf.get("type_vocab_size", 1)) > 1,
    )


def _from_tokens(pooling: PoolingConfig, hf: HFConfig, model_dir: Path) -> PoolingConfig:
    """Returns the pooling of a classifier made of the logits head (`classifier_from_token`): one score per token, or
    the difference of two logits (`is_original_qwen3_reranker`)."""
    tokens = [str(token) for token in hf.require("classifier_from_token")]
    vocabulary = ((read_object(model_dir, "tokenizer.json") or {}).get("model") or {}).get("vocab") or {}
    unknown = [token for token in tokens if not 0 <= vocabulary.get(token, -1) < hf.vocab_size]
    if unknown:
        raise ModelLoadError(f"classifier_from_token: {model_dir / 'tokenizer.json'} has no token {unknown[0]!r}")
    if bool(hf.get("is_original_qwen3_reranker", False)):
        if len(tokens) != 2:
            raise ModelLoadError(f"classifier_from_token has {len(tokens)} tokens; is_original_qwen3_reranker needs 2")
        pooling = dataclasses.replace(pooling, labels=(tokens[1],), activation="sigmoid")
    else:
        pooling = dataclasses.replace(pooling, labels=tuple(tokens), activation="softmax")
    return dataclasses.replace(pooling, label_token_ids=tuple(int(vocabulary[token]) for token in tokens))


def _reward(pooling: PoolingConfig, hf: HFConfig, model_dir: Path, *, has_steps: bool) -> PoolingConfig:
    """Returns the pooling of a reward model: a score of every token, or for process reward models two probabilities for
    each step."""
    if not has_steps:
        if not isinstance(hf.get("id2label"), dict):  # otherwise config.json has the number of labels
            pooling = dataclasses.replace(pooling, labels=("reward",) * int(hf.get("num_labels", 1)))
        return dataclasses.replace(pooling, activation="none", classifier_layers=2)
    added = (read_object(model_dir, "tokenizer.json") or {}).get("added_tokens") or []
    tags = [int(token["id"]) for token in added if token.get("content") == STEP_TOKEN]
    return dataclasses.replace(
        pooling,
        labels=("wrong", "right"),
        activation="softmax",
        classifier_layers=2,
        step_tag_id=tags[0] if tags else None,
    )


def _labels(hf: HFConfig) -> tuple[str, ...]:
    names = hf.get("id2label")
    if isinstance(names, dict) and names:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    return tuple(f"LABEL_{i}" for i in range(int(hf.get("num_labels", 2))))


def _activation(hf: HFConfig, num_labels: int) -> Activation:
    """Returns the activation that the checkpoint names, as sentence-transformers or transformers do, or the default."""
    named = (hf.get("sentence_transformers") or {}).get("activation_fn") or hf.get(
        "sbert_ce_default_activation_function"
    )
    if named is not None:
        name = str(named).rpartition(".")[2]
        if name not in _ST_ACTIVATIONS:
            raise UnsupportedModelError(f"{hf.path} names the activation {named!r}, which is not implemented")
        return _ST_ACTIVATIONS[name]
    problem = hf.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"


_WHOLE = ("cls", "last", "mean")
"""Pooling types that make one vector of a text."""


def override_pooling(pooling: PoolingConfig, overrides: Mapping[str, Any]) -> PoolingConfig:
    """Returns the pooling with --pooler-config applied. Raises ConfigError for a key that is unknown or does not fit
    the model."""
    changes: dict[str, Any] = {}
    for key, value in overrides.items():
        match key:
            case "pooling_type" | "seq_pooling_type" | "tok_pooling_type":
                changes |= _type_changes(key, value)
            case "use_activation" | "normalize":
                if not isinstance(value, bool):
                    raise ConfigError(f"--pooler-config: {key} must be true or false, got {value!r}")
                changes["activates"] = value
            case "dimensions":
                if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= pooling.embedding_dim:
                    raise ConfigError(
                        f"--pooler-config: dimensions must be between 1 and {pooling.embedding_dim}, got {value!r}"
                    )
                changes["default_dim"] = value
            case "step_tag_id":
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise ConfigError(f"--pooler-config: step_tag_id must be the id of a token, got {value!r}")
                changes["step_tag_id"] = value
            case _:
                raise ConfigError(
                    f"--pooler-config knows no {key!r}; known: pooling_type (or seq_pooling_type, tok_pooling_type), "
                    "use_activation (or normalize), dimensions, step_tag_id, returned_token_ids"
                )
    wants_steps = "STEP" in (str(value).upper() for value in overrides.values())
    changed = dataclasses.replace(pooling, **changes)
    if wants_steps and changed.step_tag_id is None:
        raise ConfigError("--pooler-config: pooling by STEP needs step_tag_id, the id of the token after each step")
    return changed


def _type_changes(key: str, value: Any) -> dict[str, Any]:
    """Returns the changes for a pooling type: three give one vector for a text; ALL and STEP give one per token."""
    name = str(value).lower()
    if name in _WHOLE and key != "tok_pooling_type":
        return {"pooling_type": name}
    if name == "all" and key != "seq_pooling_type":
        return {"step_tag_id": None}
    if name == "step" and key != "seq_pooling_type":
        return {}
    known = {"seq_pooling_type": "CLS, LAST, MEAN", "tok_pooling_type": "ALL, STEP"}
    raise ConfigError(f"--pooler-config: {key} {value!r} is not one of {known.get(key, 'CLS, LAST, MEAN, ALL, STEP')}")


def scored_tokens(hf: HFConfig, token_ids: Any, *, can_generate: bool) -> PoolingConfig:
    """Returns the pooling for `returned_token_ids`: a decoder that was trained to rate steps gives the probability of
    each of some tokens, among these. Raises ConfigError."""
    is_list = isinstance(token_ids, list) and all(type(i) is int and 0 <= i < hf.vocab_size for i in token_ids)
    if not is_list or len(token_ids) < 2:
        raise ConfigError(
            f"--pooler-config: returned_token_ids must be two or more ids below {hf.vocab_size} (the vocabulary), got "
            f"{str(token_ids)[:60]}"
        )
    if not can_generate:
        raise ConfigError(f"--pooler-config: returned_token_ids needs a logits head, and {hf.architecture} has none")
    return PoolingConfig(
        head="token_classify",
        is_encoder=False,
        pooling_type="last",
        activation="softmax",
        labels=tuple(map(str, token_ids)),
        label_token_ids=tuple(token_ids),
    )

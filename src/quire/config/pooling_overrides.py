"""--pooler-config: what its user says of how a model pools, laid over what the files say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.config.hf_config import HFConfig
from quire.config.pooling import PoolingConfig
from quire.errors import ConfigError

_WHOLE = ("cls", "last", "mean")
"""Ways of making one vector of a text."""


def override_pooling(pooling: PoolingConfig, overrides: Mapping[str, Any]) -> PoolingConfig:
    """Raises ConfigError for what does not fit the model, or is none of the known keys."""
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
    """Of one vector for a text there are three kinds; of one for each token: ALL, or those after a STEP."""
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
    """`returned_token_ids`: a decoder that was trained to say how good a step is. The probability of each of some
    tokens, against the others of them. Raises ConfigError."""
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

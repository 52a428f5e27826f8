"""Heads that draft: the config.json of EAGLE, EAGLE-3 and speculators checkpoints, brought to one form.

A head is a layer or two that read the states of one target model. Its config.json is a Llama's with more keys, at the
top, in `eagle_config`, or (the speculators format) with Llama's part in `transformer_layer_config`. In the form that
`read_head` returns all are at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.checkpoint import read_object
from quire.config.hf_config import HFConfig
from quire.errors import ModelLoadError, UnsupportedModelError

EAGLE, EAGLE3 = "eagle", "eagle3"
EAGLE3_ARCHITECTURES = frozenset(
    {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
)
SPECULATOR = "speculators_model_type"
"""Key that only the speculators format has."""
HEAD = "quire_head"
"""Key of the one form: EAGLE or EAGLE3."""
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


class DraftHead(NamedTuple):
    """The config.json of a head."""

    method: str
    """EAGLE or EAGLE3."""
    raw: dict[str, Any]
    """The one form, for an `HFConfig`."""
    num_speculative_tokens: int | None
    """Drafts in a step that the head was published with."""
    verifier: str | None
    """Hub id or path of the target it was trained for."""


def read_head(raw: Mapping[str, Any], path: Path, name: str = "", method: str | None = None) -> DraftHead | None:
    """Returns the head that a config.json describes; None if it is another model. `name` is what the user calls it,
    `method` the one that the user demands.

    Raises ModelLoadError for keys that cannot be read, UnsupportedModelError for speculators of another kind.
    """
    layer, eagle, outer = (_object(raw, key, path) for key in ("transformer_layer_config", "eagle_config", _OUTER))
    method = method or _method_of(raw, path, name)
    if method not in (EAGLE, EAGLE3):
        return None
    flat = {key: value for key, value in {**raw, **layer, **eagle}.items() if value is not None}
    if SPECULATOR in raw or layer:
        flat = {"norm_before_residual": True, **flat}
    flat |= {HEAD: method, "architectures": raw.get("architectures"), "tie_word_embeddings": False}
    proposals = outer.get("proposal_methods")
    proposal = proposals[0] if isinstance(proposals, list) and proposals else {}
    count = proposal.get("speculative_tokens") if isinstance(proposal, dict) else None
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ModelLoadError(f"{path} has 'speculative_tokens' = {str(count)[:60]}, which must be a positive integer")
    verifier = _object(outer, "verifier", path).get("name_or_path")
    return DraftHead(method, flat, count, verifier if isinstance(verifier, str) else None)


def find_verifier(directory: Path) -> str | None:
    """Returns the model that a checkpoint of speculators drafts for; None for another checkpoint. Raises
    ModelLoadError."""
    path = directory / "config.json"
    raw = read_object(directory, path.name) or {}
    head = read_head(raw, path) if SPECULATOR in raw else None
    if head is not None and head.verifier is None:
        raise ModelLoadError(f"{path} names no verifier: give the model itself, and {directory} with --spec-model")
    return None if head is None else head.verifier


_OUTER = "speculators_config"


def _method_of(raw: Mapping[str, Any], path: Path, name: str) -> str | None:
    names, lower = raw.get("architectures"), name.rstrip("/").rpartition("/")[2].lower()
    architecture = names[0] if isinstance(names, list) and names else None
    kind = raw.get(SPECULATOR)
    if kind is not None and kind != EAGLE3:
        raise UnsupportedModelError(f"{path} is a speculator of type {str(kind)[:60]!r}; only {EAGLE3!r} can be loaded")
    if kind or architecture in EAGLE3_ARCHITECTURES or "eagle3" in lower or "draft_vocab_size" in raw:
        return EAGLE3
    return EAGLE if "eagle-" in lower else None


def _object(raw: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise ModelLoadError(f"{path} has {key!r} = {str(value)[:60]}, which must be an object")
    return value or {}


def aux_layers(head: HFConfig, target: HFConfig) -> tuple[int, ...]:
    """Returns the layers of the target whose inputs a head reads, in increasing order; empty: it reads the target's
    last states. Raises ModelLoadError."""
    if head.get(HEAD) == EAGLE or not head.get("use_aux_hidden_state", True):
        return ()
    num_layers, given = target.num_hidden_layers, head.get(AUX_LAYERS)
    ids = given if given is not None else [2, num_layers // 2, num_layers - 3]
    is_plain = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not is_plain or not ids or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < num_layers:
        which = "has" if given is not None else f"has no {AUX_LAYERS!r}, which then are"
        shown = str(ids)[:60] if given is None else f"{AUX_LAYERS!r} = {str(ids)[:60]}"
        raise ModelLoadError(
            f"{head.path} {which} {shown}; they must be different layers of the target, which has {num_layers}"
        )
    return tuple(sorted(ids))


def check_head(head: HFConfig, target: HFConfig) -> None:
    """Raises ModelLoadError unless a head, in the one form, fits the target by what both config.json say."""
    aux_layers(head, target)
    wanted = {"vocab_size": target.vocab_size}
    if head.get(HEAD) == EAGLE:
        wanted["hidden_size"] = target.hidden_size
    elif head.get("target_hidden_size") is not None:
        wanted["target_hidden_size"] = target.hidden_size
    for key, theirs in wanted.items():
        if head.size(key) != theirs:
            raise ModelLoadError(
                f"{head.path} has {key!r} = {head.size(key)}, but the target's is {theirs} ({target.path}): the head "
                "was made for another model"
            )
    if (draft := head.size("draft_vocab_size", head.vocab_size)) > head.vocab_size:
        raise ModelLoadError(
            f"{head.path} has 'draft_vocab_size' = {draft}, more than the {head.vocab_size} tokens of its vocabulary"
        )

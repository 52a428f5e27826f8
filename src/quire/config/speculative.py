"""The configuration of speculative decoding: its flags, and what they resolve to.

`--speculative-config` has vLLM's keys and two of Quire's own. A key that asks for something that Quire does not have is
refused with the reason; one that tunes nothing here is logged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.config.checkpoint import read_object
from quire.config.flags import flag, parse_json_object
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.quantization import METHODS as QUANTIZATIONS
from quire.config.quantization import WEIGHT_BITS
from quire.config.speculators import EAGLE, EAGLE3, HEAD, check_head, read_head
from quire.config.tokenizer_json import read_tokenizer_json
from quire.errors import ConfigError, ModelLoadError, ValidationError, nearest
from quire.field_bounds import FieldBound
from quire.logger import init_logger

logger = init_logger(__name__)

FLAG = "--speculative-config"
MAX_DRAFTS = 128
MODEL_FREE, HEADS = ("ngram", "suffix"), (EAGLE, EAGLE3)
METHODS = (*MODEL_FREE, "draft_model", *HEADS, "custom_class")


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """Resolved parameters of `--speculative-config`: checked, and with all defaults filled in."""

    method: str
    """A row of `worker/spec_decode/registry.py`."""
    num_speculative_tokens: int
    """K: most drafts of a request in a step, 1 to 128."""
    model: ModelConfig | None = None
    """Checkpoint of a drafter that is a model or a head."""
    drafter_cls: str | None = None
    """package.module:Class of a drafter of the user's own (`custom_class`)."""
    max_model_len: int | None = None
    """Longest request that is drafted for; None: the engine's context."""
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_bytes: int = 256 << 20
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    """(from, to, most drafts) by number of running requests, inclusive; gaps and the tail carry the last."""
    adaptive: bool = True
    """Lengths follow measured costs and acceptance; False: always K."""

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens beyond those of a step for which blocks are allocated: a model writes the keys of its drafts there."""
        return 0 if self.model is None else self.num_speculative_tokens


# -- the keys ---------------------------------------------------------------------------------------------------------

_RANGES: Mapping[str, tuple[str, float, float | None]] = {
    "num_speculative_tokens": ("int", 1, MAX_DRAFTS),
    "prompt_lookup_min": ("int", 1, None),
    "prompt_lookup_max": ("int", 1, None),
    "suffix_decoding_max_tree_depth": ("int", 1, 1024),
    "suffix_decoding_max_cached_requests": ("int", 0, None),
    "suffix_decoding_max_spec_factor": ("float", 0, None),
    "suffix_decoding_min_token_prob": ("float", 0, 1),
    "suffix_decoding_max_bytes": ("int", 0, None),
    "max_model_len": ("int", 1, None),
    "draft_tensor_parallel_size": ("int", 1, 1),
}
_KINDS: Mapping[str, tuple[str, ...]] = {
    "str": ("method", "model", "revision", "quantization", "draft_sample_method"),
    "bool": ("adaptive",),
    "object": ("num_speculative_tokens_per_batch_size",),
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "draft_sample_method": ("greedy", "probabilistic"),
    "quantization": QUANTIZATIONS,
}
_NO_EFFECT = (
    *("code_revision", "enforce_eager", "disable_padded_drafter_batch", "disable_eagle_block_drop"),
    *("use_local_argmax_reduction", "draft_load_config", "moe_backend", "attention_backend"),
)
_CHANCE = "drafts kept by chance make another text"
_MTP = "multi-token-prediction layers are not implemented; use draft_model, eagle3 or ngram"
_REFUSED: Mapping[str, str] = {
    "rejection_sample_method": "a draft is compared with the token that is drawn without it, which keeps the output",
    "synthetic_acceptance_rates": _CHANCE,
    "synthetic_acceptance_length": _CHANCE,
    "use_heterogeneous_vocab": "a drafter must have the model's tokens, though it may lack the last of them",
    "kv_cache_dtype": "the drafter's keys and values have the type of its activations",
    "parallel_drafting": "drafters of this kind are not implemented",
    "enable_adaptive_verification": "lengths follow measured costs anyway ('adaptive')",
    "index_share_for_mtp_iteration": _MTP,
    "dspark_draft_topk": "its drafters are not implemented",
}
"""Keys whose value may only be one that asks for nothing, and the reason."""
_ASKS_NOTHING = (False, "auto", "standard")
_REFUSED_METHODS: Mapping[str, str] = {
    "ngram_gpu": "n-gram drafts are made on the CPU; use ngram, which makes the same",
    "mtp": _MTP,
    "medusa": "Medusa heads are not implemented; use eagle3 or draft_model",
    "mlp_speculator": "its heads are not implemented, nor are they in vLLM 0.32; use eagle3 or draft_model",
    "dflash": "its heads are not implemented; use eagle3 or draft_model",
    "dspark": "its heads are not implemented; use eagle3 or draft_model",
    "extract_hidden_states": "it drafts nothing, and hidden states are not exported",
}
_BOUNDS: Mapping[str, FieldBound] = {
    **{name: FieldBound(name, kind, low, high) for name, (kind, low, high) in _RANGES.items()},
    **{name: FieldBound(name, kind) for kind, names in _KINDS.items() for name in names},
    **{name: FieldBound(name, "object") for name in (*_NO_EFFECT, *_REFUSED)},
}


def _validate(name: str, value: Any) -> None:
    """Raises ConfigError for an unknown key, a value out of its bound, or one that asks for what there is not."""
    if name not in _BOUNDS:
        hint = nearest(name, _BOUNDS, f"its keys are {', '.join(_BOUNDS)}")
        if name == "tensor_parallel_size":
            hint = "the drafter's is draft_tensor_parallel_size"
        raise ConfigError(f"{FLAG} has an unknown key {name!r}; {hint}")
    try:
        _BOUNDS[name].validate(value)
    except ValidationError as e:
        raise ConfigError(f"{FLAG}: {e}") from None
    if name in _REFUSED and value not in _ASKS_NOTHING:
        raise ConfigError(f"{FLAG}: {name} {value!r} is not supported: {_REFUSED[name]}")
    if value not in _CHOICES.get(name, (value,)):
        raise ConfigError(f"{FLAG}: {name} {value!r} is not one of {', '.join(_CHOICES[name])}")
    if name in _NO_EFFECT and value:
        logger.warning("%s: %s has no effect", FLAG, name)


def _check_method(method: str) -> None:
    if method not in METHODS:
        why = _MTP if method.endswith("_mtp") else _REFUSED_METHODS.get(method)
        if why is None:
            raise ConfigError(f"{FLAG}: unknown method {method!r}; {nearest(method, METHODS, _choices(METHODS))}")
        raise ConfigError(f"{FLAG}: method {method} is not supported: {why}")


def _choices(names: tuple[str, ...]) -> str:
    return f"it may be {', '.join(names)}"


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: drafts of the next tokens, verified in one step. The output does not change."""

    speculative_config: dict[str, Any] | None = flag(
        None,
        "JSON object (or @FILE): method, model, num_speculative_tokens and more (docs/speculative_decoding.md).",
        parse=parse_json_object,
        metavar="JSON",
        short="-sc",
    )
    spec_method: str | None = flag(
        None, f"Method of speculative decoding: {', '.join(METHODS)}. Default: found out from --spec-model."
    )
    spec_model: str | None = flag(None, "Model or head that drafts: a directory, a hub id, or demo-draft.")
    spec_tokens: int | None = flag(
        None, "Most drafts of a request in a step.", parse=int, minimum=1, maximum=MAX_DRAFTS
    )
    per_request_spec_decode_metrics: str = flag(
        "none",
        "Report the drafts of a request with its output: their totals (summary), or those of each step, too.",
        choices=("none", "summary", "detailed"),
    )
    drafting: Drafting | None = None
    """Result of the flags; None: no speculation."""
    dropped: Drafting | None = None
    """Value that `drafting` had, in a core that must not speculate."""

    def without_drafts(self) -> SpeculativeConfig:
        """Returns the configuration of a core that must not speculate."""
        return replace(self, drafting=None, dropped=self.drafting)

    def settings(self) -> dict[str, Any]:
        """Returns the keys of all flags. Raises ConfigError for a key that is unknown, out of its bound, not supported,
        or given twice."""
        given: dict[str, Any] = {}
        for key, value in (self.speculative_config or {}).items():
            name = key.replace("-", "_")
            if name in given:
                raise ConfigError(f"{FLAG} has {name} twice, with hyphens and without; leave one out")
            if value is not None:
                given[name] = value
        for flag_name, name in _FLAGS.items():
            value = getattr(self, flag_name)
            if value is not None and name in given:
                option = "--" + flag_name.replace("_", "-")
                raise ConfigError(f"{option} {value}: {FLAG} has {name} {given[name]!r} already; leave one out")
            if value is not None:
                given[name] = value
        for name, value in given.items():
            _validate(name, value)
        return given


_FLAGS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}

# -- resolution -------------------------------------------------------------------------------------------------------

_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
_COPIED = ("adaptive", *(name for name in _RANGES if name.startswith("suffix_")))


def resolve_drafting(
    config: SpeculativeConfig,
    target: ModelConfig,
    find: Callable[[str, str | None], Path],
    resolve_model: Callable[[ModelConfig, HFConfig | None], ModelConfig],
) -> Drafting | None:
    """Returns the parameters that the flags ask for, None for no speculation.

    `target` is the served model. `find` returns the directory of a model and a revision; `resolve_model` fills in the
    ModelConfig of a drafter, which is a head if its config.json is given. Raises ConfigError, or ModelLoadError for a
    drafter that cannot be found. Reads no weights.
    """
    settings = config.settings()
    if not settings:
        detail = config.per_request_spec_decode_metrics
        if detail != "none":
            raise ConfigError(f"--per-request-spec-decode-metrics {detail}: there is no speculation; give {FLAG}")
        return None
    if target.pooling is not None:
        raise ConfigError(f"{FLAG}: {target.name} is a pooling model; only a model that generates can be drafted for")
    name = settings.get("model")
    method, directory, head = settings.get("method") or _method_by_name(name), None, None
    if method in (None, "draft_model", *HEADS):
        if name is None:
            raise ConfigError(f"{FLAG}: there is no {'model' if method else 'method'}; {_choices(METHODS)}")
        directory = find(name, settings.get("revision"))
        raw = read_object(directory, "config.json") or {}
        head = read_head(raw, directory / "config.json", name, method)
        method = method or (head.method if head is not None else _method_by_config(raw))
    _check_method(method)
    drafter = drafter_cls = None
    if directory is not None:
        hf = None if head is None else HFConfig(head.raw, directory / "config.json")
        drafter = resolve_model(_drafter_config(settings, target, method, directory), hf)
        _check_drafter(drafter, target, method)
        if head is not None and head.num_speculative_tokens is not None:
            settings.setdefault("num_speculative_tokens", head.num_speculative_tokens)
    elif method == "custom_class":
        if name is None or not _CLASS.fullmatch(name):
            raise ConfigError(f"{FLAG}: model {name!r} is no class; write it as package.module:Class")
        drafter_cls = name if ":" in name else ":".join(name.rsplit(".", 1))
    elif name not in (None, method, f"[{method}]"):
        raise ConfigError(f"{FLAG}: {method} drafts without a model; leave out model {name!r}, or the method")
    most = _num_tokens(settings, method, drafter)
    logger.info("Speculation by %s, at most %d drafts of a request in a step", name or method, most)
    copied: dict[str, Any] = {key: settings[key] for key in _COPIED if key in settings}
    return Drafting(
        method=method,
        num_speculative_tokens=most,
        model=drafter,
        drafter_cls=drafter_cls,
        max_model_len=_max_model_len(settings, target, drafter),
        num_speculative_tokens_per_batch_size=_batch_sizes(settings, most),
        **copied | _lookup(settings),
    )


def _method_by_name(name: str | None) -> str | None:
    """Returns the method that the drafter's name gives away; None if its files must be looked at."""
    if name is None:
        return None
    if name in MODEL_FREE or (name[0] == "[" and name[1:-1] in MODEL_FREE):
        return name.strip("[]")
    if _CLASS.fullmatch(name) and not Path(name).exists():
        return "custom_class"
    return next((method for method in ("dflash", "dspark") if method in name.lower()), None)


def _method_by_config(raw: Mapping[str, Any]) -> str:
    kind = str(raw.get("model_type"))
    return kind if kind in _REFUSED_METHODS or kind.endswith("_mtp") else "draft_model"


def _drafter_config(settings: Mapping[str, Any], target: ModelConfig, method: str, directory: Path) -> ModelConfig:
    """Returns the drafter's ModelConfig, not yet resolved; what is not given is the target's."""
    quantization = settings.get("quantization")
    if quantization is None and method == "draft_model" and target.quantization in WEIGHT_BITS:
        is_plain = not (read_object(directory, "config.json") or {}).get("quantization_config")
        quantization = target.quantization if is_plain else None
    return ModelConfig(
        model=str(directory),
        served_model_name=settings["model"],
        dtype=target.dtype,
        model_impl=target.model_impl,
        quantization=quantization,
        generation_config="vllm",
    )


def _check_drafter(drafter: ModelConfig, target: ModelConfig, method: str) -> None:
    if drafter.pooling is not None:
        raise ConfigError(f"{FLAG}: {drafter.name} is a pooling model, which drafts no tokens")
    if method in HEADS:
        check_head(drafter.hf_config, target.hf_config)
    else:
        _check_vocabulary(drafter, target)


def _check_vocabulary(drafter: ModelConfig, target: ModelConfig) -> None:
    """Raises ConfigError unless ids mean the same in both tokenizers, so far as both have them.

    Special tokens may differ: they are added to a vocabulary, and a wrong draft of one is only rejected.
    """
    if drafter.tokenizer_dir == target.tokenizer_dir:
        return
    ours, theirs = (read_tokenizer_json(model.tokenizer_dir) for model in (target, drafter))
    if ours is None or theirs is None or ours.text == theirs.text:
        return
    ids, drafted = _tokens(ours.path, ours.text), _tokens(theirs.path, theirs.text)
    common = ids.keys() & drafted.keys()
    other = [i for i in common if ids[i] != drafted[i]]
    if other or not common:
        example = (
            f"token {min(other)} is {drafted[min(other)]!r} for {ids[min(other)]!r}" if other else "none is shared"
        )
        raise ConfigError(
            f"{FLAG}: {drafter.name} has another vocabulary than {target.name}: {example}; a drafter must have the "
            "model's tokens (the last may be missing), as smaller models of one family do"
        )


def _tokens(path: Path, text: str) -> dict[int, str]:
    """Returns the tokens of a tokenizer.json by id, without those that were added to the vocabulary."""
    try:
        content = json.loads(text)
        vocab = content["model"]["vocab"]
        items = vocab.items() if isinstance(vocab, dict) else ((item[0], i) for i, item in enumerate(vocab))
        added = {token["id"] for token in content.get("added_tokens") or ()}
        return {int(i): str(token) for token, i in items if i not in added}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as e:
        raise ModelLoadError(f"{path} has no vocabulary that can be read: {e!r}") from None


def _num_tokens(settings: Mapping[str, Any], method: str, drafter: ModelConfig | None) -> int:
    given: int | None = settings.get("num_speculative_tokens")
    predicted: int | None = drafter.hf_config.get("n_predict") if drafter is not None else None
    if method == "suffix" and given is None:
        depth: int = settings.get("suffix_decoding_max_tree_depth", Drafting.suffix_decoding_max_tree_depth)
        return min(depth, MAX_DRAFTS)
    most = predicted if given is None else given
    if most is None:
        raise ConfigError(f"{FLAG}: num_speculative_tokens is missing, the most drafts of a request in a step; try 4")
    if predicted is not None and most > predicted and most % predicted:
        raise ConfigError(
            f"{FLAG}: num_speculative_tokens {most} is no multiple of the n_predict {predicted} of the drafter"
        )
    return most


def _max_model_len(settings: Mapping[str, Any], target: ModelConfig, drafter: ModelConfig | None) -> int | None:
    is_model = drafter is not None and HEAD not in drafter.hf_config.raw  # a head's positions are the target's
    longest = min(target.model_len, drafter.model_len) if drafter is not None and is_model else target.model_len
    given = settings.get("max_model_len")
    if given is not None and given > longest:
        raise ConfigError(
            f"{FLAG}: max_model_len {given} is more than the {longest} tokens of the model and the drafter"
        )
    return longest if given is None and drafter is not None else given


def _lookup(settings: Mapping[str, Any]) -> dict[str, int]:
    low, high = settings.get("prompt_lookup_min"), settings.get("prompt_lookup_max")
    low, high = low or high or Drafting.prompt_lookup_min, high or low or Drafting.prompt_lookup_max
    if low > high:
        raise ConfigError(f"{FLAG}: prompt_lookup_min {low} is more than prompt_lookup_max {high}")
    return {"prompt_lookup_min": low, "prompt_lookup_max": high}


def _batch_sizes(settings: Mapping[str, Any], most: int) -> tuple[tuple[int, int, int], ...]:
    """Returns num_speculative_tokens_per_batch_size, its drafts at most `most`. Raises ConfigError."""
    key = "num_speculative_tokens_per_batch_size"
    rows, last = settings.get(key) or [], 0
    for row in rows if isinstance(rows, list | tuple) else [rows]:
        if not (isinstance(row, list | tuple) and len(row) == 3 and all(type(n) is int for n in row)):
            raise ConfigError(f"{FLAG}: {key} has {row!r}; write [[from, to, drafts], ...]")
        first, end, drafts = row
        if first <= last or first > end or drafts < 0 or (last == 0 and first != 1):
            rule = "it must begin at 1 request, and rows must not overlap" if drafts >= 0 else "drafts are 0 or more"
            raise ConfigError(f"{FLAG}: {key} has {list(row)} after {last}; {rule}")
        last = end
    return tuple((first, end, min(drafts, most)) for first, end, drafts in rows)

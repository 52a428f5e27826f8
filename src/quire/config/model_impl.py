"""Which code runs a model: Quire's own class, or transformers' modules on Quire's cache and kernels.

The choice is made from config.json, the registry's names and a table in the package, before torch is loaded: a core
that runs transformers' modules needs all of torch (`worker/lean_torch.py`).
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from quire.config.hf_config import HFConfig
from quire.config.pooling import PoolingConfig
from quire.resolve import resolve

QUIRE, TRANSFORMERS = "quire", "transformers"
CHOICES = ("auto", QUIRE, TRANSFORMERS, "vllm")
"""Values of --model-impl; "vllm", vLLM's name for its own models, means quire."""
TABLE = Path(__file__).resolve().parent.parent / "assets" / "transformers_models.toml"
RECURRENT_KINDS = frozenset({"conv", "hybrid", "linear_attention", "mamba", "mamba2", "recurrent"})
"""Types of layers in config.json that keep a state instead of keys and values."""
EXTRA = "pip install 'quire[transformers]'"
VERSIONS = ((5, 10), (6,))
"""Versions of transformers that can be used: from the first on, below the second."""


@dataclass(frozen=True, kw_only=True)
class ModelImpl:
    """The code that runs a model."""

    name: str = QUIRE
    """QUIRE or TRANSFORMERS."""
    why: str = "Quire has a class for this architecture"
    class_name: str = ""
    """The class of transformers, if it is that which runs the model."""
    refusal: str = ""
    """Not empty: the model cannot be run, and the reason with the remedy."""
    needs_trial: bool = False
    """True: nothing is known of this class with this version of transformers; it is tried when it is loaded."""


@dataclass(frozen=True)
class Verdict:
    """One row of the table: certified if `refused` is empty."""

    refused: str = ""


@functools.cache
def certified_models() -> tuple[str, Mapping[str, Verdict]]:
    """Returns the version of transformers that the table was made with, and its rows by architecture."""
    import tomllib  # most processes never need it

    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    rows = {name: Verdict(row.get("refused", "")) for name, row in table["models"].items()}
    return str(table["transformers"]), rows


def native_models() -> Mapping[str, str]:
    """Returns the classes of Quire's own by `HFConfig.family`."""
    return cast("Mapping[str, str]", resolve("quire.worker.models.registry:MODELS"))


def installed_transformers() -> str | None:
    """Returns the version of transformers that is installed, without importing it; None if there is none."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from importlib import metadata  # takes as long as 60 of our modules, and most processes never need it

    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def choose_model_impl(asked: str, hf: HFConfig, pooling: PoolingConfig | None = None) -> ModelImpl:
    """Returns the code that runs the model of `hf`. `asked` is --model-impl. A model that cannot be run is a result,
    too: `quire info` shows it."""
    is_native = hf.family in native_models()
    if asked in (QUIRE, "vllm") or (asked == "auto" and is_native):
        return ModelImpl() if is_native else ModelImpl(why="asked for", refusal=_not_native(hf))
    class_name = hf.architecture if hf.architecture in certified_models()[1] else hf.family
    why = "asked for" if asked == TRANSFORMERS else "Quire has no class for this architecture"
    if kinds := _recurrent_layers(hf):
        refusal = (
            f"{hf.architecture} has layers that keep recurrent states ({kinds}), which Quire does not run yet; use a "
            "model whose layers are all attention, such as Qwen3, Gemma 4 or gpt-oss: `quire models` lists them"
        )
        return ModelImpl(name=TRANSFORMERS, why=why, class_name=class_name, refusal=refusal)
    refusal, needs_trial = _refusal(class_name, hf, pooling)
    if refusal and asked == "auto":
        refusal = f"{_not_native(hf)}. Transformers' class cannot take its place: {refusal}"
    return ModelImpl(name=TRANSFORMERS, why=why, class_name=class_name, refusal=refusal, needs_trial=needs_trial)


def _recurrent_layers(hf: HFConfig) -> str:
    """Returns the kinds of a model's layers, or of its text part's, that keep recurrent states; empty if none does."""
    text = hf.get("text_config")
    keys = text if isinstance(text, dict) else hf.raw
    listed: list[Any] = next(
        (keys[key] for key in ("layer_types", "layers_block_type") if isinstance(keys.get(key), list)), []
    )
    kinds = [str(kind) for kind in listed if kind in RECURRENT_KINDS]
    name = hf.architecture.replace("ForConditionalGeneration", "ForCausalLM")
    verdict = certified_models()[1].get(name, Verdict()) if not kinds else Verdict()
    return ", ".join(sorted(set(kinds))) or ("by its class" if "recurrent states" in verdict.refused else "")


def _not_native(hf: HFConfig) -> str:
    hint = hint_of_names(hf.architecture, native_models())
    return f"architecture {hf.architecture!r} is not implemented; {hint}"


def hint_of_names(architecture: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown architecture: similar names, or all, and how to add one."""
    names = sorted(known)
    near = difflib.get_close_matches(architecture, names, n=3)
    hint = f"similar ones are {', '.join(near)}" if near else f"known are {', '.join(names)}"
    return f"{hint}; docs/recipes/add_a_model.md shows how to add one"


def _refusal(class_name: str, hf: HFConfig, pooling: PoolingConfig | None) -> tuple[str, bool]:
    """Returns why transformers' class cannot run the model (empty: it can), and whether it must be tried first."""
    made_with, rows = certified_models()
    verdict = rows.get(class_name)
    found = installed_transformers()
    if found is None:
        if verdict is not None and verdict.refused:
            return f"{class_name} is refused: {verdict.refused}", False
        return f"transformers is not installed; {EXTRA}", False
    if not VERSIONS[0] <= _numbers(found) < VERSIONS[1]:
        return f"transformers {found} is installed, and 5.10 or later, below 6, is needed; {EXTRA}", False
    if found == made_with and verdict is not None and verdict.refused:
        return f"{class_name} is refused: {verdict.refused}", False
    if hf.get("quantization_config"):
        return (
            "the checkpoint's weights are quantized, which only Quire's own classes read; use an unquantized one",
            False,
        )
    if pooling is not None and (pooling.head != "embed" or pooling.pooling_type != "last"):
        return "it pools by the last token only (--runner pooling with an embedding model)", False
    return "", found != made_with or verdict is None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())
